"""What fits: the worked sizes, the pool of the default cluster, and refusals with their two numbers."""

from __future__ import annotations

import pytest

from policies.errors import CapabilityError, ConfigError
from twin.perf.adapters import Adapters
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout, rank_weight_bytes, stages
from twin.perf.memory import GIB, Placement, kv_pool, kv_pool_tokens, kv_shape
from twin.perf.models import find_model


def place(model: str, gpu: str, *, weights: str = "bf16", kv: str = "bf16", **layout: int) -> Placement:
    return Placement(model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**layout), weights=weights, kv=kv)


@pytest.mark.parametrize(
    ("model", "by_tp"),
    [
        ("llama-3.1-70b", {1: 327_680, 2: 163_840, 4: 81_920, 8: 40_960, 16: 40_960}),
        ("qwen3-235b-a22b", {1: 192_512, 2: 96_256, 4: 48_128, 8: 48_128, 16: 48_128}),
        ("deepseek-v3", {1: 70_272, 8: 70_272, 16: 70_272}),
    ],
)
def test_kv_is_split_down_to_one_head_and_repeated_beyond(model: str, by_tp: dict[int, int]) -> None:
    assert {tp: kv_shape(find_model(model), tp=tp).full_bytes for tp in by_tp} == by_tp


def test_latent_kv_in_fp8() -> None:
    model = find_model("deepseek-v3")
    assert kv_shape(model, "fp8").full_bytes == 35_136
    assert kv_shape(model, "fp8_ds_mla").full_bytes == 61 * 656


def test_window_layers_hold_their_window() -> None:
    shape = kv_shape(find_model("gpt-oss-120b"))
    assert shape.sequence_bytes(4096) == 155_713_536
    assert 4096 * (shape.full_bytes + shape.window_bytes) == 301_989_888


def test_linear_layers_hold_a_state() -> None:
    shape = kv_shape(find_model("qwen3.5-397b-a17b"))
    conv_bytes = 2 * 45 * (2 * 16 * 128 + 64 * 128) * 3
    assert shape.sequence_bytes(8192) == 251_658_240 + 94_371_840 + conv_bytes


def test_kv_of_a_prompt_over_the_network() -> None:
    kv_bytes = kv_shape(find_model("llama-3.1-70b")).sequence_bytes(4000)
    nic = find_gpu("h100_sxm").network_bytes_per_s()
    assert kv_bytes == 1_310_720_000
    assert 1e3 * kv_bytes / (8 * nic) == pytest.approx(3.28, abs=5e-3)
    assert 1e3 * kv_bytes / nic == pytest.approx(26.2, abs=5e-2)


def test_the_pool_of_an_8b_model() -> None:
    pool = kv_pool(place("llama-3.1-8b", "h100_sxm"), engine="vllm", block_size=16)
    assert pool.room_bytes == 58_223_851_929
    assert (pool.room_tokens, pool.blocks) == (444_212, 27_763)


def test_the_pool_of_the_default_cluster() -> None:
    tokens = kv_pool_tokens(
        engine="vllm", model="llama-3.1-70b", gpu="h100_sxm", tp=4, weights="fp8", kv="bf16", block_size=16
    )
    assert tokens == 686_144 == 42_884 * 16
    assert tokens == pytest.approx(690_000, rel=0.01)


@pytest.mark.parametrize(
    ("placed", "tokens"),
    [
        (place("llama-3.1-8b", "h100_sxm"), 432_992),
        (place("llama-3.1-70b", "h100_sxm", tp=4), 454_016),
        (place("llama-3.1-70b", "h100_sxm", tp=8), 1_338_649),
        (place("qwen3-32b", "h200_sxm", tp=2), 751_550),
        (place("deepseek-v3", "h200_sxm", tp=8, ep=8, weights="fp8", kv="fp8_ds_mla"), 1_127_011),
    ],
)
def test_pools_are_near_those_of_another_estimator(placed: Placement, tokens: int) -> None:
    """Not truth, a sanity band of 10 %: the figures are aiconfigurator's."""
    assert kv_pool(placed, engine="vllm", block_size=16).tokens == pytest.approx(tokens, rel=0.10)


