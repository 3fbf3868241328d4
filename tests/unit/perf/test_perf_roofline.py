"""The roofline: worked figures with every efficiency at 1 and no overhead, then what the terms must do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.errors import ConfigError
from twin.perf.coefficients import Block, Coefficients, block_for, named_block
from twin.perf.costs import distinct_experts, smax
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.memory import Placement
from twin.perf.models import find_model
from twin.perf.protocol import FOREVER_STEPS, PrefillChunk
from twin.perf.roofline import RooflineLatency

IDEAL = Coefficients(
    e_bw=1, e_gemm=1, e_moe_bw=1, e_moe=1, e_kv=1, e_attn=1, alpha_s=0, e_link=1, t_launch_s=0, expert_imbalance=0
)
WORKED = 1e-4


def ideal(**changes: float) -> Block:
    values = replace(IDEAL, **changes)
    return Block(
        label="ideal", engine=None, family=None, engine_version=None, origin="test", error_band=None, values=values
    )


def place(model: str, gpu: str, *, weights: str = "bf16", kv: str = "bf16", **layout: int) -> Placement:
    return Placement(model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**layout), weights=weights, kv=kv)


def model(name: str, gpu: str = "h100_sxm", block: Block | None = None, **how: object) -> RooflineLatency:
    placed = place(name, gpu, **how)  # type: ignore[arg-type]
    return RooflineLatency(placed, block or block_for("vllm", placed.gpu.family))


def prompt(new: int, past: int = 0, recomputed: int = 0, *, ends: bool = True) -> PrefillChunk:
    return PrefillChunk(new, past, recomputed, ends)


LLAMA = model("llama-3.1-70b", tp=4, block=ideal())


def about(value: float) -> object:
    return pytest.approx(value, rel=WORKED)


def test_weights_of_a_rank() -> None:
    llama = find_model("llama-3.1-70b")
    assert llama.dense_params() == 68_451_041_280
    assert llama.head_params() == 1_050_673_152
    assert LLAMA.costs.weights_s * 3.35e12 == about(34_750_857_216)
    assert 1e3 * LLAMA.costs.weights_s == about(10.3734)


def test_decode_reads_kv_of_the_whole_batch() -> None:
    parts = LLAMA.parts([], 32, 32 * 4000, 0, 0)
    assert parts.attention_decode_s * 3.35e12 == about(10_485_760_000)
    assert 1e3 * parts.attention_decode_s == about(3.1301)


def test_decode_products_are_hidden_behind_the_weights() -> None:
    multiply_s = 32 * (LLAMA.costs.token_s + LLAMA.costs.sample_s)
    assert multiply_s * 989.4e12 == about(1.112027e12)
    assert 1e3 * multiply_s == about(1.1239)
    gemm_s = LLAMA.parts([], 32, 32 * 4000, 0, 0).gemm_s
    assert gemm_s == smax(LLAMA.costs.weights_s, multiply_s)
    assert gemm_s == pytest.approx(LLAMA.costs.weights_s, rel=1e-3)


def test_all_reduces_of_a_decode_step() -> None:
    assert 1e3 * LLAMA.parts([], 32, 32 * 4000, 0, 0).comm_s == about(0.2796)


def test_a_lone_prompt() -> None:
    parts = LLAMA.parts([prompt(4096)], 0, 0, 0, 0)
    assert 1e3 * 4096 * LLAMA.costs.token_s == about(141.690)
    assert parts.gemm_s == pytest.approx(4096 * LLAMA.costs.token_s, rel=2e-4)  # a little more: the weights
    assert 1e3 * parts.attention_prefill_s == about(5.558)
    assert parts.attention_prefill_s == about(8_390_656 * LLAMA.costs.pair_s)
    assert 1e3 * parts.comm_s == about(35.79)


@pytest.mark.parametrize(
    ("count", "per_token", "tokens", "distinct"),
    [
        (256, 8, 1, 8),
        (256, 8, 4, 30.53),
        (256, 8, 16, 101.96),
        (256, 8, 64, 222.44),
        (256, 8, 256, 255.92),
        (128, 8, 8, 51.62),
        (128, 4, 64, 111.22),
        (512, 10, 64, 367.11),
        (8, 2, 4, 5.47),
    ],
)
def test_distinct_experts(count: int, per_token: int, tokens: int, distinct: float) -> None:
    assert distinct_experts(count, per_token, tokens) == pytest.approx(distinct, abs=5e-3)


@pytest.mark.parametrize(("batch", "read_bytes"), [(1, 3.624e9), (8, 23.383e9), (64, 57.050e9)])
def test_expert_bytes_of_a_decode_step(batch: int, read_bytes: float) -> None:
    # Compute at 1e9 times the rate leaves reading alone in the smooth maximum.
    qwen = model("qwen3-30b-a3b", block=ideal(e_moe=1e9))
    assert qwen.parts([], batch, batch * 100, 0, 0).experts_s * 3.35e12 == about(read_bytes)


def test_expert_products_and_their_imbalance() -> None:
    even = model("qwen3-30b-a3b", block=ideal(e_moe_bw=1e9))
    flops = 6 * 2048 * 768 * 8 * 48 * 4096
    assert even.parts([prompt(4096)], 0, 0, 0, 0).experts_s == about(flops / 989.4e12)
    uneven = model("qwen3-30b-a3b", block=ideal(e_moe_bw=1e9, expert_imbalance=1))
    factor = 1 + math.sqrt((128 / 1 - 1) / (4096 * 8 / 1))
    assert uneven.parts([prompt(4096)], 0, 0, 0, 0).experts_s == about(flops / 989.4e12 * factor)


def test_prior_context_is_priced() -> None:
    first, second = LLAMA.step_s([prompt(4096)], 0, 0, 0, 0), LLAMA.step_s([prompt(4096, past=4096)], 0, 0, 0, 0)
    assert second - first == pytest.approx(4096 * 4096 * LLAMA.costs.pair_s, rel=1e-9)


def test_a_step_has_as_many_attention_pairs_as_the_prompt_it_completes() -> None:
    whole = LLAMA.parts([prompt(9000)], 0, 0, 0, 0).attention_prefill_s
    chunks = [prompt(8192, ends=False), prompt(808, past=8192)]
    assert sum(LLAMA.parts([chunk], 0, 0, 0, 0).attention_prefill_s for chunk in chunks) == pytest.approx(whole)


def test_a_mixed_step_is_cheaper_than_two_steps_and_dearer_than_either() -> None:
    real = model("llama-3.1-70b", tp=4, weights="fp8")
    alone = real.step_s([prompt(512)], 0, 0, 0, 0)
    decode = real.step_s([], 16, 16_000, 0, 0)
    mixed = real.step_s([prompt(512)], 16, 16_000, 0, 0)
    assert max(alone, decode) < mixed < alone + decode


def test_recomputed_tokens_are_prefill_work() -> None:
    assert LLAMA.step_s([prompt(100, recomputed=28)], 0, 0, 1, 128) == LLAMA.step_s([prompt(128)], 0, 0, 0, 0)


def test_a_resumed_request_is_not_counted_twice() -> None:
    with_it = LLAMA.parts([prompt(0, past=100, recomputed=28)], 4, 400, 1, 128)
    as_prompt = LLAMA.parts([prompt(28, past=100)], 4, 400, 0, 0)
    assert with_it == as_prompt


def test_a_resumed_request_without_work_of_its_own_decodes() -> None:
    assert LLAMA.step_s([], 0, 0, 1, 128) == LLAMA.step_s([], 1, 128, 0, 0)
    assert LLAMA.step_s([prompt(64)], 2, 300, 2, 256) == LLAMA.step_s([prompt(64)], 3, 428, 1, 128)


def test_an_empty_step_takes_no_time() -> None:
    assert LLAMA.step_s([], 0, 0, 0, 0) == 0.0
    assert LLAMA.parts([], 0, 0, 0, 0).total_s == 0.0


def test_pure_decode_is_linear_in_context_for_ever() -> None:
    piece = LLAMA.decode_piece(32, 128_000)
    assert piece.steps == FOREVER_STEPS
    assert piece.g2 == 0.0
    assert piece.g0 == LLAMA.step_s([], 32, 128_000, 0, 0)
    assert piece.g1 == pytest.approx(32 * LLAMA.costs.ctx_token_s)


def test_window_layers_stop_growing_at_their_window() -> None:
    oss = model("gpt-oss-120b", weights="mxfp4", block=ideal())
    assert oss.decode_piece(4, 4 * 100).steps == 28
    below, above = oss.decode_piece(4, 4 * 100).g1, oss.decode_piece(4, 4 * 128).g1
    assert below == pytest.approx(2 * above)  # as many layers with a window as without
    assert oss.decode_piece(4, 4 * 128).steps == FOREVER_STEPS


def test_window_layers_price_the_pairs_inside_the_window() -> None:
    oss = model("gpt-oss-120b", weights="mxfp4", block=ideal())
    pairs = sum(min(i, 128) for i in range(101, 601))
    full = sum(range(101, 601))
    expected = oss.costs.pair_s * full + oss.costs.window_pair_s * pairs
    assert oss.parts([prompt(500, past=100)], 0, 0, 0, 0).attention_prefill_s == pytest.approx(expected)


def test_sparse_attention_reads_its_best_tokens_only() -> None:
    glm = model("glm-5", gpu="b200_sxm", weights="fp8", tp=8, block=ideal())
    short = glm.decode_piece(1, 2000).g1
    long = glm.decode_piece(1, 20_000).g1
    assert long == pytest.approx(78 * 128 / 7.7e12)
    assert short > 5 * long


def test_linear_layers_read_and_write_their_state() -> None:
    qwen = model("qwen3.5-397b-a17b", gpu="b200_sxm", weights="fp8", tp=8, block=ideal())
    state_bytes = 2 * 45 * (64 * 128 * 128 + 3 * (2 * 16 * 128 + 64 * 128)) / 8
    assert qwen.costs.sequence_s == pytest.approx(2 * state_bytes / 7.7e12)


def test_latent_attention_decodes_from_the_latent() -> None:
    deepseek = model("deepseek-v3", gpu="h200_sxm", weights="fp8", tp=8, block=ideal())
    read_s = 70_272 / 4.8e12
    multiply_s = 61 * 2 * 128 / 8 * (2 * 512 + 64) / 989.4e12
    assert deepseek.costs.ctx_token_s == pytest.approx(smax(read_s, multiply_s))
    assert deepseek.costs.pair_s == pytest.approx(61 * 2 * 128 / 8 * (128 + 64 + 128) / 989.4e12)


def test_pipeline_stages_add_up_for_one_token() -> None:
    flat = model("llama-3.1-405b", weights="fp8", tp=8, block=ideal())
    staged = model("llama-3.1-405b", weights="fp8", tp=8, pp=2, block=ideal())
    sent_s = 16 * 16384 * 2 / 50e9  # 16 GPUs: the send leaves the host
    assert staged.step_s([], 16, 16_000, 0, 0) == pytest.approx(flat.step_s([], 16, 16_000, 0, 0) + sent_s)


def test_a_group_across_hosts_pays_the_network() -> None:
    inside = model("llama-3.1-405b", tp=8, block=ideal()).costs.links.token_s
    across = model("llama-3.1-405b", tp=16, block=ideal()).costs.links.token_s
    assert across - inside == pytest.approx(2 * 126 * 2 * (1 / 2) * 16384 * 2 / 8 / 50e9)
    rack = model("llama-3.1-405b", gpu="gb200", tp=16, block=ideal()).costs.links.token_s
    assert rack == pytest.approx(2 * 126 * 2 * (15 / 16) * 16384 * 2 / 900e9)


def test_attention_data_parallelism_shares_the_batch_and_waits_for_the_fullest_rank() -> None:
    spread = model("deepseek-v3", gpu="h200_sxm", weights="fp8", dp=8, ep=8, block=ideal())
    nine, sixteen = spread.parts([], 9, 9 * 1000, 0, 0), spread.parts([], 16, 16 * 1000, 0, 0)
    assert nine.attention_decode_s == pytest.approx(sixteen.attention_decode_s)  # two on the fullest rank
    assert nine.comm_s == sixteen.comm_s > 0
    assert nine.experts_s < sixteen.experts_s  # experts see every token of the group
    assert spread.decode_piece(9, 9000).g0 == pytest.approx(nine.total_s)


def test_data_parallel_ranks_without_expert_parallelism_gather_and_scatter() -> None:
    spread = model("qwen3-235b-a22b", weights="fp8", dp=4, ep=1, block=ideal())
    assert spread.costs.links.group_token_s == pytest.approx(94 * 2 * 4096 * 2 * (3 / 4) / 450e9)
    assert spread.costs.links.token_s == 0.0


def test_a_longest_prompt_stays_on_its_rank() -> None:
    spread = model("deepseek-v3", gpu="h200_sxm", weights="fp8", dp=8, ep=8, block=ideal())
    lone = spread.parts([prompt(4096)], 0, 0, 0, 0)
    with_others = spread.parts([prompt(4096)] + [prompt(512)] * 7, 0, 0, 0, 0)
    assert lone.gemm_s == pytest.approx(with_others.gemm_s, rel=1e-3)
    assert lone.attention_prefill_s == with_others.attention_prefill_s


def test_host_costs_and_per_layer_costs_add_up() -> None:
    busy = model("llama-3.1-70b", tp=4, block=ideal(h0_s=1.0, h_seq_s=0.5, h_prefill_s=7.0, t_launch_s=0.1))
    assert busy.parts([], 4, 4000, 0, 0).host_s == 3.0
    assert busy.parts([prompt(10)], 4, 4000, 0, 0).host_s == 1.0 + 5 * 0.5 + 7.0
    assert busy.parts([], 4, 4000, 0, 0).layers_s == pytest.approx(8.0)
    slower = model("llama-3.1-70b", tp=4, block=ideal(m_decode=2.0, m_prefill=3.0))
    assert slower.step_s([], 4, 4000, 0, 0) == pytest.approx(2 * LLAMA.step_s([], 4, 4000, 0, 0))
    assert slower.step_s([prompt(10)], 4, 4000, 0, 0) == pytest.approx(3 * LLAMA.step_s([prompt(10)], 4, 4000, 0, 0))


def test_a_host_that_overlaps_counts_where_it_is_the_slower_one() -> None:
    """Device 13.8 ms for 32 requests of 4,000 tokens: a host of 10 ms is hidden, one of 20 ms is the step."""
    for h0_s, step_ms in ((0.010, 13.7875), (0.020, 20.0)):
        placed = place("llama-3.1-70b", "h100_sxm", tp=4)
        one = RooflineLatency(placed, ideal(h0_s=h0_s), overlap=True)
        assert 1e3 * one.step_s([], 32, 32 * 4000, 0, 0) == about(step_ms)
        assert one.parts([], 32, 32 * 4000, 0, 0).total_s == pytest.approx(one.step_s([], 32, 32 * 4000, 0, 0))
    assert one.parts([], 32, 32 * 4000, 0, 0).host_s == pytest.approx(0.020 - 0.0137875, rel=1e-3)
    assert one.decode_piece(32, 32 * 4000).g1 == 0.0
    assert any("overlap scheduling" in note for note in one.provenance.notes)
    assert 1e3 * one.step_s([prompt(4096)], 0, 0, 0, 0) == about(1e3 * LLAMA.step_s([prompt(4096)], 0, 0, 0, 0))


def test_half_rate_at_few_tokens() -> None:
    slow = model("llama-3.1-70b", tp=4, block=ideal(t_half_tokens=4096))
    assert slow.parts([prompt(4096)], 0, 0, 0, 0).gemm_s == pytest.approx(2 * 4096 * LLAMA.costs.token_s, rel=1e-3)


def test_the_client_is_not_part_of_a_step() -> None:
    with_client = model("llama-3.1-70b", tp=4, block=ideal(client_s=9.0))
    assert with_client.step_s([prompt(10)], 0, 0, 0, 0) == LLAMA.step_s([prompt(10)], 0, 0, 0, 0)
    assert any("client and server path not included" in note for note in with_client.provenance.notes)


def test_coefficients_follow_engine_and_gpu_family() -> None:
    assert block_for("vllm", "hopper").label == "vllm-hopper"
    assert block_for("trtllm", "blackwell").label == "trtllm-blackwell"
    assert block_for("vllm", "cdna3").label == "generic"
    assert block_for("vllm", "hopper").values.h_prefill_s == 0.023
    assert block_for("sglang", "hopper").values.h0_s == 0.0042


def test_the_provenance_of_the_default_cluster() -> None:
    default = model("llama-3.1-70b", tp=4, weights="fp8")
    assert default.provenance.line() == (
        "roofline · llama-3.1-70b fp8 on h100_sxm TP4, bf16 KV · coefficients vllm-hopper (priors, not calibrated here)"
        " · engine vLLM 0.12-0.18 mixed"
        " · error band not calibrated here (an uncalibrated prototype was off by 14 % TPOT and 45 % TTFT at the median)"
    )
    generic = model("llama-3.1-8b", gpu="mi300x")
    assert any("generic ones" in note for note in generic.provenance.notes)


def test_a_mistyped_block_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm-hopper'"):
        named_block("vllm-hoper")
