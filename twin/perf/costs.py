"""Turns model, GPU, layout and coefficients into the seconds per token, per pair and per step of one rank.

All arithmetic that does not depend on the step is done here, once; `roofline` only adds up. Each figure is named after
what it multiplies. Nothing here is fitted: efficiencies come in as `Coefficients`.
"""

from __future__ import annotations

import math

from policies.frozen import frozen
from twin.perf.coefficients import Coefficients
from twin.perf.hardware import Gpu
from twin.perf.layout import Layout, Stage, keeps_bf16, module_bytes, rank_params, stages
from twin.perf.memory import Placement, kv_shape
from twin.perf.models import Model

ACTIVATION_BYTES = 2  # BF16 activations on the links
DISPATCH_COMBINE_BYTES = 3  # FP8 to the experts, BF16 back


def smax(a: float, b: float) -> float:
    """Smooth maximum m*(1 + (s/m)^3)^(1/3): two overlapping limits, a little slower than the slower one alone."""
    if a < b:
        a, b = b, a
    if a == 0.0:
        return 0.0
    r = b / a
    return float(a * (1.0 + r * r * r) ** (1.0 / 3.0))


def distinct_experts(count: int, per_token: int, tokens: int) -> float:
    """Experts that `tokens` tokens touch together, each choosing `per_token` of `count` at random."""
    return count * (1.0 - (1.0 - per_token / count) ** tokens)


@frozen
class ExpertCosts:
    """Routed experts, all layers; tokens are those of the whole group of ranks."""

    read_s: float  # reading every expert of the rank once
    missed: float  # probability that one token does not choose a given expert
    token_s: float
    spread_tokens: float  # imbalance: t tokens cost as much as t + sqrt(spread_tokens * t)
    half_tokens: float  # tokens of the group at which an expert's products reach half their rate


@frozen
class LinkCosts:
    """Collectives and sends: per step, per token of the rank, per token of the whole group."""

    step_s: float
    token_s: float
    group_token_s: float


@frozen
class StepCosts:
    """Seconds on one rank, all layers (with pipeline stages: the sum over stages, as one token sees them)."""

    weights_s: float  # reading the dense weights and the head once
    token_s: float  # dense products per token
    sample_s: float  # the head, per sampled token
    half_tokens: float
    pair_s: float  # prefill attention, per (new token, token before it), full layers
    window_pair_s: float  # the same, layers that look back `window_tokens` at most
    ctx_token_s: float  # decode attention, per token of context, full layers
    window_ctx_token_s: float
    window_tokens: int
    sequence_s: float  # decode, per sequence: states of linear layers
    layers_s: float
    experts: ExpertCosts | None
    links: LinkCosts
    host_s: float
    host_sequence_s: float
    host_prefill_s: float
    m_decode: float
    m_prefill: float


def step_costs(placed: Placement, c: Coefficients) -> StepCosts:
    """The costs of `placed` under the coefficients `c`. Raises `ConfigError` for a layout that is not legal."""
    model, gpu, layout = placed.model, placed.gpu, placed.layout
    layout.check(model)
    stage = next(stages(model, 1))
    pair_s, window_pair_s = _prefill_attention(model, gpu, layout, stage, c)
    ctx_token_s, window_ctx_token_s = _decode_attention(placed, stage, c)
    weights_s, token_s, sample_s = _dense(placed, stage, c)
    if model.indexer:
        window_tokens = model.indexer.top_k
    else:
        window_tokens = model.window.tokens if model.window else 0
    state_bytes = kv_shape(model, placed.kv, layout.tp).state_bytes
    return StepCosts(
        weights_s=weights_s,
        token_s=token_s,
        sample_s=sample_s,
        half_tokens=c.t_half_tokens,
        pair_s=pair_s,
        window_pair_s=window_pair_s,
        ctx_token_s=ctx_token_s,
        window_ctx_token_s=window_ctx_token_s,
        window_tokens=window_tokens,
        sequence_s=2 * state_bytes / (gpu.mem_bytes_per_s * c.e_kv),  # read and written back
        layers_s=model.layers * c.t_launch_s + stage.expert_layers * c.t_moe_s,
        experts=_experts(placed, stage, c),
        links=_links(model, gpu, layout, stage, c),
        host_s=c.h0_s,
        host_sequence_s=c.h_seq_s,
        host_prefill_s=c.h_prefill_s,
        m_decode=c.m_decode,
        m_prefill=c.m_prefill,
    )


def _math_flops(placed: Placement, module: str) -> float:
    weights = "bf16" if keeps_bf16(placed.model, placed.weights, module) else placed.weights
    return placed.gpu.math_flops(weights)


def _dense(placed: Placement, stage: Stage, c: Coefficients) -> tuple[float, float, float]:
    """(weights_s, token_s, sample_s)"""
    params = rank_params(placed.model, placed.layout, stage)
    read_bytes = seconds = 0.0
    for module, count in (("attention", params.attention), ("mlp", params.mlp)):
        read_bytes += count * module_bytes(placed.model, placed.weights, module)
        seconds += 2 * count / (_math_flops(placed, module) * c.e_gemm)
    read_bytes += params.head * module_bytes(placed.model, placed.weights, "embedding")
    sample_s = 2 * params.head / (_math_flops(placed, "embedding") * c.e_gemm)
    return read_bytes / (placed.gpu.mem_bytes_per_s * c.e_bw), seconds, sample_s


