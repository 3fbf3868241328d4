"""Scenario files: what is read, what is refused and how, and when drawn faults happen."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from policies.cluster.events import Threshold
from policies.errors import CapabilityError, ConfigError
from twin.scenario.model import Fault, Occurrence
from twin.scenario.reading import read_scenario
from twin.scenario.times import chosen, occurrences

SPEC = """
version = 1
seed = 7
workers = ["W0", "W1", "W2"]
policy = "round-robin"
migration_limit = 3
detection_delay_ms = 0
faults = [
  {at_ms = 165, kind = "worker_down", worker = "W0", until_ms = 9000, detect = "disconnect"},
  {at_ms = 500, kind = "link_slow", link = "nic:W1", factor = 0.02, until_ms = 4000},
  {at_ms = 800, kind = "event_loss", worker = "W2", rate = 0.1, until_ms = 5000},
  {every_ms = 30000, jitter_ms = 5000, kind = "worker_down", worker = "any", for_ms = 2000, count = 5},
]
client_disconnects = [{at_ms = 305, row = 0}]
expect = [{metric = "requests_failed", le = 0}, {metric = "longest_gap_ms", le = 250}, {invariants = "all"}]
"""


def _write(folder: Path, text: str, name: str = "faults.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_everything_of_the_format_is_read(tmp_path: Path) -> None:
    scenario = read_scenario(_write(tmp_path, SPEC))
    assert (scenario.seed, scenario.workers, scenario.policy) == (7, ("W0", "W1", "W2"), "round-robin")
    assert (scenario.migration_limit, scenario.detection_delay_s) == (3, 0.0)
    down, link, loss, again, leaves = scenario.faults
    assert (down.at_s, down.until_s, down.worker, down.detect) == (0.165, 9.0, "W0", "disconnect")
    assert (link.link, link.factor) == ("nic:W1", 0.02)
    assert loss.rate == 0.1
    assert (again.every_s, again.jitter_s, again.count, again.for_s, again.recurs) == (30.0, 5.0, 5, 2.0, True)
    assert (leaves.kind, leaves.row, leaves.name) == ("client_disconnect", 0, "client_disconnects[0]")
    assert [expectation.text for expectation in scenario.expect] == [
        "requests_failed le 0",
        "longest_gap_ms le 250",
        "invariants",
    ]
    assert scenario.watches_invariants


def test_partitions_are_of_a_worker_or_between_two_sets(tmp_path: Path) -> None:
    text = """faults = [
      {at_ms = 1, kind = "partition", worker = "any", for_ms = 5},
      {at_ms = 1, kind = "partition", role = "decode", detect = "disconnect"},
      {at_ms = 1, kind = "partition", between = ["prefill", ["d-0", "d-1"]]},
    ]"""
    one, role, two = read_scenario(_write(tmp_path, text)).faults
    assert (one.worker, one.detect, one.for_s, one.between) == ("any", "lease", 0.005, None)
    assert (role.role, role.detect) == ("decode", "disconnect")
    assert two.between == (("prefill",), ("d-0", "d-1"))


def test_json_says_the_same(tmp_path: Path) -> None:
    import tomllib

    as_json = read_scenario(_write(tmp_path, json.dumps(tomllib.loads(SPEC)), "faults.json"))
    as_toml = read_scenario(_write(tmp_path, SPEC))
    assert as_json.expect == as_toml.expect
    assert [(f.kind, f.at_s, f.worker) for f in as_json.faults] == [(f.kind, f.at_s, f.worker) for f in as_toml.faults]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("verson = 1", "there is no key verson; did you mean version"),
        ("version = 2", "version = 2: this version reads 1"),
        ('faults = [{at_ms = 1, kind = "worker_dwon", worker = "any"}]', "did you mean worker_down"),
        ('faults = [{at_ms = 1, kind = "worker_down", worker = "any", factr = 2}]', "no key factr of kind worker_down"),
        ('faults = [{at_ms = 1, kind = "worker_down"}]', "say which: a worker's name, 'any', or role"),
        ('workers = ["W0"]\nfaults = [{at_ms = 1, kind = "drain", worker = "W1"}]', "is not one of workers, W0"),
        ('faults = [{kind = "drain", worker = "any"}]', "at_ms: must be given, or every_ms, or mtbf_ms"),
        ('faults = [{at_ms = -1, kind = "drain", worker = "any"}]', "at_ms = -1: must be 0 or more"),
        ('faults = [{at_ms = 5, until_ms = 5, kind = "drain", worker = "any"}]', "until_ms = 5: must be after at_ms"),
        ('faults = [{at_ms = 5, kind = "worker_slow", worker = "any"}]', "factor: kind worker_slow needs it"),
        *(
            (
                f'faults = [{{at_ms = 5, kind = "worker_slow", worker = "any", factor = {factor}}}]',
                f"factor = {factor}: {says}",
            )
            for factor, says in (
                (1, "must be more than 1"),
                (0.001, "must be more than 1"),
                (-2, "must be more than 1"),
            )
        ),
        *(
            (
                f'faults = [{{at_ms = 5, kind = "link_slow", link = "nic", factor = {factor}}}]',
                f"factor = {factor}: {says}",
            )
            for factor, says in (
                (
                    0,
                    "must be more than 0 and less than 1: the share of its bandwidth that is left; a link that carries",
                ),
                (1, "must be more than 0 and less than 1"),
                (100, "must be more than 0 and less than 1"),
            )
        ),
        ('faults = [{every_ms = 0.001, kind = "drain", worker = "any"}]', "every_ms = 0.001: must be 1 or more"),
        ('faults = [{mtbf_ms = 0.001, kind = "drain", worker = "any"}]', "mtbf_ms = 0.001: must be 1 or more"),
        (
            'faults = [{at_ms = 1, mtbf_ms = 5, kind = "drain", worker = "any"}]',
            "at_ms = 1: has no effect beside mtbf_ms",
        ),
        (
            'faults = [{at_ms = 1, count = 2, kind = "drain", worker = "any"}]',
            "count = 2: has no effect on a fault that",
        ),
        *(
            (
                f'faults = [{{{key} = 9, kind = "client_disconnect", rate = 0.5}}]',
                f"{key} = 9: has no effect beside rate",
            )
            for key in ("at_ms", "every_ms", "mtbf_ms")
        ),
        (
            'faults = [{at_ms = 1, kind = "client_disconnect", row = 0, within_ms = 5}]',
            "within_ms = 5: has no effect beside row",
        ),
        (
            'faults = [{at_ms = 1, kind = "worker_down", worker = "any", detect = "silent", detection_delay_ms = 5}]',
            "detection_delay_ms = 5: and detect = silent say two things",
        ),
        (
            'faults = [{at_ms = 1e13, kind = "drain", worker = "any"}]',
            "at_ms = 10000000000000.0: must be 1e+12 or less",
        ),
        (
            'faults = [{at_ms = 1, kind = "worker_slow", worker = "any", factor = 1e300}]',
            "factor = 1e+300: must be 1e+06 or less",
        ),
        ('faults = [{every_ms = 5, mtbf_ms = 5, kind = "drain", worker = "any"}]', "give one of them"),
        ('faults = [{every_ms = 5, jitter_ms = 4, kind = "drain", worker = "any"}]', "at most half of every_ms"),
        ('faults = [{at_ms = 5, kind = "event_loss", worker = "any", rate = 2}]', "rate = 2: must be 1 or less"),
        *(
            (f'faults = [{{at_ms = 5, kind = "partition", {keys}}}]', says)
            for keys, says in (
                ("for_ms = 5", "say which: a worker's name, 'any', or role = ..., or between = [SET, SET]"),
                ('between = "prefill"', "must be two sets of workers"),
                ('between = ["a", []]', "must be two sets of workers"),
                ('between = [["a", "b"], "b"]', "b is on both sides"),
                ('between = ["a", "b"], worker = "a"', "between says already who is cut off from whom"),
                ('between = ["a", "b"], detect = "lease"', "detect = 'lease': has no effect with between"),
                ('worker = "a", link = "nic"', "there is no key link of kind partition"),
            )
        ),
        (
            'workers = ["W0"]\nfaults = [{at_ms = 5, kind = "partition", between = ["W0", "decoed"]}]',
            "'decoed' is neither one of workers nor a role; did you mean decode",
        ),
        ("client_disconnects = [{at_ms = 5}]", "row: say which: row = N, or rate"),
        ('expect = [{metric = "requests_failed"}]', "needs a metric and one of le, lt, ge, gt, eq"),
        ('expect = [{metric = "request_failed", le = 0}]', "did you mean requests_failed"),
        ("faults = 3", "faults = 3: must be a list of tables"),
        ("faults = [", "not valid TOML"),
        ('first_worker = "W9"', "first_worker = 'W9': must be one of workers"),
    ],
)
def test_a_bad_file_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_scenario(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kinds_of_later_versions_are_named_as_such(tmp_path: Path) -> None:
    path = _write(tmp_path, 'faults = [{at_ms = 1, kind = "metrics_blind"}]')
    with pytest.raises(CapabilityError, match="metrics_blind is not available in this version: there is no planner"):
        read_scenario(path)


def test_a_missing_file_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory; --faults wants a scenario file"):
        read_scenario(tmp_path / "none.toml")


def _fault(**more: object) -> Fault:
    return Fault(index=0, name="faults[0]", where="x", kind="worker_down", worker="any", **more)  # type: ignore[arg-type]


def test_recurring_faults_come_in_time_and_within_their_jitter() -> None:
    found = list(occurrences(_fault(every_s=30.0, jitter_s=5.0, count=200, for_s=2.0), seed=3))
    off = [occurrence.at_s - 30.0 * (n + 1) for n, occurrence in enumerate(found)]
    assert len(found) == 200
    assert all(-5.0 <= away <= 5.0 for away in off)
    assert max(off) > 4.5
    assert min(off) < -4.5
    assert all(occurrence.until_s == occurrence.at_s + 2.0 for occurrence in found)


def test_mean_times_between_failures_and_to_repair_are_what_they_say() -> None:
    drawn = occurrences(_fault(mtbf_s=100.0, mttr_s=10.0), seed=5)
    found = list(itertools.islice(drawn, 4000))
    up = [b.at_s - (a.until_s or 0.0) for a, b in itertools.pairwise(found)]
    down = [(o.until_s or 0.0) - o.at_s for o in found]
    assert sum(up) / len(up) == pytest.approx(100, rel=0.05)  # standard error 1.6 %
    assert sum(down) / len(down) == pytest.approx(10, rel=0.05)
    assert all(wait >= 0 for wait in (*up, *down))


def test_draws_belong_to_the_fault_and_the_seed() -> None:
    a = next(occurrences(_fault(mtbf_s=100.0), seed=1))
    assert a == next(occurrences(_fault(mtbf_s=100.0), seed=1))
    assert a != next(occurrences(_fault(mtbf_s=100.0), seed=2))


def test_any_takes_each_worker_equally_often() -> None:
    names = ["a", "b", "c"]
    drawn = [chosen(o, names) for o in itertools.islice(occurrences(_fault(every_s=1.0), seed=0), 3000)]
    assert all(drawn.count(name) == pytest.approx(1000, rel=0.1) for name in names)  # 3 standard errors are 7.7 %


def test_one_time_faults_come_once() -> None:
    (only,) = occurrences(_fault(at_s=2.0, for_s=1.0), seed=0)
    assert only == Occurrence(0, 2.0, 3.0, only.u)


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        ({"set": {"prefill_tokens": 4000}}, [("prefill_tokens", 4000.0)]),
        ({"set": {"prefill_tokens": None, "engine_queue": 3}}, [("prefill_tokens", None), ("engine_queue", 3.0)]),
        ({"set": {"engine_queue": 3}, "clear": ["prefill_share"]}, [("engine_queue", 3.0), ("prefill_share", None)]),
    ],
)
def test_limits_are_set_and_cleared(entry: dict, changes: list, tmp_path: Path) -> None:
    """Null clears a limit; what is not named stays, so it is not there."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"faults": [{"at_ms": 5, "kind": "busy_thresholds"} | entry]}), encoding="utf-8")
    (fault,) = read_scenario(path).faults
    assert fault.changes == tuple(Threshold(name=name, limit=limit) for name, limit in changes)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({}, "say which limits"),
        ({"set": {"prefill_token": 4}}, "has no limit 'prefill_token'; it has "),
        ({"set": {"engine_queue": 1}}, "busy.engine_queue"),
        ({"set": {"engine_queue": "many"}}, "must be a number"),
        ({"set": {"prefill_tokens": 2.5}}, "router.busy.prefill_tokens is 2.5, it must be a whole number"),
        ({"set": {"prefill_share": 1e300}}, "router.busy.prefill_share is 1e+300, it must be 1,000,000.0 or less"),
        ({"set": {"engine_queue": 3}, "clear": ["engine_queue"]}, "each name once"),
        ({"set": {"engine_queue": 3}, "for_ms": 5}, "there is no key for_ms of kind busy_thresholds"),
    ],
)
def test_limits_that_are_none_are_refused(entry: dict, says: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"faults": [{"at_ms": 5, "kind": "busy_thresholds"} | entry]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_scenario(path)
