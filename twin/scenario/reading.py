"""Scripted faults: one file says who dies, hangs, slows or leaves, when, and what the run must come to all the same.

TOML, or the same structure in JSON. Keys are strict, times are milliseconds from the start of the trace. Nothing here
draws or runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from policies.cluster.events import BusyThresholdsChanged, Threshold
from policies.errors import CapabilityError, ConfigError
from twin.config_schema import LONGEST_S
from twin.config_values import nearest
from twin.scenario.kinds import CLIENTS, DETECTED, KINDS, LATER, WHEN
from twin.scenario.model import ANY, COMPARISONS, DETECTIONS, METRICS, ROLES, TIERS, Expectation, Fault, Scenario
from twin.scenario.table import Table

VERSION = 1
SHORTEST_EVERY_MS = 1
MOST_TIMES_AS_LONG = 1e6
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


def read_scenario(path: Path) -> Scenario:
    """Read and check a scenario file. Raises ConfigError, or CapabilityError for a kind of a later version."""
    table = Table(_document(path), str(path))
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


def _fault(table: Table, index: int, names: tuple[str, ...] | None) -> Fault:
    kind = table.text("kind")
    if kind is None:
        table.refuse("kind", f"must be given, one of {', '.join(KINDS)}")
    if kind in LATER:
        raise CapabilityError(f"{table.where}: kind {kind} is not available in this version: {LATER[kind]}")
    if kind not in KINDS:
        table.refuse("kind", f"is not a kind of fault{nearest(kind, [*KINDS, *LATER])}")
    table.only(("kind", *WHEN, *KINDS[kind].keys), f"of kind {kind}")
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
        delay_s=_ms(table, kind),
        row=table.whole("row", low=0),
        within_s=table.seconds("within_ms") or 0.0,
        link=table.text("link"),
        tier=table.text("tier", TIERS),
        extra_s=table.seconds("extra_ms", above=0) or 0.0,
        router=table.whole("router", low=0) or 0,
        bytes_per_s=table.number("bytes_per_s", above=0),
        changes=_changes(table) if kind == "busy_thresholds" else (),
    )
    _check(table, fault, names)
    return fault


def _factor(table: Table, kind: str) -> float:
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


def _ms(table: Table, kind: str) -> float:
    """How long, in seconds; a clock may go after (less than 0) as well as before."""
    if kind != "clock_skew":
        return table.seconds("ms", above=0) or 0.0
    ms = table.number("ms", low=-LONGEST_S * 1e3, high=LONGEST_S * 1e3)
    if ms == 0:
        table.refuse("ms", "must not be 0: how far the clock is before (or, below 0, behind) that of the cluster")
    return (ms or 0.0) / 1e3


def _changes(table: Table) -> tuple[Threshold, ...]:
    """Limits on load that are set, and those that are cleared: by `clear`, or by null where the file is JSON."""
    from policies.router.overload import BusySettings
    from twin.config import BusyConfig
    from twin.config_schema import keys_of

    given, cleared = table.limits("set"), table.names("clear") or ()
    changes = tuple(Threshold(name=name, limit=limit) for name, limit in (given | dict.fromkeys(cleared)).items())
    if not changes or len(changes) < len(given) + len(cleared):
        table.refuse("set", "say which limits: set = {prefill_tokens = 4000}, or clear = [NAME, ...], each name once")
    try:
        BusySettings().changed(BusyThresholdsChanged(at_s=0.0, changes=changes))
    except ConfigError as why:
        table.refuse("set", str(why))
    for entry in keys_of(BusyConfig):
        limit, most = given.get(entry.name), entry.limits.high
        if limit is not None and entry.kind == "int" and not limit.is_integer():
            table.refuse("set", f"router.busy.{entry.name} is {limit:g}, it must be a whole number")
        if limit is not None and most is not None and limit > most:
            table.refuse("set", f"router.busy.{entry.name} is {limit:g}, it must be {most:,} or less")
    return changes


def _check(table: Table, fault: Fault, names: tuple[str, ...] | None) -> None:
    """What no single key can tell."""
    if fault.every_s is not None and fault.mtbf_s is not None:
        table.refuse("mtbf_ms", "every_ms says when already; give one of them")
    if not fault.recurs and fault.at_s is None and not (fault.kind in CLIENTS and fault.rate is not None):
        table.refuse("at_ms", "must be given, or every_ms, or mtbf_ms")
    if fault.jitter_s and (fault.every_s is None or fault.jitter_s > fault.every_s / 2):
        table.refuse("jitter_ms", "must be at most half of every_ms")
    if sum(end is not None for end in (fault.for_s, fault.until_s, fault.mttr_s)) > 1:
        table.refuse("for_ms", "give one of for_ms, until_ms and mttr_ms")
    if fault.until_s is not None and (fault.recurs or fault.at_s is None or fault.until_s <= fault.at_s):
        table.refuse("until_ms", "must be after at_ms, and goes with at_ms alone")
    _check_idle(table, fault)
    _check_target(table, fault, names)
    if fault.kind in ("load_surge", "discovery_flap") and fault.recurs:
        table.refuse("every_ms", f"a {fault.kind} happens once; write one for each time, with at_ms")
    if fault.kind == "discovery_flap" and fault.for_s is None and fault.until_s is None:
        table.refuse("for_ms", "a store that comes and goes needs an end: for_ms or until_ms")
    if fault.kind in CLIENTS and (fault.row is None) is (fault.rate is None):
        table.refuse("row", "say which: row = N, or rate = a share of all requests")


def _check_idle(table: Table, fault: Fault) -> None:
    """Keys that another one leaves without effect."""
    if fault.kind in CLIENTS and fault.rate is not None:
        for key in WHEN:
            if key in table.values:
                table.refuse(key, "has no effect beside rate: it happens to clients at their own time")
    if fault.kind == "client_disconnect" and fault.row is not None and "within_ms" in table.values:
        table.refuse("within_ms", "has no effect beside row: that client leaves at_ms; it goes with rate")
    if fault.mtbf_s is not None and fault.at_s is not None:
        table.refuse("at_ms", "has no effect beside mtbf_ms, which draws every time; give one of them")
    if fault.count is not None and not fault.recurs:
        table.refuse("count", "has no effect on a fault that happens once; it needs every_ms or mtbf_ms")
    if fault.detect == "silent" and fault.detection_delay_s is not None:
        table.refuse("detection_delay_ms", "and detect = silent say two things; give one of them")


def _check_target(table: Table, fault: Fault, names: tuple[str, ...] | None) -> None:
    """Whom it happens to."""
    if fault.between is not None:
        _check_between(table, fault.between, names)
    elif "role" in KINDS[fault.kind].keys and (fault.worker is None) is (fault.role is None):
        sets = ", or between = [SET, SET]" if fault.kind == "partition" else ""
        table.refuse("worker", f"say which: a worker's name, {ANY!r}, or role = ...{sets}")
    if fault.worker not in (None, ANY) and names is not None and fault.worker not in names:
        table.refuse("worker", f"is not one of workers, {', '.join(names)}{nearest(str(fault.worker), names)}")


def _check_between(
    table: Table, between: tuple[tuple[str, ...], tuple[str, ...]], names: tuple[str, ...] | None
) -> None:
    for key in ("worker", "role"):
        if key in table.values:
            table.refuse(key, "between says already who is cut off from whom; give one of them")
    for key in DETECTED:
        if key in table.values:
            table.refuse(key, "has no effect with between: both sets reach the cluster, so no worker is taken for lost")
    for name in (*between[0], *between[1]):
        if names is not None and name not in names and name not in ROLES:
            known = (*names, *ROLES)
            table.refuse("between", f"{name!r} is neither one of workers nor a role{nearest(name, known)}")


def _expectation(table: Table) -> Expectation:
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
