"""Candidates, workloads and loads for tests of simulated evaluation: one small model, few requests."""

from __future__ import annotations

from dataclasses import replace

from aiconfig.candidate import ROLES, Candidate, Pool
from aiconfig.engines import ENGINE
from aiconfig.workload import Workload
from twin.perf.layout import Layout

SHORT = Workload(isl=300, osl=24, min_ratio=0.5, requests=60)
"""Sixty short requests, in a closed loop."""


def pool(role: str = "mixed", *, replicas: int = 1, tp: int = 1, **changes: object) -> Pool:
    """Workers of one role on H100s; BF16 all through."""
    base = Pool(
        role=role,
        gpu="h100_sxm",
        layout=Layout(tp=tp),
        replicas=replicas,
        weights="bf16",
        kv="bf16",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def candidate(
    engine: str = "vllm", mode: str = "agg", *, nextn: int = 0, model: str = "llama-3.1-8b", **changes: object
) -> Candidate:
    """A deployment of Llama 3.1 8B with equal pools in every role."""
    assert engine in ENGINE
    return Candidate(
        model=model,
        engine=engine,
        pools=tuple(pool(role, **changes) for role in ROLES[mode]),  # type: ignore[arg-type]
        nextn=nextn,
    )


def workload(**changes: object) -> Workload:
    """`SHORT` with the given fields changed."""
    return replace(SHORT, **changes)  # type: ignore[arg-type]
