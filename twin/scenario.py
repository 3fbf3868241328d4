"""Scripted faults: one file says who dies, hangs, slows or leaves, when, and what the run must come to all the same.

TOML, or the same structure in JSON. Keys are strict, times are milliseconds from the start of the trace. What is drawn
(recurring faults, `any`, mean times between failures) is a function of the seed, the fault and how often it came
before. Nothing here runs; `twin.mocker.faults` performs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from policies.cluster.draws import draw, pick
from policies.errors import CapabilityError, ConfigError
from twin.config import LONGEST_S
from twin.config_values import nearest

VERSION = 1
SHORTEST_EVERY_MS = 1
MOST_TIMES_AS_LONG = 1e6
ANY = "any"
TIERS = ("g2", "g3", "g4")
"""Host memory, disk, remote store."""
ROLES = ("mixed", "prefill", "decode")
DETECTIONS = ("disconnect", "lease", "silent")
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "eq": lambda value, limit: value == limit,
}

METRICS = (
    *(f"requests_{status}" for status in ("completed", "rejected", "cancelled", "failed")),
    "migrations",
    "longest_gap_ms",
)
"""What may be expected by a short name; anything else is the dotted path of a figure in report.json."""

_WHEN = ("at_ms", "every_ms", "jitter_ms", "count", "mtbf_ms")
_TARGET = ("worker", "role")
_DETECTED = ("detect", "detection_delay_ms")
_HOW_LONG = ("for_ms", "until_ms", "mttr_ms")


class _Kind(NamedTuple):
    """The keys of one kind of fault beside those that say when; `needs` names those that must be there."""

    keys: tuple[str, ...]
    needs: tuple[str, ...] = ()


KINDS: Mapping[str, _Kind] = {
    "worker_down": _Kind((*_TARGET, *_HOW_LONG, *_DETECTED)),
    "worker_up": _Kind(_TARGET),
    "worker_hang": _Kind((*_TARGET, *_HOW_LONG, "detection_delay_ms")),
    "partition": _Kind((*_TARGET, "between", *_HOW_LONG, *_DETECTED)),
    "worker_slow": _Kind((*_TARGET, *_HOW_LONG, "factor"), ("factor",)),
    "drain": _Kind((*_TARGET, *_HOW_LONG, "grace_ms", "timeout_ms", "known_after_ms")),
    "undrain": _Kind(_TARGET),
    "engine_error": _Kind((*_TARGET, *_HOW_LONG, "rate")),
    "event_loss": _Kind((*_TARGET, *_HOW_LONG, "rate"), ("rate",)),
    "event_delay": _Kind((*_TARGET, *_HOW_LONG, "ms"), ("ms",)),
    "report_stale": _Kind((*_TARGET, *_HOW_LONG)),
    "client_disconnect": _Kind(("row", "rate", "within_ms")),
    "link_slow": _Kind(("link", "factor", "for_ms", "until_ms"), ("link", "factor")),
    "link_down": _Kind(("link", "for_ms", "until_ms"), ("link",)),
    "tcp_fallback": _Kind(("for_ms", "until_ms")),
    "tier_down": _Kind(("tier", "worker", *_HOW_LONG), ("tier",)),
    "tier_full": _Kind(("tier", "worker", *_HOW_LONG), ("tier",)),
    "tier_corrupt": _Kind(("tier", "worker", *_HOW_LONG, "rate"), ("tier", "rate")),
    "discovery_down": _Kind(("for_ms", "until_ms")),
    "load_surge": _Kind(("factor", "for_ms", "until_ms"), ("factor",)),
}
LATER = (
    *("start_fail", "start_slow", "event_reorder", "event_dup"),
    *("index_restart", "router_restart", "frontend_restart", "discovery_flap"),
    *("metrics_blind", "clock_skew", "client_slow_reader"),
)
_TOP = (
    "version",
    "seed",
    "workers",
    "policy",
    "first_worker",
    "migration_limit",
    "migration_max_seq_len",
    "detection_delay_ms",
    "faults",
    "client_disconnects",
    "expect",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry. `index` is its place in the file (client_disconnects follow the faults), `name` says so, and `where`
    in which file.

    It happens at `at_s`, or every `every_s` (first then, give or take `jitter_s`, `count` times at most), or with a
    mean time of `mtbf_s` between failures. It is over after `for_s`, at `until_s`, or after a drawn time of mean
    `mttr_s`; with none of these it stays. `between`: two sets, each of names of workers and roles.
    """

    index: int
    name: str
    where: str
    kind: str
    at_s: float | None = None
    every_s: float | None = None
    jitter_s: float = 0.0
    count: int | None = None
    mtbf_s: float | None = None
    mttr_s: float | None = None
    for_s: float | None = None
    until_s: float | None = None
    worker: str | None = None
    role: str | None = None
    between: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    detect: str = "disconnect"
    detection_delay_s: float | None = None
    grace_s: float | None = None
    timeout_s: float | None = None
    known_after_s: float = 0.0
    factor: float = 1.0
    rate: float | None = None
    delay_s: float = 0.0
    row: int | None = None
    within_s: float = 0.0
    link: str | None = None
    tier: str | None = None

    @property
    def recurs(self) -> bool:
        return self.every_s is not None or self.mtbf_s is not None


