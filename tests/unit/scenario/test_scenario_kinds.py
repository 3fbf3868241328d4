"""Kinds of faults by hand: starts that fail or take longer, a store that comes and goes, events out of order or told
twice, clocks that differ, slow readers, routers and indices that are lost.

The engine is TOY: 1 ms for each prompt token, 10 ms for each further token of an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from toy import Run, toy

from policies.errors import CapabilityError, ConfigError
from policies.resilience.backoff import JITTER, WAITS_S, Backoff
from twin.scenario.reading import read_scenario


def trace(folder: Path, *rows: dict) -> Path:
    """Rows at `at` ms of `isl` tokens with `osl` of answer (10 and 2 if not said)."""
    path, lines = folder / "rows.jsonl", []
    for row in rows:
        usual = {"timestamp": row["at"], "input_length": row.get("isl", 10), "output_length": row.get("osl", 2)}
        lines.append(usual | {key: value for key, value in row.items() if key not in ("at", "isl", "osl")})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def scenario(folder: Path, *faults: dict) -> Path:
    path = folder / "faults.json"
    path.write_text(json.dumps({"faults": list(faults), "expect": [{"invariants": "all"}]}), encoding="utf-8")
    return path


def timeline(run: Run, kind: str) -> list[dict[str, Any]]:
    told = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))
    assert told["never_applied"] == []
    return [entry for entry in told["timeline"] if entry["kind"] == kind]


def play(folder: Path, rows: list[dict], faults: list[dict], *sets: str, **options: Any) -> Run:
    return toy(trace(folder, *rows), folder / "run", f"faults.path={scenario(folder, *faults)}", *sets, **options)


def idle(run: Run) -> list[str]:
    """What the report says of faults without effect."""
    return [line for line in run.report.meta.no_effect if line.startswith("faults")]


EVERY_SECOND = [{"at": 1000 * n} for n in range(12)]
DOWN = {"at_ms": 1000, "kind": "worker_down", "worker": "pool-0", "for_ms": 2000}


# ---------------------------------------------------------------- starts


def test_waits_before_trying_again() -> None:
    """0, 50 ms, 200 ms, then 1 s, a fifth more or less; another one who tries draws another jitter."""
    backoff = Backoff(seed=1)
    waits = [backoff.wait_s("a", n) for n in range(1, 7)]
    assert waits[0] == 0.0
    for wait_s, usual_s in zip(waits, [*WAITS_S, 1.0, 1.0], strict=True):
        assert abs(wait_s - usual_s) <= JITTER * usual_s
    assert waits != [backoff.wait_s("b", n) for n in range(1, 7)]
    assert waits == [Backoff(seed=1).wait_s("a", n) for n in range(1, 7)]


@pytest.mark.parametrize("leap", [True, False])
def test_a_start_that_fails_begins_again_after_a_while(leap: bool, tmp_path: Path) -> None:
    """Begins at 3 s and takes 500 ms: fails at 3.5 and at once again at 4.0; the third begins about 50 ms later."""
    fault = {"at_ms": 0, "kind": "start_fail", "worker": "pool-0", "until_ms": 4200}
    run = play(tmp_path, EVERY_SECOND, [fault, DOWN], "workers.startup_s=0.5", workers=2, leap=leap)
    (down,) = timeline(run, "worker_down")
    assert down["over_s"] == pytest.approx(4.0 + Backoff(seed=0).wait_s("start 0", 2) + 0.5, abs=1e-6)
    assert 4.54 <= down["over_s"] <= 4.56
    assert timeline(run, "start_fail")[0]["target"] == "pool-0"
    assert run.requests("worker_id")[5:] == [0, 1] * 3 + [0] or set(run.requests("worker_id")[5:]) == {0, 1}


def test_a_start_takes_longer(tmp_path: Path) -> None:
    fault = {"at_ms": 0, "kind": "start_slow", "worker": "any", "extra_ms": 700}
    run = play(tmp_path, EVERY_SECOND, [fault, DOWN], "workers.startup_s=0.5", workers=2)
    assert timeline(run, "worker_down")[0]["over_s"] == 4.2


def test_a_start_that_always_fails_does_not_keep_a_run_going(tmp_path: Path) -> None:
    fault = {"at_ms": 0, "kind": "start_fail", "role": "mixed", "rate": 1}
    run = play(tmp_path, EVERY_SECOND, [fault, DOWN], "workers.startup_s=0.5", workers=2)
    assert timeline(run, "worker_down")[0]["over_s"] is None
    assert run.requests("status") == ["completed"] * 12


def test_a_fault_of_starts_without_a_start_never_applied(tmp_path: Path) -> None:
    run = play(tmp_path, EVERY_SECOND, [{"at_ms": 0, "kind": "start_fail", "worker": "pool-1"}, DOWN], workers=2)
    told = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))
    assert told["never_applied"] == [
        "faults[0]: start_fail at 0 s was never applied: none of pool-1 started while it lasted"
    ]


# ---------------------------------------------------------------- the store, clocks

DIES = {"at_ms": 5000, "kind": "worker_down", "worker": "pool-0", "detect": "lease"}
LONG = [{"at": 0, "osl": 1000}, {"at": 0, "osl": 1000}, {"at": 60_000}]


@pytest.mark.parametrize("leap", [True, False])
def test_a_store_that_comes_and_goes_puts_off_what_a_lease_tells(leap: bool, tmp_path: Path) -> None:
    """Down from 4, 10 and 16 s on, for 3 s each. After 7 s the lease would end at 17, when it is down; judged anew from
    19 s on it ends at 29."""
    flap = {"at_ms": 4000, "kind": "discovery_flap", "ms": 3000, "until_ms": 22_000}
    run = play(tmp_path, LONG, [DIES, flap], "resilience.migration_limit=1", workers=2, leap=leap)
    assert timeline(run, "worker_down")[0]["detected_s"] == 29.0
    assert timeline(run, "discovery_flap")[0]["over_s"] == 22.0
    assert run.requests("status") == ["completed"] * 3


@pytest.mark.parametrize(("skew_ms", "known_s"), [(-4000, 11.0), (4000, 19.0)])
def test_a_lease_ends_by_the_clock_of_the_worker(skew_ms: int, known_s: float, tmp_path: Path) -> None:
    """Heart-beats of a clock that is 4 s behind look 4 s old: the lease of 10 s ends 6 s after the last of them."""
    skew = {"at_ms": 1000, "kind": "clock_skew", "worker": "pool-0", "ms": skew_ms}
    run = play(tmp_path, LONG, [skew, DIES], "resilience.migration_limit=1", workers=2)
    assert timeline(run, "worker_down")[0]["detected_s"] == known_s


@pytest.mark.parametrize("leap", [True, False])
def test_a_clock_that_is_a_lease_behind_has_its_worker_taken_for_lost(leap: bool, tmp_path: Path) -> None:
    """From 2.005 s on; what it was doing goes on elsewhere, and from 8 s on it is there again."""
    skew = {"at_ms": 2005, "kind": "clock_skew", "worker": "pool-0", "ms": -10_000, "until_ms": 8000}
    rows = [{"at": 0, "osl": 400}, *({"at": 1000 * n + 500} for n in range(1, 12))]
    run = play(tmp_path, rows, [skew], "resilience.migration_limit=1", workers=2, leap=leap)
    (entry,) = timeline(run, "clock_skew")
    assert (entry["detected_s"], entry["over_s"], entry["interrupted"]) == (2.005, 8.0, 1)
    assert run.requests("status") == ["completed"] * 12
    assert run.requests("migrations")[0] == 1
    sent = [(row["at_s"], row["worker_id"]) for row in run.rows("decisions")]
    assert {worker for at_s, worker in sent if 2.005 <= at_s < 8.0} == {1}
    assert {worker for at_s, worker in sent if at_s >= 8.0} == {0, 1}


def test_a_clock_that_nobody_reads_has_no_effect(tmp_path: Path) -> None:
    run = play(tmp_path, EVERY_SECOND, [{"at_ms": 5, "kind": "clock_skew", "worker": "pool-0", "ms": 500}], workers=2)
    (line,) = idle(run)
    assert line.startswith("faults[0]: clock_skew has no effect: nobody reads load reports of pool-0")


# ---------------------------------------------------------------- KV events

SHARED = [
    {"at": 137 * n, "isl": 160, "osl": 3, "hash_ids": [100 * (n * n % 9) + k for k in range(10)]} for n in range(120)
]
KV = ("router.mode=kv", "trace.hash_block_tokens=16", "workers.engine.block_size=16", "workers.engine.kv_blocks=60")


def decisions(folder: Path, *faults: dict, leap: bool = True) -> list[tuple[float, int]]:
    folder.mkdir()
    run = play(folder, SHARED, list(faults), *KV, workers=2, leap=leap)
    assert run.requests("status") == ["completed"] * 120
    return [(row["at_s"], row["worker_id"]) for row in run.rows("decisions")]


def disturbed(kind: str, **more: object) -> dict:
    return {"at_ms": 0, "kind": kind, "worker": "pool-0"} | more


def test_events_that_are_all_late_are_delayed_ones(tmp_path: Path) -> None:
    """Reordering with a share of 1 holds every message up alike: none overtakes another."""
    late = decisions(tmp_path / "a", disturbed("event_reorder", rate=1, ms=5000))
    assert late == decisions(tmp_path / "b", disturbed("event_delay", ms=5000))
    assert late != decisions(tmp_path / "c", disturbed("event_reorder", rate=0.3, ms=5000))


def test_events_that_are_told_twice_change_no_decision(tmp_path: Path) -> None:
    usual = decisions(tmp_path / "a", disturbed("event_dup", rate=0))
    assert decisions(tmp_path / "b", disturbed("event_dup", rate=1)) == usual
    told = json.loads((tmp_path / "b" / "run" / "report.json").read_text(encoding="utf-8"))
    assert "duplicate_stores" in json.dumps(told["meta"])


@pytest.mark.parametrize("kind", ["event_reorder", "event_dup"])
def test_leaping_changes_nothing_for_events_out_of_order(kind: str, tmp_path: Path) -> None:
    more: dict[str, object] = {"rate": 0.5} | ({"ms": 300} if kind == "event_reorder" else {})
    leapt, stepped = (decisions(tmp_path / f"{leap}", disturbed(kind, **more), leap=leap) for leap in (True, False))
    assert leapt == stepped


# ---------------------------------------------------------------- routers


def _kv(folder: Path, *faults: dict, leap: bool = True) -> int:
    """Where a prompt goes whose ten blocks the second worker alone has, when both are idle."""
    first = [{"at": 0, "isl": 160, "hash_ids": list(range(10))}, {"at": 1, "isl": 160, "hash_ids": list(range(50, 60))}]
    last = {"at": 5000, "isl": 170, "hash_ids": [*range(50, 60), 99]}
    run = play(folder, [*first, last], list(faults), *KV, "router.tie_break=lowest_id", workers=2, leap=leap)
    workers: list[int] = run.requests("worker_id")
    assert workers[:2] == [0, 1]
    return workers[2]


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("kind", ["index_restart", "router_restart"])
def test_an_index_comes_back_with_the_dumps_of_the_workers(kind: str, leap: bool, tmp_path: Path) -> None:
    """A dump of ten blocks takes 0.2 ms; before it the router knows of no block, after it of all."""
    assert _kv(tmp_path, leap=leap) == 1
    assert _kv(tmp_path, {"at_ms": 4999.9, "kind": kind}, leap=leap) == 0
    assert _kv(tmp_path, {"at_ms": 4999.7, "kind": kind}, leap=leap) == 1
    told = json.loads((tmp_path / "run" / "faults.json").read_text(encoding="utf-8"))
    assert told["timeline"][0]["over_s"] == pytest.approx(4.9999)


def test_a_restarted_router_knows_nothing_of_what_it_sent_and_that_goes_on(tmp_path: Path) -> None:
    """A long answer is open on the first worker: the next prompt goes to the other one, but not after a restart."""
    rows = [{"at": 0, "isl": 160, "osl": 300}, {"at": 1000, "isl": 160}]
    for faults, worker in (([], 1), ([{"at_ms": 900, "kind": "router_restart"}], 0)):
        run = play(tmp_path, rows, faults, *KV, "router.tie_break=lowest_id", workers=2)
        assert run.requests("worker_id") == [0, worker]
        assert run.requests("status") == ["completed"] * 2
        assert run.requests("output_tokens") == [300, 2]


def _session(router: int, n: int) -> str:
    names = (f"s{i}" for i in range(1000))
    return [name for name in names if xxhash.xxh3_64_intdigest(name.encode()) % 2 == router][n]


@pytest.mark.parametrize(("at", "worker"), [(904, 0), (912, 1)])
def test_peers_give_a_restarted_router_its_bookings_back(at: int, worker: int, tmp_path: Path) -> None:
    """It asks at 900 ms, is heard 5 ms later and answered 5 ms after that."""
    rows = [
        {"at": 0, "isl": 160, "osl": 300, "session_id": _session(0, 0)},
        {"at": at, "isl": 160, "session_id": _session(0, 1)},
        {"at": 2000, "isl": 160, "session_id": _session(0, 2)},
    ]
    sets = ("replicas.count=2", "replicas.spread=session", "replicas.sync_delay_s=0.005", "replicas.sync_batch_s=0")
    run = play(tmp_path, rows, [{"at_ms": 900, "kind": "router_restart", "router": 0}], *KV, *sets,
               "router.tie_break=lowest_id", workers=2)  # fmt: skip
    assert run.requests("worker_id") == [0, worker, 1]
    assert run.requests("status") == ["completed"] * 3


@pytest.mark.parametrize("leap", [True, False])
def test_who_waits_in_a_router_that_is_restarted_asks_again(leap: bool, tmp_path: Path) -> None:
    """Prompts of 1 s on one worker, the next ones wait; the restart at 1.5 s loses what is booked, so one more goes."""
    rows = [{"at": 100 * n, "isl": 1000} for n in range(4)]
    sets = ("router.mode=least-loaded", "router.queue.prefill_busy_tokens=100")
    run = play(tmp_path, rows, [{"at_ms": 1500, "kind": "router_restart"}], *sets, workers=1, leap=leap)
    assert run.requests("status") == ["completed"] * 4
    sent = run.requests("dispatch_s")
    assert sent[:3] == [0.0, 1.0, 1.5]
    assert sent[3] > 3.0, "when the third prompt is computed"


def test_a_router_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"faults\[0\]: router = 1: the run has 1, numbered from 0"):
        play(tmp_path, EVERY_SECOND, [{"at_ms": 1, "kind": "router_restart", "router": 1}])


def test_an_index_that_is_not_kept_is_not_lost(tmp_path: Path) -> None:
    run = play(tmp_path, EVERY_SECOND, [{"at_ms": 5, "kind": "index_restart"}])
    assert idle(run) == ["faults[0]: index_restart has no effect: mode round-robin keeps no index"]


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize(("bytes_per_s", "last_s"), [(5000, 1.05), (25_000, 0.29), (1e9, 0.29)])
def test_a_slow_reader_has_its_answer_later_and_nobody_else(bytes_per_s: float, last_s: float, tmp_path: Path) -> None:
    """100 tokens in, 20 out: the engine is done at 290 ms. At 250 bytes a token, 5,000 bytes a second are 50 ms each:
    19 of them after the first token at 100 ms."""
    reader = {"at_ms": 0, "kind": "client_slow_reader", "row": 0, "bytes_per_s": bytes_per_s}
    rows = [{"at": 0, "isl": 100, "osl": 20}, {"at": 500, "isl": 100, "osl": 20}]
    run = play(tmp_path, rows, [reader])
    assert run.requests("last_token_s") == pytest.approx([last_s, 0.79])
    assert run.requests("first_token_s") == pytest.approx([0.1, 0.6])
    assert timeline(run, "client_slow_reader")[0]["over_s"] == (pytest.approx(1.05) if last_s > 1 else None)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "metrics_blind"}, "there is no planner"),
        ({"kind": "frontend_restart"}, "there is no frontend in the simulated world"),
    ],
)
def test_what_has_nothing_to_act_on_is_refused_with_the_reason(fault: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=says):
        read_scenario(scenario(tmp_path, {"at_ms": 1} | fault))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "clock_skew", "worker": "any", "ms": 0}, "must not be 0"),
        ({"kind": "discovery_flap", "ms": 5}, "needs an end"),
        ({"kind": "discovery_flap", "ms": 5, "for_ms": 50, "every_ms": 500}, "happens once"),
        ({"kind": "start_slow", "worker": "any"}, "kind start_slow needs it"),
        ({"kind": "client_slow_reader", "row": 1}, "kind client_slow_reader needs it"),
        ({"kind": "client_slow_reader", "rate": 0.5, "bytes_per_s": 5}, "at_ms = 1: has no effect beside rate"),
        ({"kind": "event_reorder", "worker": "any", "rate": 0.5}, "kind event_reorder needs it"),
    ],
)
def test_what_a_fault_lacks_is_named(fault: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        read_scenario(scenario(tmp_path, {"at_ms": 1} | fault))


def test_a_request_that_two_workers_refuse_waits_before_the_third(tmp_path: Path) -> None:
    """Both drain and no router has heard of it; the second refusal is followed by about 50 ms."""
    drains = [
        {"at_ms": 500, "kind": "drain", "worker": f"pool-{n}", "grace_ms": 0, "known_after_ms": 60_000} for n in (0, 1)
    ]
    rows = [{"at": 0, "osl": 300}, {"at": 0, "osl": 300}, {"at": 0}, {"at": 1000}]
    run = play(tmp_path, rows, drains, "resilience.migration_limit=3", workers=3)
    sent = [(row["at_s"], row["worker_id"]) for row in run.rows("decisions") if row["row"] == 3]
    wait_s = Backoff(seed=0).wait_s("retry 3", 2)
    assert sent == [(1.0, 0), (1.0, 1), (pytest.approx(1.0 + wait_s), 2)]
    assert 0.04 <= wait_s <= 0.06
    assert run.requests("status")[3] == "completed"
    told = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))
    assert told["migration"]["migrations_waited"] == 1
