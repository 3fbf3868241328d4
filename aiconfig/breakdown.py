"""What one deployment's figures are made of: memory of each rank, and the terms of one decode step and one prompt.

It asks the twin's own models and adds nothing: terms sum to the step that they explain.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiconfig.candidate import Candidate, Pool
from aiconfig.engines import ENGINE
from aiconfig.estimate import Estimate
from aiconfig.memory import Fit, PoolFit
from aiconfig.physics import SHIPPED, Physics
from aiconfig.steps import Steps
from aiconfig.workload import Workload
from policies.frozen import frozen
from twin.perf.hardware import find_gpu
from twin.perf.memory import GIB
from twin.perf.protocol import PrefillChunk
from twin.perf.roofline import StepParts

TERMS = {
    "gemm_s": "dense weights and products",
    "experts_s": "experts",
    "attention_prefill_s": "attention of prompts",
    "attention_decode_s": "reading KV",
    "comm_s": "links between ranks",
    "layers_s": "launches and small kernels",
    "host_s": "host",
}
"""Terms of a step (docs/latency-models.md), in words."""


@frozen
class StepTerms:
    """One step of one worker: `what` it does, and seconds by term; `total_s` is their sum."""

    what: str
    terms: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.terms.values())


@frozen
class MemoryTerms:
    """GiB on the tightest rank of a pool's workers, and the KV room that they leave, in tokens and in users."""

    role: str
    total_gib: float
    weights_gib: float
    kv_gib: float
    other_gib: float  # activations, graphs, and what the engine is told to leave free
    kv_tokens: int  # of one worker
    users: int  # of one worker


@frozen
class PoolBreakdown:
    """One pool: its memory, its steps, and where their seconds come from."""

    role: str
    label: str
    memory: MemoryTerms
    steps: tuple[StepTerms, ...]
    provenance: str
    notes: tuple[str, ...]


def breakdown(
    candidate: Candidate, workload: Workload, fit: Fit, estimate: Estimate, physics: Physics = SHIPPED
) -> tuple[PoolBreakdown, ...]:
    """Every pool of a candidate at the load of `estimate`."""
    return tuple(
        _pool(candidate, pool, room, workload, estimate, physics)
        for pool, room in zip(candidate.pools, fit.pools, strict=True)
    )


def _pool(
    candidate: Candidate, pool: Pool, room: PoolFit, workload: Workload, estimate: Estimate, physics: Physics
) -> PoolBreakdown:
    block = ENGINE[candidate.engine].block_size
    cached = workload.prefix_tokens // block * block
    steps = Steps(
        candidate.engine,
        candidate.model,
        pool,
        0 if pool.role == "prefill" else candidate.nextn,
        new_tokens=max(1, round(workload.mean_isl) - cached),
        past_tokens=cached,
        ctx_tokens=workload.mean_isl + workload.mean_osl / 2.0,
        physics=physics,
    )
    provenance = steps.provenance
    return PoolBreakdown(
        role=pool.role,
        label=f"{pool.label} {pool.gpu}",
        memory=_memory(pool, room, physics.hardware),
        steps=tuple(_steps(pool, steps, estimate)),
        provenance=provenance.line(),
        notes=provenance.notes,
    )


def _memory(pool: Pool, room: PoolFit, hardware: Path | None) -> MemoryTerms:
    total_gib = find_gpu(pool.gpu, hardware).mem_bytes / GIB
    return MemoryTerms(
        role=pool.role,
        total_gib=total_gib,
        weights_gib=room.weight_gib,
        kv_gib=room.kv_gib,
        other_gib=total_gib - room.weight_gib - room.kv_gib,
        kv_tokens=room.kv_tokens,
        users=room.users,
    )


def _steps(pool: Pool, steps: Steps, estimate: Estimate) -> list[StepTerms]:
    found = []
    if pool.role != "prefill":
        batch = decoding(estimate, pool)
        dp = pool.layout.dp
        tokens = round(batch * steps.ctx_tokens)
        parts = steps.base.parts((), batch * dp, tokens * dp, 0, 0)
        what = f"decode step of {batch} requests at {steps.ctx_tokens:,.0f} tokens each"
        found.append(_terms(what + (" on each rank" if dp > 1 else ""), parts))
    if pool.role != "decode":
        tokens = min(steps.new_tokens, pool.max_num_batched_tokens)
        cut = f", the first of {-(-steps.new_tokens // tokens)} chunks" if tokens < steps.new_tokens else ""
        chunk = PrefillChunk(tokens, steps.past_tokens, 0, tokens == steps.new_tokens)
        found.append(_terms(f"prompt of {tokens:,} tokens alone{cut}", steps.base.parts((chunk,), 0, 0, 0, 0)))
    return found


def decoding(estimate: Estimate, pool: Pool) -> int:
    """Requests that decode on one rank of the pool at the estimate's load, by Little's law; at least 1."""
    tpot_s, e2e_s, ttft_s = (estimate.value(name, "mean") for name in ("tpot", "e2e", "ttft"))
    if tpot_s is None or e2e_s is None or ttft_s is None:
        return 1
    ranks = pool.replicas * pool.layout.dp
    return max(1, round(estimate.requests_per_s * (e2e_s - ttft_s) / ranks))


def _terms(what: str, parts: StepParts) -> StepTerms:
    return StepTerms(what=what, terms={TERMS[name]: seconds for name, seconds in parts._asdict().items()})