class Occurrence(NamedTuple):
    """The n-th time of a fault, from 0: when, until when (None: for good), and the draw that picks its worker."""

    n: int
    at_s: float
    until_s: float | None
    u: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A limit on a metric of the run, or (`metric` None) that every invariant is watched at each event."""

    metric: str | None
    comparison: str = "le"
    limit: float = 0.0

    @property
    def text(self) -> str:
        return "invariants" if self.metric is None else f"{self.metric} {self.comparison} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario file. What it says of the cluster is None where it says nothing."""

    path: Path
    seed: int | None
    workers: tuple[str, ...] | None
    policy: str | None
    first_worker: str | None
    migration_limit: int | None
    migration_max_seq_len: int | None
    detection_delay_s: float | None
    faults: tuple[Fault, ...]
    expect: tuple[Expectation, ...]

    @property
    def watches_invariants(self) -> bool:
        return any(expectation.metric is None for expectation in self.expect)


def occurrences(fault: Fault, seed: int) -> Iterator[Occurrence]:
    """When a fault happens, in order; endless for one that recurs without a count."""
    end_s = 0.0
    n = 0
    while fault.count is None or n < fault.count:
        at_s = _nth(fault, n, end_s, seed)
        until_s = fault.until_s
        if fault.for_s is not None:
            until_s = at_s + fault.for_s
        elif fault.mttr_s is not None:
            until_s = at_s + _exponential(fault.mttr_s, _u(fault, n, 2, seed))
        yield Occurrence(n, at_s, until_s, _u(fault, n, 1, seed))
        end_s = until_s if until_s is not None else at_s
        n += 1
        if not fault.recurs:
            return


class Surges:
    """When rows arrive that surges bring forward: the demand goes faster while one lasts, and on as usual behind it."""

    def __init__(self, windows: Iterable[tuple[float, float, float]]) -> None:
        """`windows` are (start, end, factor), in seconds of the run; they must not overlap."""
        self._windows = sorted(windows)

    def __call__(self, recorded_s: float) -> float:
        """The time at which a row arrives that was recorded then; monotonic."""
        ahead_s = 0.0  # how much earlier than recorded a row arrives
        for start_s, end_s, factor in self._windows:
            into_s = recorded_s - ahead_s - start_s
            if into_s <= 0.0:
                break
            whole_s = factor * (end_s - start_s)
            if into_s < whole_s:
                return start_s + into_s / factor
            ahead_s += whole_s - (end_s - start_s)
        return recorded_s - ahead_s


def surges(scenario: Scenario) -> Surges | None:
    """The surges of a scenario; None where it has none. Raises ConfigError where they overlap."""
    found = sorted((f for f in scenario.faults if f.kind == "load_surge"), key=lambda f: f.at_s or 0.0)
    windows: list[tuple[float, float, float]] = []
    for fault in found:
        assert fault.at_s is not None
        end_s = fault.until_s if fault.until_s is not None else fault.at_s + (fault.for_s or math.inf)
        if windows and fault.at_s < windows[-1][1]:
            raise ConfigError(f"{fault.where}: begins before the surge before it is over, at {windows[-1][1]:g} s")
        windows.append((fault.at_s, end_s, fault.factor))
    return Surges(windows) if windows else None