def _experts(placed: Placement, stage: Stage, c: Coefficients) -> ExpertCosts | None:
    model, layout = placed.model, placed.layout
    if model.experts is None:
        return None
    count, per_token = model.experts.count, model.experts.per_token
    params = rank_params(model, layout, stage).experts
    bytes_read = params * module_bytes(model, placed.weights, "experts")
    flops = 6 * model.hidden * model.experts.ffn * per_token * stage.expert_layers / layout.ranks
    # Tokens fall on the experts of a rank by chance; the fullest of them ends the layer.
    spread = c.expert_imbalance**2 * (count / layout.ep - 1) * layout.ep / per_token
    return ExpertCosts(
        read_s=bytes_read / (placed.gpu.mem_bytes_per_s * c.e_moe_bw),
        missed=1.0 - per_token / count,
        token_s=flops / (_math_flops(placed, "experts") * c.e_moe),
        spread_tokens=spread,
        half_tokens=c.t_half_expert_tokens * count / per_token,
    )


def _prefill_attention(model: Model, gpu: Gpu, layout: Layout, stage: Stage, c: Coefficients) -> tuple[float, float]:
    """(pair_s, window_pair_s). Latent attention is computed expanded; an indexer scores every pair in FP8."""
    rate = gpu.bf16_flops * c.e_attn
    if model.latent is None:
        per_layer = 4 * model.heads * model.head_dim / layout.tp / rate
        return (stage.attention_layers - stage.window_layers) * per_layer, stage.window_layers * per_layer
    width = model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim
    pair_s = stage.attention_layers * 2 * model.heads * width / layout.tp / rate
    if model.indexer is None:
        return pair_s, 0.0
    scores = stage.attention_layers * 2 * model.indexer.heads * model.indexer.dim
    return scores / (gpu.math_flops("fp8") * c.e_attn), pair_s


def _decode_attention(placed: Placement, stage: Stage, c: Coefficients) -> tuple[float, float]:
    """(ctx_token_s, window_ctx_token_s): reading KV; with latent attention (absorbed form) also its products."""
    model, gpu, layout = placed.model, placed.gpu, placed.layout
    shape = kv_shape(model, placed.kv, layout.tp)
    read = gpu.mem_bytes_per_s * c.e_kv
    if model.latent is None:
        return shape.full_bytes / read, shape.window_bytes / read
    flops = 2 * model.heads / layout.tp * (2 * model.latent.kv_rank + model.latent.rope_dim) * stage.attention_layers
    multiply_s = flops / (gpu.bf16_flops * c.e_gemm)
    if model.indexer is None:
        return smax(shape.full_bytes / read, multiply_s), 0.0
    index_bytes = stage.attention_layers * model.indexer.dim
    return index_bytes / read, smax((shape.full_bytes - index_bytes) / read, multiply_s)


def _links(model: Model, gpu: Gpu, layout: Layout, stage: Stage, c: Coefficients) -> LinkCosts:
    """All-reduce twice per layer over the tensor-parallel group. With attention data parallelism the one behind the
    experts is an exchange over all ranks: all-to-all to and from the experts if they are split over ranks (`ep`), else
    gather and scatter. Pipeline stages pass activations on."""
    activation_bytes = model.hidden * ACTIVATION_BYTES
    exchanges = stage.expert_layers if layout.dp > 1 else 0
    step_s = token_s = group_token_s = 0.0
    if layout.tp > 1:
        reduces = 2 * model.layers - exchanges
        step_s += reduces * c.alpha_s * math.ceil(math.log2(layout.tp))
        token_s += reduces * _all_reduce_s(gpu, layout.tp, activation_bytes, c)
    if exchanges:
        step_s += exchanges * 2 * c.alpha_s * math.ceil(math.log2(layout.ranks))
        rate = _rate(gpu, layout.ranks, c)
        if layout.ep > 1 and model.experts:
            sent = model.hidden * DISPATCH_COMBINE_BYTES * model.experts.per_token / layout.tp
            token_s += exchanges * sent * (layout.ep - 1) / layout.ep / rate
        else:
            group_token_s += exchanges * 2 * activation_bytes * (layout.ranks - 1) / layout.ranks / rate
    if layout.pp > 1:
        step_s += (layout.pp - 1) * c.alpha_s
        token_s += (layout.pp - 1) * activation_bytes / _rate(gpu, layout.ranks * layout.pp, c)
    return LinkCosts(step_s=step_s, token_s=token_s, group_token_s=group_token_s)


def _all_reduce_s(gpu: Gpu, gpus: int, message_bytes: int, c: Coefficients) -> float:
    """Ring; across hosts: reduce inside, a ring of the shares between hosts, gather inside."""
    inside = min(gpus, gpu.domain_gpus)
    seconds = 2 * (inside - 1) / inside * message_bytes / (gpu.group_bytes_per_s(inside) * c.e_link)
    hosts = math.ceil(gpus / inside)
    if hosts > 1:
        seconds += 2 * (hosts - 1) / hosts * message_bytes / inside / (gpu.network_bytes_per_s() * c.e_link)
    return seconds


def _rate(gpu: Gpu, gpus: int, c: Coefficients) -> float:
    """Link rate inside a group; across hosts the network binds."""
    rate = gpu.group_bytes_per_s(gpus) if gpus <= gpu.domain_gpus else gpu.network_bytes_per_s()
    return rate * c.e_link
