"""Fills a `Config` from a TOML file, the command line's flags and `--set`, and checks it as a whole.

Later layers win: defaults, file, flags, `--set`. Every refusal is one line: where, which key, the value, the limit,
what to do. Nothing is ignored: an unknown key is refused with the nearest name and the table that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from policies.errors import ConfigError
from twin.config import (
    KIND_DEFAULTS,
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
from twin.config_effect import foreign_keys, without_effect
from twin.config_file import NAMED, ONE, SHORT_FORMS, Found, dotted, read_file
from twin.config_live import TABLES as LIVE_TABLES
from twin.config_live import FrontendConfig, LiveConfig
from twin.config_planner import TABLES as PLANNER_TABLES
from twin.config_planner import LookaheadConfig, PlannerConfig
from twin.config_schema import keys_of
from twin.config_together import check_together
from twin.config_values import Given, Key, checked, nearest, parameter

# Flags of the command line, and the keys that they stand for.
FLAGS: Mapping[str, str] = {
    "TRACE": "trace.path",
    "--workers": "workers.count",
    "--engine": "workers.engine.kind",
    "--model": "workers.model",
    "--gpu": "workers.gpu",
    "--tp": "workers.tp",
    "--block-size": "workers.engine.block_size",
    "--kv-blocks": "workers.engine.kv_blocks",
    "--latency": "workers.latency.model",
    "--strict": "workers.latency.strict",
    "--router": "router.mode",
    "--sla": "sla.limits",
    "--faults": "faults.path",
    "--planner": "planner.name",
    "--seed": "seed",
    "--limit": "trace.limit",
    "--speedup": "trace.speedup",
    "--concurrency": "trace.concurrency",
    "--format": "trace.format",
    "--default-osl": "trace.default_osl",
    "--keep-zero-output": "trace.keep_zero_output",
    "--on-bad-row": "trace.on_bad_row",
    "--time-unit": "trace.time_unit",
    "--hash-block-tokens": "trace.hash_block_tokens",
    "--sort": "trace.sort",
    "--allow-no-effect": "allow_no_effect",
    "--lease": "disaggregation.lease_s",  # these three of twin serve and twin worker
    "--grace": "resilience.grace_s",
    "--drain": "resilience.drain_timeout_s",
}
TABLES: Mapping[str, type] = {
    "": Config,
    "trace": TraceConfig,
    "workers": WorkerGroup,
    "workers.engine": EngineConfig,
    "workers.latency": LatencyConfig,
    "workers.startup": StartupConfig,
    "workers.kvbm": KvbmConfig,
    "workers.links": PathConfig,
    "links": LinkConfig,
    "router": RouterConfig,
    "router.queue": QueueConfig,
    "classes": ClassConfig,
    "router.busy": BusyConfig,
    "router.affinity": AffinityConfig,
    "router.thunder": ThunderConfig,
    "replicas": ReplicasConfig,
    "observe": ObserveConfig,
    "disaggregation": DisaggregationConfig,
    "resilience": ResilienceConfig,
    "faults": FaultsConfig,
    **PLANNER_TABLES,
    **LIVE_TABLES,
}


class Varied(NamedTuple):
    """A value of one point of a sweep: its dotted key, its text, and who gave it (`--vary`, or a place in a list)."""

    key: str
    value: str
    origin: str


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    sets: Iterable[str] = (),
    varied: Iterable[Varied] = (),
) -> Config:
    """The configuration of a run.

    `flags` are values by flag (a name in FLAGS), None where not given; `sets` are texts like `router.mode=kv`;
    `varied`, which wins over all, makes it that of one point of a sweep.
    Raises ConfigError, or CapabilityError for what a later version will have.
    """
    given, groups = read_file(file) if file is not None else ({}, [None])
    named = {
        table: [str(value.value) for key, value in given.items() if key[0] == table and key[-1] == "name"]
        for table in NAMED
    }
    for flag, value in (flags or {}).items():
        if value is not None:
            given[_key(FLAGS[flag], groups, named, flag)] = Given(value, flag, isinstance(value, str))
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: no '='; write it like --set router.mode=kv")
        given[_key(name.strip(), groups, named, f"--set {text}")] = Given(value.strip(), "--set", True)
    for key, value, origin in varied:
        given[_key(key, groups, named, f"{origin} {key}")] = Given(value, origin, True)
    return _Builder(given, len(groups), {table: len(names) for table, names in named.items()}).config()


def _key(name: str, groups: Sequence[str | None], named: Mapping[str, Sequence[str]], asked_by: str) -> Key:
    """A dotted name as a key: `workers.count` is that of the only group, `workers.NAME.count` that of a named one;
    `links.NAME.latency_s` is that of a link of the file, and so with classes."""
    parts = name.split(".")
    table = parts[0]
    if table in named and len(parts) > 1:
        if parts[1] not in named[table]:
            there = ", ".join(named[table]) or f"none: write a table [[{table}]] in a file"
            raise ConfigError(f"{asked_by}: there is no {ONE[table]} {parts[1]}; there are {there}")
        return (table, named[table].index(parts[1]), *parts[2:])
    if parts[0] != "workers" or len(parts) == 1:
        short = SHORT_FORMS.get(name)
        return (*parts, short) if short else tuple(parts)
    at = 0
    if len(parts) > 2 and parts[1] in [group or "pool" for group in groups]:
        at = [group or "pool" for group in groups].index(parts.pop(1))
    elif len(groups) > 1:
        names = ", ".join(str(group) for group in groups)
        raise ConfigError(
            f"{asked_by}: there are {len(groups)} groups of workers ({names}); "
            f"say which one: --set workers.{groups[0]}.{'.'.join(parts[1:])}=VALUE"
        )
    key: Key = ("workers", at, *parts[1:])
    short = SHORT_FORMS.get(dotted(key))
    return (*key, short) if short else key


class _Builder:
    """Takes the given values one by one into dataclasses; what is left over at the end is unknown."""

    def __init__(self, given: Found, groups: int, named: Mapping[str, int]) -> None:
        self._left = given
        self._groups = groups
        self._named = named
        self._origins: dict[str, str] = {}

    def config(self) -> Config:
        self._imply()
        sla = self._left.pop(("sla", "limits"), None)
        if sla is not None:
            self._left["sla",] = sla
        config = Config(
            **self._values(Config, (), ""),
            trace=TraceConfig(**self._values(TraceConfig, ("trace",), "trace.")),
            workers=tuple(self._group(at) for at in range(self._groups)),
            links=tuple(LinkConfig(**self._one("links", at, LinkConfig)) for at in range(self._named["links"])),
            router=self._router(),
            classes=tuple(ClassConfig(**self._one("classes", at, ClassConfig)) for at in range(self._named["classes"])),
            replicas=ReplicasConfig(**self._values(ReplicasConfig, ("replicas",), "replicas.")),
            observe=ObserveConfig(**self._values(ObserveConfig, ("observe",), "observe.")),
            disaggregation=DisaggregationConfig(
                **self._values(DisaggregationConfig, ("disaggregation",), "disaggregation.")
            ),
            resilience=ResilienceConfig(**self._values(ResilienceConfig, ("resilience",), "resilience.")),
            faults=FaultsConfig(**self._values(FaultsConfig, ("faults",), "faults.")),
            planner=PlannerConfig(
                **self._values(PlannerConfig, ("planner",), "planner."),
                lookahead=LookaheadConfig(
                    **self._values(LookaheadConfig, ("planner", "lookahead"), "planner.lookahead.")
                ),
            ),
            live=LiveConfig(**self._live()),
            origins=MappingProxyType(self._origins),
        )
        for key, given in self._left.items():
            raise _unknown(key, given)
        check_together(config)
        return _check_effect(config)

    def _imply(self) -> None:
        """What one option says about another: a concurrency means a closed loop."""
        if ("trace", "concurrency") in self._left:
            self._left.setdefault(("trace", "arrivals"), Given("closed", "implied by trace.concurrency"))
        path = self._left.get(("faults", "path"))
        if path is not None and path.value:
            self._imply_scenario(Path(path.value))

    def _imply_scenario(self, path: Path) -> None:
        """A scenario says what it takes for granted of the run; whatever is given elsewhere wins."""
        from twin.scenario.reading import read_scenario

        scenario = read_scenario(path)
        says: dict[Key, object] = {
            ("router", "mode"): scenario.policy,
            ("resilience", "migration_limit"): scenario.migration_limit,
            ("resilience", "migration_max_seq_len"): scenario.migration_max_seq_len,
            ("resilience", "detection_delay_s"): scenario.detection_delay_s,
        }
        if self._groups == 1 and scenario.workers is not None:
            says["workers", 0, "count"] = len(scenario.workers)
        for key, value in says.items():
            if value is not None:
                self._left.setdefault(key, Given(value, f"implied by {path}"))

    def _group(self, at: int) -> WorkerGroup:
        base: Key = ("workers", at)
        named = self._left.get((*base, "name"))
        shown = f"workers.{named.value if named else 'pool'}."
        kind = self._left.get((*base, "engine", "kind"))
        usual = KIND_DEFAULTS.get(str(kind.value).lower(), {}) if kind else {}
        return WorkerGroup(
            **self._values(WorkerGroup, base, shown),
            engine=EngineConfig(**self._values(EngineConfig, (*base, "engine"), f"{shown}engine.", usual)),
            latency=self._latency((*base, "latency"), f"{shown}latency."),
            startup=StartupConfig(**self._values(StartupConfig, (*base, "startup"), f"{shown}startup.")),
            kvbm=KvbmConfig(**self._values(KvbmConfig, (*base, "kvbm"), f"{shown}kvbm.")),
            links=PathConfig(**self._values(PathConfig, (*base, "links"), f"{shown}links.")),
        )

    def _one(self, table: str, at: int, kind: type) -> dict[str, Any]:
        """One of the tables [[table]]."""
        base: Key = (table, at)
        return self._values(kind, base, f"{table}.{self._left[(*base, 'name')].value}.")

    def _router(self) -> RouterConfig:
        base: Key = ("router",)
        return RouterConfig(
            **self._values(RouterConfig, base, "router."),
            queue=QueueConfig(**self._values(QueueConfig, (*base, "queue"), "router.queue.")),
            busy=BusyConfig(**self._values(BusyConfig, (*base, "busy"), "router.busy.")),
            affinity=AffinityConfig(**self._values(AffinityConfig, (*base, "affinity"), "router.affinity.")),
            thunder=ThunderConfig(**self._values(ThunderConfig, (*base, "thunder"), "router.thunder.")),
        )

    def _live(self) -> dict[str, Any]:
        own = {path: self._values(table, tuple(path.split(".")), f"{path}.") for path, table in LIVE_TABLES.items()}
        inner = {
            path.rpartition(".")[2]: LIVE_TABLES[path](**own[path])
            for path in LIVE_TABLES
            if path.startswith("live.frontend.")
        }
        return {**own["live"], "frontend": FrontendConfig(**own["live.frontend"], **inner)}

    def _latency(self, base: Key, shown: str) -> LatencyConfig:
        model = self._values(LatencyConfig, base, shown)
        params: dict[str, float | str | bool] = {}
        for key in [key for key in self._left if key[:-1] == base]:
            given = self._left.pop(key)
            params[str(key[-1])] = parameter(given, f"{shown}{key[-1]}")
            self._origins[f"{shown}{key[-1]}"] = given.origin
        return LatencyConfig(**model, params=MappingProxyType(params))

    def _values(
        self, table: type, base: Key, shown: str, usual: Mapping[str, object] = MappingProxyType({})
    ) -> dict[str, Any]:
        """The keys of a table; `usual` are defaults that hold here instead of the table's."""
        values = {}
        for name, limits, default, kind in keys_of(table):
            default = usual.get(name, default)
            given = self._left.pop((*base, name), None)
            self._origins[f"{shown}{name}"] = given.origin if given is not None else "default"
            values[name] = default if given is None else checked(given, f"{shown}{name}", kind, default, limits)
        return values


