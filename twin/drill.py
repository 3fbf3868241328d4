"""A run under a scenario: the policies and watchers that it needs, and whether it came to what was expected.

It wires the scenario to a world and judges the record afterwards; what happens in between is `twin.mocker.faults`.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from policies.cluster.actions import Action
from policies.cluster.controller import Controller, JournalSink, Policy
from policies.cluster.events import Event
from policies.cluster.invariants import Invariants
from policies.errors import ConfigError
from policies.resilience.drain import DrainRules
from policies.router.build import MODES
from reports.report import Report
from twin.config import BusyConfig, Config
from twin.config_schema import keys_of
from twin.deciding import guards, migration
from twin.mocker.faults.messages import KV_EVENTS
from twin.mocker.faults.script import Faults
from twin.mocker.faults.stage import Detection
from twin.mocker.world import MockWorld
from twin.replay import FAULTS_JSON
from twin.scenario.model import COMPARISONS, METRICS, Expectation, Fault
from twin.scenario.reading import read_scenario
from twin.scenario.times import surges


class Watched:
    """A journal sink that checks every invariant at every event, and passes on to the journal if there is one."""

    def __init__(self, journal: JournalSink | None) -> None:
        self.invariants = Invariants()
        self._journal = journal

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.invariants.observe(event, actions)
        if self._journal is not None:
            self._journal.note(event, actions)


class Drill:
    """One scenario for one run: `controller`, then `start`, and `finish` when the report is there."""

    def __init__(self, config: Config) -> None:
        assert config.faults.path is not None
        self.scenario = read_scenario(config.faults.path)
        for expectation in self.scenario.expect:
            _check_metric(expectation.metric, self.scenario.path)
        self._config = config
        self._watched: Watched | None = None
        self._faults: Faults | None = None
        self._migration = migration(config)
        self._guards = guards(config.resilience)
        self.arrives_s = surges(self.scenario)
        if self.arrives_s is not None and config.trace.arrivals == "closed":
            where = next(fault.where for fault in self.scenario.faults if fault.kind == "load_surge")
            raise ConfigError(
                f"{where}: load_surge has no effect: arrivals are closed, a request arrives when one ends; leave it "
                "out, or trace.concurrency"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What stands beside the router, in order."""
        return (self._migration, *self._guards)

    @property
    def loses_events(self) -> bool:
        """Whether messages of workers are lost or late, so that their number matters."""
        return any(fault.kind in KV_EVENTS for fault in self.scenario.faults)

    def controller(self, policies: Sequence[Policy], journal: JournalSink | None) -> Controller:
        """A controller of these policies, watched where the scenario wants that."""
        if self.scenario.watches_invariants:
            self._watched = Watched(journal)
        return Controller(policies, self._watched or journal)

    def start(self, world: MockWorld) -> None:
        """Put the faults on the clock of a world that has not run yet."""
        resilience = self._config.resilience
        detection = Detection(
            disconnect_s=resilience.detection_delay_s,
            lease_s=resilience.lease_ttl_s,
            inactivity_s=resilience.response_inactivity_s,
        )
        more = {}
        if self._config.disaggregation.bandwidth_gb_per_s is not None:
            more["no_links"] = (
                "this run has no links, as disaggregation.bandwidth_gb_per_s gives every transfer one of its own; "
                "leave that out, or the fault"
            )
        self._faults = Faults(
            world,
            self.scenario,
            seed=self._config.seed,
            detection=detection,
            network=world.network,
            routers=self._config.replicas.count,
            **more,
        )
        world.churn.rules = DrainRules(grace_s=resilience.grace_s, timeout_s=resilience.drain_timeout_s)
        self._faults.start()

    def check_rows(self, requests: int | None) -> None:
        """Refuse faults of rows that a run of so many requests (None: nobody knows) does not have."""
        for fault in self.scenario.faults:
            if requests is not None and fault.row is not None and fault.row >= requests:
                raise ConfigError(
                    f"{fault.where}: row = {fault.row}: the run has {requests} requests, rows 0 to {requests - 1}"
                )

    def warnings(self) -> list[str]:
        """Which links were slow, and what of the scenario relies on a setting that is off."""
        table = self._config.resilience
        told = self._faults.slow_links() if self._faults is not None else []
        if table.migration_limit or not any(fault.kind == "drain" for fault in self.scenario.faults):
            return told
        return [
            *told,
            "drains: what is left at the end of its time fails, as does what routers send after the grace, for "
            "migration is off (resilience.migration_limit = 0)",
        ]

    def without_effect(self) -> list[str]:
        """Faults that can change nothing in this run, one line each."""
        mode = self._config.router.mode
        no_index = mode in MODES and mode != "kv"
        found = self._faults.without_effect() if self._faults is not None else []
        for fault in self.scenario.faults:
            why = None
            if fault.kind == "index_restart" and no_index:
                why = f"mode {mode} keeps no index"
            elif fault.rate == 0:
                why = "its rate is 0"
            elif fault.kind == "busy_thresholds":
                why = self._unchanged(fault)
            found += [] if why is None else [f"{fault.name}: {fault.kind} has no effect: {why}"]
        return found

    def _unchanged(self, fault: Fault) -> str | None:
        """Why limits on load stay what they are: what is cleared is never set, what is set counts beside another."""
        table = self._config.router.busy
        ever = {entry.name for entry in keys_of(BusyConfig) if getattr(table, entry.name) is not None}
        changes = [change for one in self.scenario.faults for change in one.changes]
        ever |= {change.name for change in changes if change.limit is not None}
        idle = {"engine_running"} if "engine_queue" not in ever else set()
        if any(change.name in ever - idle for change in fault.changes):
            return None
        names = sorted({change.name for change in fault.changes} & idle & ever)
        return "without engine_queue nobody counts what runs" if names else "what it clears is never set"

    def finish(self, world: MockWorld, folder: Path, report: Report, *, partial: bool) -> tuple[str, ...]:
        """Write faults.json; returns what was missed, one line each: expectations, and faults that did nothing."""
        faults = self._faults
        assert faults is not None
        if self._watched is not None:
            self._watched.invariants.finish(partial=partial)
        never = faults.never_applied(world.last_end_s)
        judged = [self._judge(expectation, folder, report) for expectation in self.scenario.expect]
        told = {
            "scenario": self.scenario.path.name,
            "timeline": [entry.plain() for entry in faults.timeline],
            "migration": self._migration.counters(),
            "health": {name: n for guard in self._guards for name, n in guard.counters().items()},
            "migration_s": asdict(self._migration.took),
            "never_applied": never,
            "expect": [
                {"expected": expectation.text, "value": value, "met": met}
                for expectation, (value, met) in zip(self.scenario.expect, judged, strict=True)
            ],
        }
        (folder / FAULTS_JSON).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        missed = [
            f"expected {expectation.text}, it is {'undefined' if value is None else f'{value:g}'}"
            for expectation, (value, met) in zip(self.scenario.expect, judged, strict=True)
            if not met
        ]
        return (*never, *missed)

    def _judge(self, expectation: Expectation, folder: Path, report: Report) -> tuple[float | None, bool]:
        """The value of a metric and whether it is within its limit; what is undefined meets nothing."""
        if expectation.metric is None:
            return None, True
        if expectation.metric == "recovery_ms":
            value = self._recovery_ms(folder)
        else:
            value = _metric(expectation.metric, folder, report, self.scenario.path)
        return value, value is not None and COMPARISONS[expectation.comparison](value, expectation.limit)

    def _recovery_ms(self, folder: Path) -> float | None:
        """How long after the last fault was over requests arrived that were rejected or failed: 0 where none did; None
        where no fault was over."""
        assert self._faults is not None
        over_s = max((entry.over_s for entry in self._faults.timeline if entry.over_s is not None), default=None)
        if over_s is None:
            return None
        columns = _columns(folder, "requests", "status", "arrival_s").values()
        late = [at_s - over_s for status, at_s in zip(*columns, strict=True) if status in ("rejected", "failed")]
        return 1e3 * float(max([0.0, *late]))