def chosen(occurrence: Occurrence, names: list[str]) -> str:
    """One of several workers, each equally likely."""
    return names[pick(occurrence.u, len(names))]


def _nth(fault: Fault, n: int, end_s: float, seed: int) -> float:
    u = _u(fault, n, 0, seed)
    if fault.mtbf_s is not None:
        return end_s + _exponential(fault.mtbf_s, u)
    if fault.every_s is not None:
        first_s = fault.every_s if fault.at_s is None else fault.at_s
        return max(first_s + n * fault.every_s + fault.jitter_s * (2.0 * u - 1.0), 0.0)
    assert fault.at_s is not None
    return fault.at_s


def _u(fault: Fault, n: int, use: int, seed: int) -> float:
    return draw(seed, "fault", str(fault.index), 4 * n + use)


def _exponential(mean_s: float, u: float) -> float:
    return -mean_s * math.log(1.0 - u)


# ---------------------------------------------------------------- reading


def read_scenario(path: Path) -> Scenario:
    """Read and check a scenario file. Raises ConfigError, or CapabilityError for a kind of a later version."""
    table = _Table(_document(path), str(path))
    table.only(_TOP)
    version = table.number("version", low=1)
    if version not in (None, VERSION):
        table.refuse("version", f"this version reads {VERSION}")
    names = table.names("workers")
    first = table.text("first_worker")
    if first is not None and (names is None or first not in names):
        table.refuse("first_worker", "must be one of workers")
    entries = table.tables("faults")
    leavers = table.tables("client_disconnects")
    faults = [_fault(entry, index, names) for index, entry in enumerate(entries)]
    for index, entry in enumerate(leavers, len(faults)):
        entry.values.setdefault("kind", "client_disconnect")
        faults.append(_fault(entry, index, names))
    delay_s = table.seconds("detection_delay_ms")
    return Scenario(
        path=path,
        seed=table.whole("seed", low=0),
        workers=names,
        policy=table.text("policy"),
        first_worker=first,
        migration_limit=table.whole("migration_limit", low=0),
        migration_max_seq_len=table.whole("migration_max_seq_len", low=1),
        detection_delay_s=delay_s,
        faults=tuple(faults),
        expect=tuple(_expectation(entry) for entry in table.tables("expect")),
    )


def _document(path: Path) -> Mapping[str, object]:
    import json
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {why}; --faults wants a scenario file, TOML or JSON") from None
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: not valid {form}: {error}; see docs/faults.md") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be one table; see docs/faults.md")
    return found


def _fault(table: _Table, index: int, names: tuple[str, ...] | None) -> Fault:
    kind = table.text("kind")
    if kind is None:
        table.refuse("kind", f"must be given, one of {', '.join(KINDS)}")
    if kind in LATER:
        raise CapabilityError(
            f"{table.where}: kind {kind} is not available in this version, which has {', '.join(KINDS)}"
        )
    if kind not in KINDS:
        table.refuse("kind", f"is not a kind of fault{nearest(kind, [*KINDS, *LATER])}")
    table.only(("kind", *_WHEN, *KINDS[kind].keys), f"of kind {kind}")
    for key in KINDS[kind].needs:
        if key not in table.values:
            table.refuse(key, f"kind {kind} needs it")
    fault = Fault(
        index=index,
        name=table.where.rpartition(": ")[2],
        where=table.where,
        kind=kind,
        at_s=table.seconds("at_ms"),
        every_s=table.seconds("every_ms", low=SHORTEST_EVERY_MS),
        jitter_s=table.seconds("jitter_ms") or 0.0,
        count=table.whole("count", low=1),
        mtbf_s=table.seconds("mtbf_ms", low=SHORTEST_EVERY_MS),
        mttr_s=table.seconds("mttr_ms", above=0),
        for_s=table.seconds("for_ms", above=0),
        until_s=table.seconds("until_ms"),
        worker=table.text("worker"),
        role=table.text("role", ROLES),
        between=table.two_sets("between"),
        detect=table.text("detect", DETECTIONS) or ("lease" if kind == "partition" else "disconnect"),
        detection_delay_s=table.seconds("detection_delay_ms"),
        grace_s=table.seconds("grace_ms"),
        timeout_s=table.seconds("timeout_ms"),
        known_after_s=table.seconds("known_after_ms") or 0.0,
        factor=_factor(table, kind),
        rate=table.number("rate", low=0, high=1),
        delay_s=table.seconds("ms", above=0) or 0.0,
        row=table.whole("row", low=0),
        within_s=table.seconds("within_ms") or 0.0,
        link=table.text("link"),
        tier=table.text("tier", TIERS),
    )
    _check(table, fault, names)
    return fault


