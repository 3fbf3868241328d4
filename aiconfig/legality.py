"""What an engine would refuse to start, before anything is computed: rules on one worker, on a pair, on the budget.

Each rule is a pure function of shapes and says the two numbers that it compared. Memory is not a rule: see `memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiconfig.candidate import Pool
from aiconfig.engines import ENGINE
from aiconfig.formats import BLOCKS, kv_refusal, weights_refusal
from aiconfig.reasons import Rejection
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.hardware import Gpu
from twin.perf.kv_layout import kv_cache, plan_layout
from twin.perf.layout import keeps_bf16
from twin.perf.models import Model

DRAFTERS: Final = ("deepseek-v3", "glm-5")
"""Models with a multi-token-prediction layer in their checkpoints (public config.json)."""


@frozen
class Worker:
    """One worker as rules see it; `name` is that of the candidate that a rejection is about."""

    name: str
    engine: str
    model: Model
    gpu: Gpu
    pool: Pool
    nextn: int = 0


def worker_rejection(worker: Worker) -> Rejection | None:
    """The first rule that one worker breaks, or None."""
    for rule in RULES:
        broken = rule(worker)
        if broken is not None:
            return broken
    return None


def budget_rejection(name: str, gpus: int, budget: int) -> Rejection | None:
    """Broken by a deployment of more GPUs than there are."""
    if gpus <= budget:
        return None
    return Rejection(name=name, reason="over_gpu_budget", needs=gpus, has=budget, unit="GPUs")


def pair_rejection(name: str, model: Model, prefill: Pool, decode: Pool, gpu: Gpu) -> Rejection | None:
    """Broken by a prefill worker (on `gpu`) that cannot hand its KV to the decode worker."""
    detail = _not_transferable(model, prefill, decode, gpu)
    if detail is None:
        return None
    return Rejection(
        name=name,
        reason="layout_not_transferable",
        needs=prefill.layout.tp,
        has=decode.layout.tp,
        unit="tp",
        detail=detail,
    )


def step_rejection(name: str, engine: str, pool: Pool, longest_prompt: int) -> Rejection | None:
    """Broken by a step budget that is too small: vLLM does not start with fewer tokens than sequences (its scheduler's
    configuration refuses them), and an engine that computes whole prompts has to have room for the longest."""
    tokens, facts = pool.max_num_batched_tokens, ENGINE[engine]
    if engine == "vllm" and tokens < pool.max_num_seqs:
        return _small_step(name, pool.max_num_seqs, tokens, "vllm wants max_num_batched_tokens >= max_num_seqs")
    if not facts.chunks and pool.role != "decode" and tokens < longest_prompt:
        return _small_step(name, longest_prompt, tokens, f"{engine} computes whole prompts, and this is the longest")
    return None


def _small_step(name: str, needs: int, has: int, detail: str) -> Rejection:
    return Rejection(name=name, reason="step_too_small", needs=needs, has=has, unit="tokens", detail=detail)


def _not_transferable(model: Model, prefill: Pool, decode: Pool, gpu: Gpu) -> str | None:
    if prefill.kv != decode.kv:
        return f"KV is {prefill.kv} on one side and {decode.kv} on the other"
    if prefill.layout.pp != decode.layout.pp:
        return (
            f"{prefill.layout.pp} pipeline stages hand over to {decode.layout.pp}: which layers go where is not known"
        )
    if gpu.nic_bytes_per_s is None:
        return f"{gpu.name} has no network card"
    try:
        plan_layout(kv_cache(model, prefill.kv), prefill.layout.tp, decode.layout.tp)
    except ConfigError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- rules on one worker


def _heads(worker: Worker) -> Rejection | None:
    heads, tp = worker.model.heads, worker.pool.layout.tp
    if heads % tp == 0:
        return None
    return Rejection(name=worker.name, reason="heads_not_divisible", needs=tp, has=heads, unit="heads")


def _layers(worker: Worker) -> Rejection | None:
    layers, pp = worker.model.layers, worker.pool.layout.pp
    if pp <= layers:
        return None
    return Rejection(name=worker.name, reason="layers_too_few", needs=pp, has=layers, unit="layers")


def _experts(worker: Worker) -> Rejection | None:
    experts, ep = worker.model.experts, worker.pool.layout.ep
    if experts is None or experts.count % ep == 0:
        return None
    return Rejection(name=worker.name, reason="experts_not_divisible", needs=ep, has=experts.count, unit="experts")


def _grid(worker: Worker) -> Rejection | None:
    """How engines let experts and attention be split: docs of vLLM (all ranks or none), SGLang, TensorRT-LLM."""
    layout, dense = worker.pool.layout, worker.model.experts is None
    detail = None
    if dense and (layout.dp > 1 or layout.ep > 1):
        detail = "dp and ep split experts, and the model has none; replicas do what dp would"
    elif layout.ranks % layout.ep:
        detail = "ep must divide tp*dp"
    elif worker.engine == "vllm" and layout.ep not in (1, layout.ranks):
        detail = "vllm splits experts over all ranks, or not at all"
    elif worker.engine == "sglang" and layout.pp > 1 and layout.dp > 1:
        detail = "sglang has no pipeline stages beside attention data parallelism"
    elif worker.engine == "trtllm" and layout.tp > 1 and layout.dp > 1:
        detail = "trtllm makes every rank one of attention data parallelism, or none"
    if detail is None:
        return None
    return Rejection(
        name=worker.name, reason="moe_grid", needs=layout.ep, has=layout.ranks, unit="ranks", detail=detail
    )


def _widths(worker: Worker) -> Rejection | None:
    """The share of each rank of a width that is split is whole blocks of values that have a scale in common."""
    model, layout, weights = worker.model, worker.pool.layout, worker.pool.weights
    widths = []
    if model.mlp_layers:
        widths.append(("mlp", model.ffn, layout.tp))
    if model.experts is not None:
        widths.append(("experts", model.experts.ffn, layout.moe_tp))
        if model.experts.shared_ffn:
            widths.append(("mlp", model.experts.shared_ffn, layout.tp))
    for module, width, ways in widths:
        block = 1 if keeps_bf16(model, weights, module) or ways == 1 else BLOCKS.get(weights, 1)
        if width % (ways * block):
            detail = f"{module} width {width} over {ways} ranks"
            share, reason = width / ways, "ffn_quant_block"
            return Rejection(name=worker.name, reason=reason, needs=block, has=share, unit="values", detail=detail)
    return None


def _formats(worker: Worker) -> Rejection | None:
    pool = worker.pool
    detail = weights_refusal(worker.engine, worker.model, worker.gpu, pool.weights)
    if detail is None:
        detail = kv_refusal(worker.engine, worker.model, worker.gpu, pool.kv)
    return None if detail is None else Rejection(name=worker.name, reason="dtype_unsupported", detail=detail)


def _drafts(worker: Worker) -> Rejection | None:
    if not worker.nextn or worker.model.name in DRAFTERS:
        return None
    return Rejection(name=worker.name, reason="draft_unsupported", needs=worker.nextn, has=0, unit="draft layers")


RULES: Final[tuple[Callable[[Worker], Rejection | None], ...]] = (
    _heads,
    _layers,
    _experts,
    _grid,
    _widths,
    _formats,
    _drafts,
)
"""In the order in which they are asked; the first that is broken is the reason."""
