"""When rows arrive under a surge, and whose lease ends while the store of leases is down."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import toy

from policies.errors import ConfigError
from policies.resilience.discovery import Leases, Registration, newest
from twin.scenario.reading import read_scenario
from twin.scenario.times import Surges, surges


def test_a_surge_brings_the_demand_forward() -> None:
    """Three times as fast from 10 to 20 s: what was recorded by 40 s is there by 20, and the rest 20 s early."""
    surge = Surges([(10.0, 20.0, 3.0)])
    assert [surge(at_s) for at_s in (0.0, 10.0, 13.0, 40.0, 41.0, 100.0)] == [0.0, 10.0, 11.0, 20.0, 21.0, 80.0]


def test_two_surges_one_after_the_other() -> None:
    surge = Surges([(30.0, 40.0, 2.0), (10.0, 20.0, 3.0)])
    # by 20 s what was recorded by 40; from 30 s (recorded 50) on twice as fast; by 40 s what was recorded by 70
    assert [surge(at_s) for at_s in (40.0, 50.0, 60.0, 70.0, 71.0)] == [20.0, 30.0, 35.0, 40.0, 41.0]


@examples(200)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.floats(1.01, 10)), min_size=1, max_size=3),
    st.lists(st.floats(0, 500), min_size=2, max_size=20),
)
def test_rows_keep_their_order_and_come_no_later(
    windows: list[tuple[float, float, float]], recorded: list[float]
) -> None:
    begin_s, placed = 0.0, []
    for wait_s, length_s, factor in windows:
        begin_s += wait_s
        placed.append((begin_s, begin_s + length_s, factor))
        begin_s += length_s
    surge = Surges(placed)
    times = [surge(at_s) for at_s in sorted(recorded)]
    assert all(a <= b + 1e-9 for a, b in pairwise(times))
    assert all(found <= at_s + 1e-9 for found, at_s in zip(times, sorted(recorded), strict=True))


def _scenario(folder: Path, *faults: dict) -> Path:
    path = folder / "faults.json"
    path.write_text(json.dumps({"faults": list(faults), "expect": [{"invariants": "all"}]}), encoding="utf-8")
    return path


def test_surges_must_not_overlap(tmp_path: Path) -> None:
    first = {"at_ms": 0, "kind": "load_surge", "factor": 2, "for_ms": 1000}
    with pytest.raises(ConfigError, match=r"faults\[1\]: begins before the surge before it is over, at 1 s"):
        surges(read_scenario(_scenario(tmp_path, first, first | {"at_ms": 500})))
    assert surges(read_scenario(_scenario(tmp_path, first, first | {"at_ms": 1000}))) is not None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"factor": 1}, "must be more than 1"),
        ({"factor": 2, "every_ms": 5000}, "happens once; write one"),
    ],
)
def test_what_a_surge_cannot_be(fault: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        read_scenario(_scenario(tmp_path, {"at_ms": 0, "kind": "load_surge", "for_ms": 1000} | fault))


def _trace(folder: Path, times_ms: list[float], osl: int = 2) -> Path:
    trace = folder / "rows.jsonl"
    lines = [{"timestamp": at_ms, "input_length": 10, "output_length": osl} for at_ms in times_ms]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return trace


def test_a_run_under_a_surge_has_its_arrivals(tmp_path: Path) -> None:
    fault = {"at_ms": 1000, "kind": "load_surge", "factor": 4, "for_ms": 1000}
    trace = _trace(tmp_path, [0, 1000, 2000, 4000, 5000, 6000])
    run = toy(trace, tmp_path / "run", f"faults.path={_scenario(tmp_path, fault)}")
    assert run.requests("arrival_s") == [0.0, 1.0, 1.25, 1.75, 2.0, 3.0]


def test_a_surge_of_a_closed_loop_is_refused(tmp_path: Path) -> None:
    fault = {"at_ms": 1000, "kind": "load_surge", "factor": 4, "for_ms": 1000}
    with pytest.raises(ConfigError, match=r"faults\[0\]: load_surge has no effect: arrivals are closed"):
        toy(
            _trace(tmp_path, [0, 1]),
            tmp_path / "run",
            f"faults.path={_scenario(tmp_path, fault)}",
            "trace.concurrency=1",
        )


# ---------------------------------------------------------------- leases


def test_a_lease_ends_one_ttl_after_the_last_heart_beat() -> None:
    leases: Leases[str] = Leases(10.0)
    leases.beat("a", 0.0)
    leases.beat("b", 3.0)
    assert (leases.expired(9.9), leases.expired(10.0), leases.expired(13.0)) == ([], ["a"], ["a", "b"])
    leases.forget("a")
    assert leases.expired(13.0) == ["b"]


def test_while_the_store_is_down_nobody_is_removed_and_then_all_are_judged_anew() -> None:
    leases: Leases[str] = Leases(10.0)
    leases.beat("alive", 0.0)
    leases.beat("dead", 0.0)
    leases.store_down()
    assert leases.stale
    assert leases.expired(1000.0) == []
    leases.store_up(60.0)
    assert leases.expired(69.9) == [], "whoever lives has one ttl to say so"
    leases.beat("alive", 61.0)
    assert leases.expired(70.0) == ["dead"]


def test_of_two_registrations_with_one_address_the_newer_counts() -> None:
    told = [Registration("x:1", 3), Registration("y:1", 1), Registration("x:1", 4), Registration("x:1", 2)]
    assert newest(told) == [Registration("x:1", 4), Registration("y:1", 1)]


DIES = {"at_ms": 5000, "kind": "worker_down", "worker": "pool-0", "detect": "lease"}


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("outage", "known_s"),
    [(None, 15.0), ((1000, 3000), 15.0), ((1000, 8000), 18.0), ((6000, 30_000), 40.0), ((16_000, 30_000), 15.0)],
    ids=["store up", "before", "over its death", "over its lease", "after it was known"],
)
def test_a_death_in_an_outage_is_known_one_lease_after_it(
    outage: tuple[int, int] | None, known_s: float, leap: bool, tmp_path: Path
) -> None:
    faults = [DIES]
    if outage is not None:
        faults.append({"at_ms": outage[0], "kind": "discovery_down", "until_ms": outage[1]})
    sets = [f"faults.path={_scenario(tmp_path, *faults)}", "resilience.migration_limit=1"]
    trace = _trace(tmp_path, [0, 0, 50_000], osl=1000)
    run = toy(trace, tmp_path / "run", *sets, workers=2, leap=leap)
    entry = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))["timeline"]
    (death,) = [found for found in entry if found["kind"] == "worker_down"]
    assert death["detected_s"] == known_s
    assert run.requests("status") == ["completed"] * 3
    assert run.requests("migrations") == [1, 0, 0]


def test_who_comes_back_in_an_outage_is_there_after_it(tmp_path: Path) -> None:
    faults = [
        {"at_ms": 1000, "kind": "worker_down", "worker": "pool-0", "for_ms": 2000},
        {"at_ms": 2000, "kind": "discovery_down", "until_ms": 9000},
    ]
    trace = _trace(tmp_path, [0, 5000, 6000, 10_000, 11_000])
    run = toy(trace, tmp_path / "run", f"faults.path={_scenario(tmp_path, *faults)}", workers=2)
    sent = [(row["at_s"], row["worker_id"]) for row in run.rows("decisions")]
    assert {worker for at_s, worker in sent if 1.0 < at_s < 9.0} == {1}
    assert {worker for at_s, worker in sent if at_s > 9.0} == {0, 1}
