"""Laws that every cost of the roofline and of memory keeps: more work is never quicker, less hardware never faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.errors import ConfigError
from twin.perf.coefficients import Block, Coefficients, block_for, named_block
from twin.perf.costs import distinct_experts, smax
from twin.perf.hardware import find_gpu, gpus
from twin.perf.layout import Layout, rank_weight_bytes, stages
from twin.perf.memory import KvPool, Placement, kv_pool, kv_shape
from twin.perf.models import find_model, models
from twin.perf.protocol import PrefillChunk
from twin.perf.roofline import RooflineLatency

PLACES = {
    "dense": ("llama-3.1-70b", "h100_sxm", {"tp": 4}),
    "experts": ("qwen3-235b-a22b", "h100_sxm", {"tp": 8, "ep": 8}),
    "windows": ("gpt-oss-120b", "h100_sxm", {"tp": 2}),
    "latent": ("deepseek-v3", "h200_sxm", {"tp": 8}),
    "sparse": ("glm-5", "b200_sxm", {"tp": 8}),
    "linear": ("qwen3.5-397b-a17b", "mi300x", {"tp": 8}),
    "pipeline": ("llama-3.1-405b", "h100_sxm", {"tp": 8, "pp": 2}),
    "data parallel": ("deepseek-v3", "h200_sxm", {"dp": 8, "ep": 8}),
}
ONE_RANK = sorted(set(PLACES) - {"data parallel"})

places = st.sampled_from(sorted(PLACES))
chunks = st.lists(
    st.builds(PrefillChunk, st.integers(0, 4000), st.integers(0, 60_000), st.integers(0, 500), st.booleans()),
    max_size=4,
)
batches = st.integers(0, 256)
lengths = st.integers(1, 30_000)


def placed(name: str) -> Placement:
    model, gpu, layout = PLACES[name]
    return Placement(model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**layout), weights="fp8", kv="bf16")


def built(place: Placement, block: Block | None = None) -> RooflineLatency:
    return RooflineLatency(place, block or block_for("vllm", place.gpu.family))


@cache
def model(name: str, *, overlap: bool = False) -> RooflineLatency:
    place = placed(name)
    return RooflineLatency(place, block_for("vllm", place.gpu.family), overlap=overlap)


@given(name=places, work=chunks, batch=batches, length=lengths, more=st.integers(0, 1000), at=st.integers(0, 3))
def test_more_prompt_or_more_prior_context_is_never_quicker(
    name: str, work: list[PrefillChunk], batch: int, length: int, more: int, at: int
) -> None:
    assume(work)
    i = at % len(work)
    base = model(name).step_s(work, batch, batch * length, 0, 0)
    for grown in (
        work[i]._replace(new_tokens=work[i].new_tokens + more),
        work[i]._replace(past_tokens=work[i].past_tokens + more),
        work[i]._replace(recomputed_tokens=work[i].recomputed_tokens + more),
    ):
        bigger = [*work[:i], grown, *work[i + 1 :]]
        assert model(name).step_s(bigger, batch, batch * length, 0, 0) >= base * (1 - 1e-12)


@given(name=st.sampled_from(ONE_RANK), work=chunks, batch=batches, ctx=st.integers(0, 10**7), more=st.integers(1, 64))
def test_more_decodes_or_more_context_is_never_quicker(
    name: str, work: list[PrefillChunk], batch: int, ctx: int, more: int
) -> None:
    ctx = ctx if batch else 0
    base = model(name).step_s(work, batch, ctx, 0, 0)
    assert model(name).step_s(work, batch + more, ctx, 0, 0) >= base * (1 - 1e-12)
    if batch:
        assert model(name).step_s(work, batch, ctx + 1000 * more, 0, 0) >= base * (1 - 1e-12)


@given(work=chunks, batch=batches, length=lengths, more=st.integers(1, 64))
def test_more_requests_of_the_same_length_are_never_quicker_on_data_parallel_ranks(
    work: list[PrefillChunk], batch: int, length: int, more: int
) -> None:
    base = model("data parallel").step_s(work, batch, batch * length, 0, 0)
    grown = model("data parallel").step_s(work, batch + more, (batch + more) * length, 0, 0)
    assert grown >= base * (1 - 1e-12)


@given(name=places, work=chunks, batch=batches, length=lengths, share=st.floats(0.1, 1.0))
def test_slower_hardware_is_never_faster(
    name: str, work: list[PrefillChunk], batch: int, length: int, share: float
) -> None:
    place = placed(name)
    gpu = place.gpu
    base = model(name).step_s(work, batch, batch * length, 0, 0)
    less_bandwidth = replace(gpu, mem_bytes_per_s=gpu.mem_bytes_per_s * share)
    less_math = replace(
        gpu, bf16_flops=gpu.bf16_flops * share, fp8_flops=(gpu.fp8_flops or 0) * share, fp4_flops=None, int8_flops=None
    )
    assert gpu.scale_up_bytes_per_s is not None
    slower_links = replace(gpu, scale_up_bytes_per_s=gpu.scale_up_bytes_per_s * share)
    for slower in (less_bandwidth, less_math, slower_links):
        time_s = built(replace(place, gpu=slower)).step_s(work, batch, batch * length, 0, 0)
        assert time_s >= base * (1 - 1e-12)


@given(name=places, work=chunks, batch=batches, length=lengths, resumed=st.integers(0, 3), overlap=st.booleans())
def test_parts_add_up_to_the_step(
    name: str, work: list[PrefillChunk], batch: int, length: int, resumed: int, overlap: bool
) -> None:
    ctx, resumed_ctx = batch * length, resumed * length
    one = model(name, overlap=overlap)
    parts = one.parts(work, batch, ctx, resumed, resumed_ctx)
    assert all(part >= 0.0 for part in parts)
    assert sum(parts) == pytest.approx(one.step_s(work, batch, ctx, resumed, resumed_ctx), rel=1e-12)


@given(name=st.sampled_from(ONE_RANK), work=chunks, batch=st.integers(1, 256), length=lengths)
def test_nothing_is_faster_than_its_slowest_limit(name: str, work: list[PrefillChunk], batch: int, length: int) -> None:
    """With every efficiency at 1: reading the weights once, and the products of every token at the data-sheet rate."""
    ideal = Coefficients(e_bw=1, e_gemm=1, e_moe_bw=1, e_moe=1, e_kv=1, e_attn=1, alpha_s=0, e_link=1, t_launch_s=0)
    place = placed(name)
    quickest = built(place, replace(named_block("generic"), values=ideal))
    tokens = batch + sum(chunk.new_tokens + chunk.recomputed_tokens for chunk in work)
    time_s = quickest.step_s(work, batch, batch * length, 0, 0)
    dense_flops = 2 * place.model.dense_params() * tokens / place.layout.tp
    assert time_s >= quickest.costs.weights_s
    assert time_s >= dense_flops / max(place.gpu.math_flops("fp8"), 1.0) * (1 - 1e-12)


@given(count=st.integers(1, 600), k=st.integers(1, 600), tokens=st.integers(1, 100_000))
def test_distinct_experts_lie_between_one_tokens_and_all(count: int, k: int, tokens: int) -> None:
    assume(k <= count)
    assert k * (1 - 1e-9) <= distinct_experts(count, k, tokens) <= count


@given(a=st.floats(0, 1e6), b=st.floats(0, 1e6))
def test_the_smooth_maximum_is_at_least_the_maximum_and_at_most_a_quarter_more(a: float, b: float) -> None:
    assert max(a, b) <= smax(a, b) <= max(a, b) * 2 ** (1 / 3) * (1 + 1e-12)
    assert smax(a, b) == smax(b, a)


@given(name=st.sampled_from(sorted(models())), weights=st.sampled_from(["bf16", "fp8", "nvfp4"]))
def test_more_tensor_parallelism_never_raises_the_weights_or_the_kv_of_a_rank(name: str, weights: str) -> None:
    shape = find_model(name)
    stage = next(stages(shape, 1))
    sizes = [
        (rank_weight_bytes(shape, Layout(tp=tp), weights, stage), kv_shape(shape, tp=tp).full_bytes)
        for tp in (1, 2, 4, 8, 16)
    ]
    for (weight, kv), (next_weight, next_kv) in pairwise(sizes):
        assert next_weight <= weight
        assert next_kv <= kv


@given(name=st.sampled_from(sorted(models())), pp=st.integers(1, 20))
def test_stages_hold_the_whole_model(name: str, pp: int) -> None:
    shape = find_model(name)
    parts = list(stages(shape, pp))
    assert sum(stage.layers for stage in parts) == shape.layers
    assert sum(stage.mlp_layers for stage in parts) == shape.mlp_layers
    assert sum(stage.expert_layers for stage in parts) == shape.expert_layers
    assert sum(stage.linear_layers for stage in parts) >= shape.linear_layers
    assert [stage.embedding for stage in parts].count(True) == [stage.head for stage in parts].count(True) == 1


def pool_or_refusal(place: Placement, engine: str, block_size: int, share: float) -> KvPool | str:
    try:
        return kv_pool(place, engine=engine, block_size=block_size, gpu_memory_utilization=share)
    except ConfigError as refused:
        return str(refused)


@given(
    name=st.sampled_from(sorted(models())),
    gpu=st.sampled_from(sorted(gpus())),
    engine=st.sampled_from(["vllm", "sglang", "trtllm"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(0.05, 1.0),
    block_size=st.sampled_from([1, 16, 64, 512]),
)
def test_a_pool_exists_or_is_refused(name: str, gpu: str, engine: str, tp: int, share: float, block_size: int) -> None:
    shape = find_model(name)
    place = Placement(model=shape, gpu=find_gpu(gpu), layout=Layout(tp=tp), weights="fp8", kv="fp8")
    pool = pool_or_refusal(place, engine, block_size, share)
    if isinstance(pool, str):
        assert "does not fit" in pool or "does not divide" in pool
        return
    assert pool.blocks >= 1
    assert pool.tokens == pool.blocks * block_size
    assert 0 <= pool.room_tokens - pool.tokens < block_size
    assert pool.weight_bytes + pool.room_bytes <= place.gpu.mem_bytes
