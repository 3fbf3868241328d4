"""Random programs of what befalls the control plane beside workers that die: routers that restart, indices that are
lost, events out of order or told twice, a store that comes and goes, clocks, starts that fail, slow readers.

Whole scenarios the way of `twin replay --faults`: every invariant at each event, each request ends once, nothing stays
behind, and leaping changes nothing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import Run, toy

from twin.config_read import load
from twin.replay import replay

EXAMPLES = examples(60)
AT = st.integers(0, 5000)
LENGTHS = st.integers(1, 2000)
WORKERS = st.sampled_from(["any", "pool-0", "pool-2"])


def fault(kind: str, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"kind": st.just(kind), "at_ms": AT} | more)


RATES = st.sampled_from([0.2, 0.5, 1.0])
CONTROL = st.one_of(
    fault("router_restart"),
    fault("index_restart"),
    fault("event_reorder", worker=WORKERS, rate=RATES, ms=st.integers(1, 400), for_ms=LENGTHS),
    fault("event_dup", worker=WORKERS, rate=RATES, for_ms=LENGTHS),
    fault("discovery_flap", ms=st.integers(50, 700), for_ms=LENGTHS),
    fault("clock_skew", worker=WORKERS, ms=st.sampled_from([-2000, -300, 300]), for_ms=LENGTHS),
    fault("start_fail", worker=WORKERS, rate=RATES, for_ms=LENGTHS),
    fault("start_slow", worker=WORKERS, extra_ms=st.integers(1, 800)),
    st.fixed_dictionaries(
        {"kind": st.just("client_slow_reader"), "rate": RATES, "bytes_per_s": st.sampled_from([2000, 20_000])}
    ),
)
DEATHS = st.one_of(
    fault("worker_down", worker=WORKERS, for_ms=LENGTHS, detect=st.sampled_from(["disconnect", "lease"])),
    fault("worker_hang", worker=WORKERS, for_ms=LENGTHS, detection_delay_ms=st.integers(50, 1000)),
    fault("drain", worker=WORKERS, for_ms=LENGTHS, grace_ms=st.integers(0, 300), timeout_ms=st.integers(0, 900)),
    fault("partition", worker=WORKERS, for_ms=LENGTHS),
    fault("worker_up", worker=WORKERS),
)
PROGRAMS = st.lists(st.one_of(CONTROL, CONTROL, DEATHS), min_size=1, max_size=8)
ROWS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 14), st.integers(1, 40), st.integers(0, 4)), min_size=5, max_size=40
)


def play(folder: Path, rows: list[tuple[int, int, int, int]], program: list[dict], kind: str, *, leap: bool) -> Run:
    at_ms, lines = 0, []
    for n, (after_ms, blocks, osl, group) in enumerate(rows):
        at_ms += after_ms
        ids = [*(100 * group + k for k in range(blocks - 1)), 10_000 + n]
        row = {"timestamp": at_ms, "input_length": 16 * blocks, "output_length": osl, "hash_ids": ids}
        lines.append(row | {"session_id": f"s{n % 3}"})
    trace, scenario = folder / "rows.jsonl", folder / "faults.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = json.dumps({"faults": program, "expect": [{"invariants": "all"}]})
    settings = [f"faults.path={scenario}", "resilience.migration_limit=2", "resilience.lease_ttl_s=1"]
    if kind not in LEGS:
        scenario.write_text(text, encoding="utf-8")
        settings += ["workers.startup_s=0.2", "workers.engine.block_size=16", "workers.engine.kv_blocks=60"]
        return toy(trace, folder / f"run{leap}", *settings, *SETS[kind], workers=3, leap=leap)
    scenario.write_text(text.replace("pool-0", "p-0").replace("pool-2", "d-1"), encoding="utf-8")
    config = folder / "legs.toml"
    config.write_text(
        "".join(GROUP.format(name=role[0], role=role) for role in ("prefill", "decode")), encoding="utf-8"
    )
    flags: dict[str, object] = {"TRACE": str(trace), "--hash-block-tokens": 16}
    sets = [*settings, "disaggregation.bandwidth_gb_per_s=50", "disaggregation.kv_bytes_per_token=1000000", *LEGS[kind]]
    done = replay(load(config, flags, sets), out=folder / f"run{leap}", html=False, leap=leap)
    return Run(done.folder, done.report)


GROUP = """
[[workers]]
name = "{name}"
role = "{role}"
count = 2
startup_s = 0.2
[workers.engine]
kv_blocks = 60
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.001
decode_s = 0.01
"""
TWO = ("replicas.count=2", "replicas.sync_delay_s=0.004")
LEGS: dict[str, tuple[str, ...]] = {
    "legs": ("router.mode=kv",),
    "legs, room first": ("router.mode=kv", "disaggregation.order=decode-first"),
    "legs, engines' events": ("router.mode=kv", "router.index=engine"),
    "legs, engines' events, two routers": ("router.mode=kv", "router.index=engine", *TWO),
    "legs, two routers": ("router.mode=kv", *TWO),
    "legs and a queue": (
        "router.mode=kv",
        "disaggregation.order=decode-first",
        "router.queue.prefill_busy_tokens=100",
    ),
}
"""What is asked of routers that place prefill and decode legs."""
SETS: dict[str, tuple[str, ...]] = {
    "kv": ("router.mode=kv",),
    "engines' events": ("router.mode=kv", "router.index=engine"),
    "engines' events, two routers": ("router.mode=kv", "router.index=engine", *TWO),
    "guesses": ("router.mode=kv", "router.use_kv_events=false"),
    "queue": ("router.mode=kv", "router.queue.prefill_busy_tokens=200", "router.queue.max_wait_s=2"),
    "least loaded": ("router.mode=least-loaded", "router.queue.prefill_busy_tokens=100"),
    "two routers": ("router.mode=kv", *TWO),
    "two queues": (
        "router.mode=kv",
        "replicas.count=2",
        "replicas.sync_delay_s=0.004",
        "replicas.sync_loss=0.2",
        "router.queue.prefill_busy_tokens=200",
    ),
}


@pytest.mark.parametrize("kind", [*SETS, *LEGS])
@EXAMPLES
@given(ROWS, PROGRAMS)
def test_whatever_befalls_the_control_plane(
    kind: str, rows: list[tuple[int, int, int, int]], program: list[dict]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        leapt, stepped = (play(Path(name), rows, program, kind, leap=leap) for leap in (True, False))
        for column in ("status", "reason", "worker_id", "dispatch_s", "first_token_s", "last_token_s", "migrations"):
            assert leapt.requests(column) == stepped.requests(column), column
        assert leapt.rows("decisions") == stepped.rows("decisions")
        for status, osl, made in zip(*map(leapt.requests, ("status", "osl", "output_tokens")), strict=True):
            assert status in ("completed", "failed", "rejected")
            assert made == osl or status != "completed"
