"""Candidates, workloads and loads for tests of simulated evaluation: one small model, few requests."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

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


def shared_prompts(
    path: Path, *, rows: int = 120, prefixes: int = 40, tokens: int = 2048, rate_rps: float = 4.0
) -> Path:
    """Write a trace in Mooncake's form: each prompt begins with one of `prefixes` texts of so many tokens, drawn
    at random."""
    stream, lines = random.Random(0), []
    for row in range(rows):
        first = stream.randrange(prefixes) * (tokens // 512)
        ids = [*range(first, first + tokens // 512), 1_000_000 + row]
        row_ = {"timestamp": int(1000 * row / rate_rps), "input_length": tokens + 256, "output_length": 16 + row % 8}
        lines.append(json.dumps({**row_, "hash_ids": ids}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def workload(**changes: object) -> Workload:
    """`SHORT` with the given fields changed."""
    return replace(SHORT, **changes)  # type: ignore[arg-type]