def test_engines_divide_memory_in_their_own_way() -> None:
    placed = place("llama-3.1-8b", "h100_sxm")
    mem_bytes, weights = placed.gpu.mem_bytes, 2 * placed.model.params()
    sglang = kv_pool(placed, engine="sglang", block_size=1)
    assert sglang.room_bytes == int(mem_bytes * 0.88 - weights)
    trtllm = kv_pool(placed, engine="trtllm", block_size=32)
    assert trtllm.room_bytes == int((mem_bytes - weights - 2.5 * GIB) * 0.9)
    given = kv_pool(placed, engine="vllm", block_size=16, gpu_memory_utilization=0.5, non_kv_bytes=GIB)
    assert given.room_bytes == int(mem_bytes * 0.5 - weights - GIB)


def test_the_tightest_pipeline_stage_decides() -> None:
    placed = place("llama-3.1-405b", "h100_sxm", weights="fp8", tp=4, pp=4)
    pool = kv_pool(placed, engine="vllm", block_size=16)
    assert [stage.layers for stage in stages(placed.model, 4)] == [31, 32, 31, 32]
    assert pool.token_bytes == 32 * 2 * 2 * 128 * 2  # a stage of 32 layers, 2 of 8 heads
    assert pool.weight_bytes == max(
        int(rank_weight_bytes(placed.model, placed.layout, "fp8", stage)) for stage in stages(placed.model, 4)
    )


def test_data_parallel_ranks_each_have_a_pool() -> None:
    one = kv_pool(place("deepseek-v3", "h200_sxm", weights="fp8", tp=8, ep=8), engine="vllm", block_size=64)
    spread = kv_pool(place("deepseek-v3", "h200_sxm", weights="fp8", dp=8, ep=8), engine="vllm", block_size=64)
    assert spread.tokens > 5 * one.tokens


def test_windows_are_set_aside_for_every_sequence() -> None:
    placed = place("gpt-oss-120b", "h100_sxm", weights="mxfp4")
    few = kv_pool(placed, engine="vllm", block_size=16, max_num_seqs=16)
    many = kv_pool(placed, engine="vllm", block_size=16, max_num_seqs=512)
    assert few.room_bytes - many.room_bytes == (512 - 16) * (128 + 16) * 36_864
    assert few.token_bytes == 36_864


def test_a_model_with_windows_only_is_sized_as_if_it_had_none() -> None:
    pool = kv_pool(place("mistral-7b-v0.1", "h100_sxm"), engine="vllm", block_size=16)
    assert pool.token_bytes == 131_072