def _unknown(key: Key, given: Given) -> ConfigError:
    """The refusal of a key that no table has, with the nearest name, or the table that does have it."""
    table, name = dotted(key if isinstance(given.value, dict) else key[:-1]), str(key[-1])
    known = {path: [entry.name for entry in keys_of(cls)] for path, cls in TABLES.items()}
    known["sla"] = ["limits"]
    where = f"[{table}]" if table else "the top level"
    if table not in known:
        tables = [path for path in known if path]
        near = nearest(table, tables)
        return ConfigError(f"{given.origin}: there is no table [{table}]{near}; there are {', '.join(tables)}")
    whole = f"{table}.{name}" if table else name
    if whole in TABLES and whole not in SHORT_FORMS:
        return ConfigError(f"{given.origin}: {whole} is a table; write [{whole}] and its keys below")
    elsewhere = [path for path, names in known.items() if name in names]
    near = nearest(name, known[table])
    anywhere = nearest(name, [f"{path}.{key}" for path, keys in known.items() if path for key in keys], last=True)
    if elsewhere:
        hint = f"; it belongs to [{elsewhere[0]}]" if elsewhere[0] else "; it belongs above the first table"
    else:
        hint = near or anywhere or f"; it has {', '.join(known[table])}"
    return ConfigError(f"{given.origin}: there is no key {name} in {where}{hint}")


def _check_effect(config: Config) -> Config:
    found = [f"{config.origins.get(key, 'given')}: {key} has no effect: {why}" for key, why in without_effect(config)]
    if found and not config.allow_no_effect:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more}; leave it out, or pass --allow-no-effect to have it listed in the report")
    return replace(config, no_effect=tuple(found), workers=tuple(_without_foreign(group) for group in config.workers))


def _without_foreign(group: WorkerGroup) -> WorkerGroup:
    """The group without latency keys of other models, which the one asked for would refuse."""
    foreign = foreign_keys(group.latency)
    if not foreign:
        return group
    kept = {name: value for name, value in group.latency.params.items() if name not in foreign}
    return replace(group, latency=replace(group.latency, params=MappingProxyType(kept)))
