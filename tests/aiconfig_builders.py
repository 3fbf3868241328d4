"""Candidates, and their simulation by the twin itself, for tests of the search."""

from __future__ import annotations

from pathlib import Path
from random import Random

from aiconfig.candidate import Candidate, Pool
from aiconfig.engines import ENGINE
from aiconfig.estimate import SIMULATED, Estimate, Load
from aiconfig.memory import Fit, fit
from aiconfig.workload import Workload
from reports.report import Report
from reports.sla import METRICS
from twin.config import Config, DisaggregationConfig, EngineConfig, TraceConfig, WorkerGroup
from twin.perf.layout import Layout
from twin.replay import replay

SHORT = Workload(isl=1024, osl=256)


def pool(role: str = "mixed", *, replicas: int = 1, gpu: str = "h100_sxm", **more: object) -> Pool:
    """One pool; `more` are layout sizes (tp, pp, dp, ep) or fields of Pool."""
    sizes = {name: more.pop(name) for name in ("tp", "pp", "dp", "ep") if name in more}
    base: dict = {"weights": "bf16", "kv": "bf16", "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    layout = Layout(**sizes)  # type: ignore[arg-type]
    return Pool(role=role, gpu=gpu, layout=layout, replicas=replicas, **(base | more))


def agg(model: str = "llama-3.1-8b", *, engine: str = "vllm", nextn: int = 0, **more: object) -> Candidate:
    """Workers that do everything."""
    return Candidate(model=model, engine=engine, pools=(pool(**more),), nextn=nextn)  # type: ignore[arg-type]


def disagg(prefill: int = 1, decode: int = 1, *, engine: str = "vllm", model: str = "llama-3.1-8b") -> Candidate:
    """So many workers of each role, on one GPU each."""
    pools = (pool("prefill", replicas=prefill), pool("decode", replicas=decode))
    return Candidate(model=model, engine=engine, pools=pools)


def room(candidate: Candidate, workload: Workload = SHORT) -> Fit:
    """Its room, which it must have."""
    found = fit(candidate, workload)
    assert isinstance(found, Fit), found
    return found


def simulated(candidate: Candidate, workload: Workload, load: Load, folder: Path, requests: int) -> Report:
    """The twin's own run of that candidate, seed 0."""
    stream, at_s = Random(0), 0.0
    lines = ["arrival_s,isl,osl"]
    for _ in range(requests):
        at_s += stream.expovariate(load.rps) if load.rps else 0.0
        isl = stream.randint(int(workload.isl * workload.min_ratio), workload.isl)
        osl = stream.randint(int(workload.osl * workload.min_ratio), workload.osl)
        lines.append(f"{at_s},{isl},{osl}")
    trace = folder / "demand.csv"
    trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
    closed = load.users is not None
    config = Config(
        trace=TraceConfig(path=trace, concurrency=load.users, arrivals="closed" if closed else "recorded"),
        workers=tuple(_group(candidate, one) for one in candidate.pools),
        disaggregation=DisaggregationConfig(
            first_token=ENGINE[candidate.engine].first_token if candidate.mode == "disagg" else "decode"
        ),
    )
    return replay(config, out=folder / "run", html=False).report


def _group(candidate: Candidate, one: Pool) -> WorkerGroup:
    facts, layout = ENGINE[candidate.engine], one.layout
    return WorkerGroup(
        name=one.role,
        role=one.role,
        count=one.replicas,
        model=candidate.model,
        gpu=one.gpu,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        weights=one.weights,
        kv=one.kv,
        engine=EngineConfig(
            kind=candidate.engine,
            block_size=facts.block_size,
            gpu_memory_utilization=facts.memory_share,
            max_num_seqs=one.max_num_seqs,
            max_num_batched_tokens=one.max_num_batched_tokens,
            chunked_prefill=facts.chunks,
            chunked_prefill_size=one.max_num_batched_tokens * layout.dp,
            nextn=candidate.nextn if one.role != "prefill" else 0,
        ),
    )


def estimated(candidate: Candidate, **more: object) -> Estimate:
    """An estimate by hand; `more` are metrics (ttft={"p95": 0.2}) or fields of Estimate."""
    stats = {name: more.pop(name) for name in METRICS if name in more}
    base: dict = {
        "load": Load(users=1),
        "level": SIMULATED,
        "requests_per_s": 1.0,
        "output_tokens_per_s": 100.0,
        "kv_share": 0.5,
        "bound": "weights",
    }
    return Estimate(candidate=candidate, stats=stats, **(base | more))
