"""Plans for the tests of emitted files: a few by name, and any legal candidate as a hypothesis strategy."""

from __future__ import annotations

from hypothesis import strategies as st

from aiconfig.candidate import ENGINES, Candidate, Pool
from aiconfig.emit.flags import releases
from aiconfig.emit.plan import Plan
from aiconfig.estimate import SIMULATED, Band, Estimate, Load
from aiconfig.workload import Workload
from twin.perf.formats import KV_BYTES, WEIGHT_BYTES
from twin.perf.hardware import gpus
from twin.perf.layout import Layout
from twin.perf.models import models

ENGINE_NAMES = ENGINES


def pool(role: str = "mixed", **changes: object) -> Pool:
    """Two workers of TP 2 on H200, FP8."""
    usual: dict[str, object] = {
        "role": role,
        "gpu": "h200_sxm",
        "layout": Layout(tp=2),
        "replicas": 2,
        "weights": "fp8",
        "kv": "fp8",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
    }
    return Pool(**{**usual, **changes})  # type: ignore[arg-type]


def agg(engine: str = "vllm", model: str = "qwen3-32b", nextn: int = 0, **changes: object) -> Candidate:
    """One pool."""
    return Candidate(model=model, engine=engine, pools=(pool(**changes),), nextn=nextn)  # type: ignore[arg-type]


def disagg(engine: str = "vllm") -> Candidate:
    """Two prefill workers and one decode worker of twice their size."""
    decode = pool("decode", layout=Layout(tp=4), replicas=1, max_num_seqs=256)
    return Candidate(model="qwen3-32b", engine=engine, pools=(pool("prefill"), decode))


def wide(engine: str = "vllm") -> Candidate:
    """DeepSeek-V3 with attention data parallelism, experts over all ranks and draft tokens, on two hosts."""
    spread = {"layout": Layout(tp=1, dp=16, ep=16), "gpu": "h200_sxm", "replicas": 1}
    return agg(engine, "deepseek-v3", nextn=1, **spread)


def predicted(candidate: Candidate, users: int = 32) -> Estimate:
    """A prediction with bands for TTFT alone."""
    return Estimate(
        candidate=candidate,
        load=Load(users=users),
        level=SIMULATED,
        stats={
            "ttft": {"mean": 0.25, "p50": 0.2, "p95": 0.5, "p99": 0.75},
            "tpot": {"mean": 0.02, "p50": 0.019, "p95": 0.03, "p99": None},
            "e2e": {"mean": 10.0, "p95": 15.0},
        },
        requests_per_s=3.0,
        output_tokens_per_s=1350.0,
        kv_share=0.4,
        bound="weights",
        bands={"ttft": Band(typical=0.1, wide=0.3, level="this engine and GPU")},
    )


def plan(candidate: Candidate | None = None, **changes: object) -> Plan:
    """A plan for 32 users of 4000 and 500 tokens."""
    candidate = candidate or agg()
    usual: dict[str, object] = {
        "candidate": candidate,
        "workload": Workload(isl=4000, osl=500, min_ratio=0.8),
        "load": Load(users=32),
        "estimate": predicted(candidate),
        "sla": "p95:ttft<1s, tpot=30ms",
    }
    return Plan(**{**usual, **changes})  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn, engine: str) -> Layout:
    """Layouts that the engine has flags for, in each of its releases."""
    tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2, 8]))
    if engine == "trtllm" and dp > 1:
        tp = 1
    ranks = tp * dp
    ep = draw(st.sampled_from([1, ranks] if engine != "trtllm" else [n for n in (1, 2, 4, 8) if ranks % n == 0]))
    return Layout(tp=tp, pp=draw(st.sampled_from([1, 2])), dp=dp, ep=ep)


@st.composite
def pools(draw: st.DrawFn, engine: str, role: str) -> Pool:
    """Pools of GPUs of NVIDIA, for which every engine and Dynamo have public images."""
    return Pool(
        role=role,
        gpu=draw(st.sampled_from(sorted(gpu for gpu in gpus() if not gpu.startswith("mi")))),
        layout=draw(layouts(engine)),
        replicas=draw(st.integers(1, 40)),
        weights=draw(st.sampled_from(sorted(WEIGHT_BYTES))),
        kv=draw(st.sampled_from(sorted(KV_BYTES))),
        max_num_seqs=draw(st.integers(1, 4096)),
        max_num_batched_tokens=draw(st.integers(1, 65_536)),
    )


NAMES = st.text(st.characters(blacklist_categories=("C", "Z")) | st.just(" "), min_size=1).filter(
    lambda text: text == text.strip() and not text.startswith("-")
)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Any candidate that can be written, of models by key and by any name."""
    engine = draw(st.sampled_from(ENGINES))
    roles = draw(st.sampled_from([("mixed",), ("prefill", "decode")]))
    return Candidate(
        model=draw(st.sampled_from(sorted(models())) | NAMES),
        engine=engine,
        pools=tuple(draw(pools(engine, role)) for role in roles),
        nextn=draw(st.integers(0, 5)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan for any candidate, for any release that was read, with hosts large enough for each worker."""
    candidate = draw(candidates())
    return plan(
        candidate,
        engine_version=draw(st.none() | st.sampled_from(releases(candidate.engine))),
        checkpoint=draw(st.none() | NAMES),
        host_gpus=1024,
        estimate=predicted(candidate),
    )