def _metric(name: str, folder: Path, report: Report, where: Path) -> float | None:
    """A count of requests, the migrations, the longest gap, or a figure of report.json by its dotted path."""
    if name.startswith("requests_"):
        status = name.removeprefix("requests_")
        return float(sum(found == status for found in _columns(folder, "requests", "status")["status"]))
    if name == "migrations":
        return float(sum(_columns(folder, "requests", "migrations")["migrations"]))
    if name == "longest_gap_ms":
        return longest_gap_s(folder) * 1e3
    found: object = json.loads(report.to_json())
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            raise _no_metric(name, where)
        found = found[part]
    return float(found) if isinstance(found, int | float) else None


def _check_metric(name: str | None, where: Path) -> None:
    """Refuse a path that no report has; what a run alone decides (keys of a mapping, groups) is left to its end."""
    if name is None or name in METRICS:
        return
    kind: object = Report
    for part in name.split("."):
        if not (isinstance(kind, type) and is_dataclass(kind)):
            if kind in (int, float, str, bool):
                raise _no_metric(name, where)
            return
        if part not in {item.name for item in fields(kind)}:
            raise _no_metric(name, where, f"; {kind.__name__} has {', '.join(item.name for item in fields(kind))}")
        try:
            kind = typing.get_type_hints(kind)[part]
        except NameError:
            return  # it holds what is imported for type checkers alone: the end of the run will tell
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(option for option in typing.get_args(kind) if option is not type(None))


def _no_metric(name: str, where: Path, more: str = "") -> ConfigError:
    return ConfigError(
        f"{where}: expect: there is no metric {name}; there are requests_<status>, migrations, longest_gap_ms "
        f"and every figure of report.json by its path, like latency.ttft_s.p99{more}"
    )


def longest_gap_s(folder: Path) -> float:
    """The longest time between two tokens of one request."""
    steps = _columns(folder, "steps", "steps", "gap_tokens", "gap0_s", "gap1_s", "gap2_s")
    longest = 0.0
    for count, tokens, g0, g1, g2 in zip(*steps.values(), strict=True):
        if tokens:
            last = count - 1
            longest = max(longest, g0, g0 + last * (g1 + last * g2))
    return longest


def _columns(folder: Path, table: str, *names: str) -> dict[str, list[Any]]:
    from pyarrow import parquet

    columns: dict[str, list[Any]] = parquet.read_table(folder / f"{table}.parquet", columns=list(names)).to_pydict()
    return columns