def _factor(table: _Table, kind: str) -> float:
    """How many times as long steps take (worker_slow), or which share of its bandwidth a link has left (link_slow)."""
    factor = table.number("factor", high=MOST_TIMES_AS_LONG)
    if factor is None:
        return 1.0
    if kind == "worker_slow" and factor <= 1.0:
        table.refuse("factor", "must be more than 1: steps take so many times as long")
    if kind == "load_surge" and factor <= 1.0:
        table.refuse("factor", "must be more than 1: requests arrive so many times as fast")
    if kind == "link_slow" and not 0.0 < factor < 1.0:
        down = "; a link that carries nothing is link_down" if factor == 0.0 else ""
        table.refuse("factor", f"must be more than 0 and less than 1: the share of its bandwidth that is left{down}")
    return factor


def _check(table: _Table, fault: Fault, names: tuple[str, ...] | None) -> None:
    """What no single key can tell."""
    if fault.every_s is not None and fault.mtbf_s is not None:
        table.refuse("mtbf_ms", "every_ms says when already; give one of them")
    if not fault.recurs and fault.at_s is None and fault.rate is None:
        table.refuse("at_ms", "must be given, or every_ms, or mtbf_ms")
    if fault.jitter_s and (fault.every_s is None or fault.jitter_s > fault.every_s / 2):
        table.refuse("jitter_ms", "must be at most half of every_ms")
    if sum(end is not None for end in (fault.for_s, fault.until_s, fault.mttr_s)) > 1:
        table.refuse("for_ms", "give one of for_ms, until_ms and mttr_ms")
    if fault.until_s is not None and (fault.recurs or fault.at_s is None or fault.until_s <= fault.at_s):
        table.refuse("until_ms", "must be after at_ms, and goes with at_ms alone")
    _check_idle(table, fault)
    _check_target(table, fault, names)
    if fault.kind == "load_surge" and fault.recurs:
        table.refuse("every_ms", "a surge happens once; write one for each time, with at_ms")
    if fault.kind == "client_disconnect" and (fault.row is None) is (fault.rate is None):
        table.refuse("row", "say which: row = N, or rate = a share of all requests")


def _check_idle(table: _Table, fault: Fault) -> None:
    """Keys that another one leaves without effect."""
    if fault.kind == "client_disconnect" and fault.rate is not None:
        for key in _WHEN:
            if key in table.values:
                table.refuse(key, "has no effect beside rate: clients leave within within_ms of their own arrival")
    if fault.kind == "client_disconnect" and fault.row is not None and "within_ms" in table.values:
        table.refuse("within_ms", "has no effect beside row: that client leaves at_ms; it goes with rate")
    if fault.mtbf_s is not None and fault.at_s is not None:
        table.refuse("at_ms", "has no effect beside mtbf_ms, which draws every time; give one of them")
    if fault.count is not None and not fault.recurs:
        table.refuse("count", "has no effect on a fault that happens once; it needs every_ms or mtbf_ms")
    if fault.detect == "silent" and fault.detection_delay_s is not None:
        table.refuse("detection_delay_ms", "and detect = silent say two things; give one of them")


def _check_target(table: _Table, fault: Fault, names: tuple[str, ...] | None) -> None:
    """Whom it happens to."""
    if fault.between is not None:
        _check_between(table, fault.between, names)
    elif "role" in KINDS[fault.kind].keys and (fault.worker is None) is (fault.role is None):
        sets = ", or between = [SET, SET]" if fault.kind == "partition" else ""
        table.refuse("worker", f"say which: a worker's name, {ANY!r}, or role = ...{sets}")
    if fault.worker not in (None, ANY) and names is not None and fault.worker not in names:
        table.refuse("worker", f"is not one of workers, {', '.join(names)}{nearest(str(fault.worker), names)}")


