"""Writes a `Config`: as TOML that loads back to an equal one, the same with origins for a person, and plain values.

Nothing is left out but absent values, which the origins view names in a comment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twin.config import (
    AffinityConfig,
    BusyConfig,
    ClassConfig,
    Config,
    DisaggregationConfig,
    EngineConfig,
    FaultsConfig,
    KvbmConfig,
    LatencyConfig,
    LinkConfig,
    ObserveConfig,
    PathConfig,
    QueueConfig,
    ReplicasConfig,
    ResilienceConfig,
    RouterConfig,
    StartupConfig,
    ThunderConfig,
    TraceConfig,
    WorkerGroup,
)
from twin.config_file import NAMED, is_path
from twin.config_live import TABLES as LIVE_TABLES
from twin.config_live import LiveConfig
from twin.config_planner import LookaheadConfig, PlannerConfig
from twin.config_schema import keys_of
from twin.config_values import toml_value


class Line(NamedTuple):
    """One key on its way to text: `value` None when absent, `absent` then says what that means."""

    header: str
    name: str
    value: Any
    key: str
    absent: str

    @property
    def is_path(self) -> bool:
        """Whether the value names a file."""
        room, *inner = self.key.split(".")
        return is_path(".".join((room, *inner[1:]) if room == "workers" else (room, *inner)), self.value)


def to_toml(config: Config, beside: Path | None = None, *, live: bool = False) -> str:
    """The whole configuration. `load` makes an equal one of it, wherever it is put: paths are absolute, but those of
    files in the folder `beside`, which are named as they lie there: the text goes with them. Tables of serving stand in
    it if something in them is set, or `live`."""
    rows = []
    for line in _lines(config, live or config.live != LiveConfig()):
        if line.value is not None:
            value = _place(line.value, beside) if line.is_path else line.value
            rows.append((line.header, f"{line.name} = {toml_value(value)}"))
    return _text(rows)


def _place(path: str | Path, beside: Path | None) -> str:
    whole = os.path.abspath(path)
    if beside is not None and Path(whole).parent == Path(os.path.abspath(beside)):
        return os.path.basename(whole)
    return whole


def show(config: Config) -> str:
    """The same for a person: every value with where it came from, and absent ones as comments."""
    rows = []
    for line in _lines(config):
        absent = line.value is None
        text = f"# {line.name}: {line.absent}" if absent else f"{line.name} = {toml_value(line.value)}"
        origin = config.origins.get(line.key, "default")
        rows.append((line.header, text if absent and origin == "default" else f"{text:<40}  # {origin}"))
    return _text(rows)


def to_plain(config: Config, *, live: bool = False) -> dict[str, Any]:
    """The configuration as plain values for a report: equal runs give equal ones, so files are named, not located, and
    tables of serving are left out unless it is `live`."""
    plain: dict[str, Any] = {}
    for line in _lines(config, live):
        if line.value is None:
            continue
        *tables, _ = line.key.split(".")
        at = plain
        for table in tables:
            at = at.setdefault(table, {})
        value = list(line.value) if isinstance(line.value, tuple) else line.value
        at[line.name] = os.path.basename(line.value) if line.is_path else value
    return plain


def _lines(config: Config, live: bool = True) -> Iterator[Line]:
    for entry in keys_of(Config):
        if entry.name != "sla":
            yield Line("", entry.name, getattr(config, entry.name), entry.name, entry.limits.absent)
    if config.sla is not None:
        yield Line("[sla]", "limits", config.sla, "sla.limits", "")
    yield from _table("[trace]", "trace", TraceConfig, config.trace)
    for group in config.workers:
        shown = f"workers.{group.name}"
        yield from _table("[[workers]]", shown, WorkerGroup, group)
        yield from _table("[workers.engine]", f"{shown}.engine", EngineConfig, group.engine)
        yield from _table("[workers.latency]", f"{shown}.latency", LatencyConfig, group.latency)
        for name, value in group.latency.params.items():
            yield Line("[workers.latency]", _bare(name), value, f"{shown}.latency.{name}", "")
        yield from _table("[workers.startup]", f"{shown}.startup", StartupConfig, group.startup)
        yield from _table("[workers.kvbm]", f"{shown}.kvbm", KvbmConfig, group.kvbm)
        yield from _table("[workers.links]", f"{shown}.links", PathConfig, group.links)
    for link in config.links:
        yield from _table("[[links]]", f"links.{link.name}", LinkConfig, link)
    router = config.router
    yield from _table("[router]", "router", RouterConfig, router)
    yield from _table("[router.queue]", "router.queue", QueueConfig, router.queue)
    yield from _table("[router.busy]", "router.busy", BusyConfig, router.busy)
    yield from _table("[router.affinity]", "router.affinity", AffinityConfig, router.affinity)
    yield from _table("[router.thunder]", "router.thunder", ThunderConfig, router.thunder)
    for one in config.classes:
        yield from _table("[[classes]]", f"classes.{one.name}", ClassConfig, one)
    yield from _table("[replicas]", "replicas", ReplicasConfig, config.replicas)
    yield from _table("[observe]", "observe", ObserveConfig, config.observe)
    yield from _table("[disaggregation]", "disaggregation", DisaggregationConfig, config.disaggregation)
    yield from _table("[resilience]", "resilience", ResilienceConfig, config.resilience)
    yield from _table("[faults]", "faults", FaultsConfig, config.faults)
    yield from _table("[planner]", "planner", PlannerConfig, config.planner)
    yield from _table("[planner.lookahead]", "planner.lookahead", LookaheadConfig, config.planner.lookahead)
    if live:
        yield from _live_tables(config)


def _live_tables(config: Config) -> Iterator[Line]:
    for path, table in LIVE_TABLES.items():
        values: object = config
        for name in path.split("."):
            values = getattr(values, name)
        yield from _table(f"[{path}]", path, table, values)


def _table(header: str, shown: str, table: type, values: object) -> Iterator[Line]:
    for entry in keys_of(table):
        yield Line(header, entry.name, getattr(values, entry.name), f"{shown}.{entry.name}", entry.limits.absent)


def _bare(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else toml_value(name)


_REPEATED = tuple(f"[[{name}]]" for name in NAMED)


def _text(rows: Iterable[tuple[str, str]]) -> str:
    lines: list[str] = []
    under = ""
    for header, text in rows:
        if header != under or (header in _REPEATED and text.startswith("name = ")):
            lines += ["", header]
            under = header
        lines.append(text)
    return "\n".join(lines) + "\n"