def test_checkpoints_keep_some_modules_in_16_bits() -> None:
    stage = next(stages(find_model("gpt-oss-120b"), 1))
    oss, kimi = find_model("gpt-oss-120b"), find_model("kimi-k2")
    mxfp4 = rank_weight_bytes(oss, Layout(), "mxfp4", stage)
    rest = oss.attention_params() + oss.embedding_params()
    expected = oss.expert_params() * 0.53125 + oss.mlp_params() * 0.53125 + 2 * rest + 2 * oss.norm_params()
    assert mxfp4 == pytest.approx(expected)
    stage = next(stages(kimi, 1))
    all_nvfp4 = 0.5625 * kimi.params(norms=False) + 2 * kimi.norm_params()
    assert rank_weight_bytes(kimi, Layout(), "nvfp4", stage) == pytest.approx(
        all_nvfp4 + (2 - 0.5625) * kimi.attention_params()
    )


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        kv_pool(place("llama-3.1-70b", "h100_sxm"), engine="vllm", block_size=16)
    text = str(refused.value)
    assert "needs 131.4 GiB for weights" in text
    assert "has 69.2 GiB for them" in text
    assert "raise tp or pp" in text


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("qwen2.5-7b", {"tp": 8}, "28 attention heads, which tp = 8 does not divide"),
        ("llama-3.1-8b", {"pp": 33}, "32 layers, fewer than pp = 33"),
        ("llama-3.1-8b", {"tp": 2, "ep": 2}, "no experts, so ep = 2 has no effect"),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 4}, r"ep = 4 must divide tp\*dp = 2"),
        ("mixtral-8x7b", {"tp": 16, "ep": 16}, r"ep = 16 must divide tp\*dp = 16 and the 8 experts"),
    ],
)
def test_illegal_layouts_are_refused(model: str, layout: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_pool(place(model, "h100_sxm", **layout), engine="vllm", block_size=16)


def test_no_gpu_at_all() -> None:
    with pytest.raises(ConfigError, match="tp = 0"):
        Layout(tp=0)


@pytest.mark.parametrize("share", [0.0, 1.2])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        kv_pool(place("llama-3.1-8b", "h100_sxm"), engine="vllm", block_size=16, gpu_memory_utilization=share)


def test_unknown_formats_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="weight format 'fp6' is not known"):
        kv_pool(place("llama-3.1-8b", "h100_sxm", weights="fp6"), engine="vllm", block_size=16)
    with pytest.raises(ConfigError, match="KV format 'fp8_e5' is not known; did you mean 'fp8'"):
        kv_pool(place("llama-3.1-8b", "h100_sxm", kv="fp8_e5"), engine="vllm", block_size=16)


# ---------------------------------------------------------------- adapters


def test_an_adapter_of_an_8b_model_has_42_million_weights() -> None:
    """By hand, one layer: q 4096 + 4096, k and v 4096 + 1024 each, o 4096 + 4096, three of 4096 + 14336."""
    model = find_model("llama-3.1-8b")
    assert 8192 + 2 * 5120 + 8192 + 3 * 18_432 == 81_920
    one = Adapters(count=1, rank=16).rank_bytes(model, Layout(), next(stages(model, 1)))
    assert one == 2 * 16 * 32 * 81_920 == 2 * 41_943_040


def test_ranks_split_the_side_of_an_adapter_that_its_projection_splits() -> None:
    """TP 4: q 4096 + 1024, k and v 4096 + 256 each, o 1024 + 4096, gate and up 4096 + 3584 each, down 3584 + 4096."""
    model = find_model("llama-3.1-8b")
    split = Adapters(count=3, rank=8).rank_bytes(model, Layout(tp=4), next(stages(model, 1)))
    assert split == 3 * 2 * 8 * 32 * (5120 + 2 * 4352 + 5120 + 3 * 7680)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_adapters_take_their_memory_from_the_pool(engine: str) -> None:
    placed = place("llama-3.1-8b", "h100_sxm")
    plain = kv_pool(placed, engine=engine, block_size=16)
    eight = kv_pool(placed, engine=engine, block_size=16, adapters=Adapters(count=8, rank=64))
    taken = 8 * 4 * 2 * 41_943_040 * (0.9 if engine == "trtllm" else 1.0)  # TensorRT-LLM gives KV a share of the rest
    assert plain.room_bytes - eight.room_bytes == pytest.approx(taken, abs=1)
    assert plain.tokens - eight.tokens == pytest.approx(taken / plain.token_bytes, abs=16)


def test_adapters_that_leave_no_room_are_named_in_the_refusal() -> None:
    with pytest.raises(ConfigError, match=r"beside 64\.\d GiB of adapters"):
        kv_pool(place("llama-3.1-8b", "h100_sxm"), engine="vllm", block_size=16, adapters=Adapters(count=103, rank=128))


def test_what_adapters_of_latent_attention_take_is_not_guessed() -> None:
    placed = place("deepseek-v3", "h200_sxm", weights="fp8", tp=8, ep=8)
    with pytest.raises(CapabilityError, match=r"give engine\.kv_blocks"):
        kv_pool(placed, engine="vllm", block_size=64, adapters=Adapters(count=1, rank=16))