def _check_between(
    table: _Table, between: tuple[tuple[str, ...], tuple[str, ...]], names: tuple[str, ...] | None
) -> None:
    for key in ("worker", "role"):
        if key in table.values:
            table.refuse(key, "between says already who is cut off from whom; give one of them")
    for key in _DETECTED:
        if key in table.values:
            table.refuse(key, "has no effect with between: both sets reach the cluster, so no worker is taken for lost")
    for name in (*between[0], *between[1]):
        if names is not None and name not in names and name not in ROLES:
            known = (*names, *ROLES)
            table.refuse("between", f"{name!r} is neither one of workers nor a role{nearest(name, known)}")


def _expectation(table: _Table) -> Expectation:
    table.only(("metric", "invariants", *COMPARISONS))
    if "invariants" in table.values:
        table.text("invariants", ("all",))
        return Expectation(metric=None)
    metric = table.text("metric")
    given = [name for name in COMPARISONS if name in table.values]
    if metric is None or len(given) != 1:
        table.refuse("metric", f"needs a metric and one of {', '.join(COMPARISONS)}")
    if "." not in metric and metric not in METRICS:
        table.refuse(
            "metric", f"must be {', '.join(METRICS)}, or a path like latency.ttft_s.p99{nearest(metric, METRICS)}"
        )
    limit = table.number(given[0])
    assert limit is not None
    return Expectation(metric=metric, comparison=given[0], limit=limit)


class _Table:
    """One table of the file; every refusal names where, key, value and what it may be."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = dict(values)
        self.where = where

    def refuse(self, key: str, why: str) -> NoReturn:
        shown = f"{key} = {self.values[key]!r}" if key in self.values else key
        raise ConfigError(f"{self.where}: {shown}: {why}; see docs/faults.md")

    def only(self, known: tuple[str, ...], of: str = "") -> None:
        for key in self.values:
            if key not in known:
                near = nearest(key, known) or f"; known are {', '.join(known)}"
                raise ConfigError(f"{self.where}: there is no key {key}{f' {of}' if of else ''}{near}")

    def number(
        self, key: str, *, low: float | None = None, above: float | None = None, high: float | None = None
    ) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, "must be a number")
        if low is not None and value < low:
            self.refuse(key, f"must be {low} or more")
        if above is not None and value <= above:
            self.refuse(key, f"must be more than {above}")
        if high is not None and value > high:
            self.refuse(key, f"must be {high:g} or less")
        return float(value)

    def whole(self, key: str, *, low: int) -> int | None:
        if self.number(key, low=low) is None:
            return None
        value = self.values[key]
        if not isinstance(value, int):
            self.refuse(key, "must be a whole number")
        return value

    def seconds(self, key: str, *, low: float = 0, above: float | None = None) -> float | None:
        """A key in milliseconds, as seconds."""
        value = self.number(key, low=low, above=above, high=LONGEST_S * 1e3)
        return None if value is None else value / 1e3

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self.refuse(key, "must be text")
        if choices and value not in choices:
            self.refuse(key, f"must be {' or '.join(choices)}{nearest(value, choices)}")
        return value

    def names(self, key: str) -> tuple[str, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not _is_names(value):
            self.refuse(key, "must be a list of names")
        if len(set(value)) != len(value) or ANY in value:
            self.refuse(key, f"each name must be there once, and none may be {ANY!r}")
        return tuple(value)

    def two_sets(self, key: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Two sets of names, each a name or a list of them."""
        value = self.values.get(key)
        if value is None:
            return None
        sets = [[one] if isinstance(one, str) else one for one in value] if isinstance(value, list) else []
        if len(sets) != 2 or not all(_is_names(one) for one in sets):
            self.refuse(key, "must be two sets of workers, each a name, a role, or a list of these")
        some, rest = (tuple(one) for one in sets)
        if set(some) & set(rest):
            self.refuse(key, f"{', '.join(sorted(set(some) & set(rest)))} is on both sides")
        return some, rest

    def tables(self, key: str) -> list[_Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            self.refuse(key, "must be a list of tables")
        return [_Table(entry, f"{self.where}: {key}[{at}]") for at, entry in enumerate(value)]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) and name for name in value)
