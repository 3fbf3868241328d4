"""Which options of a configuration change nothing, and why: a setting that is silently ignored is a wrong answer.

An option counts when it differs from its default; saying the default aloud is harmless. Rules only read the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from twin.config import LATENCY_KEYS, Config, RouterConfig, TraceConfig, WorkerGroup

BUILT_IN_MODES = frozenset(RouterConfig.__dataclass_fields__["mode"].metadata["limits"].choices)
MODES_WITH_TIES = ("least-loaded", "kv")
NO_TIER = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier")
PURE_TIME_MODELS = ("fixed", "polynomial")


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """(dotted key, why) of every option that was set and changes nothing."""
    yield from _trace(config.trace)
    for group in config.workers:
        yield from _group(group)
    yield from _router(config.router)
    yield from _observe(config)


def _changed(table: object, names: Iterable[str]) -> Iterator[str]:
    """Those of `names` whose value in a dataclass is not the default."""
    defaults = {f.name: f.default for f in fields(table)}  # type: ignore[arg-type]
    return (name for name in names if getattr(table, name) != defaults[name])


def _trace(trace: TraceConfig) -> Iterator[tuple[str, str]]:
    if trace.arrivals == "closed":
        for name in _changed(trace, ("rate_rps", "speedup")):
            yield f"trace.{name}", "arrivals are closed: a request arrives when one ends, whatever the recorded times"
    elif trace.concurrency is not None:
        yield "trace.concurrency", f"arrivals are {trace.arrivals}; it needs trace.arrivals = closed"


def _group(group: WorkerGroup) -> Iterator[tuple[str, str]]:
    shown = f"workers.{group.name}"
    if group.startup_s:
        yield f"{shown}.startup_s", "nothing in this run adds workers"
    if group.engine.kv_blocks is not None:
        for name in _changed(group.engine, ("gpu_memory_utilization",)):
            yield f"{shown}.engine.{name}", "kv_blocks says how large the pool is"
        if group.latency.model in PURE_TIME_MODELS:
            for name in _changed(group, ("model", "gpu", "weights", "kv")):
                yield (
                    f"{shown}.{name}",
                    f"kv_blocks sets the pool, and the {group.latency.model} latency model knows no hardware",
                )
    for name in group.latency.params:
        owners = [model for model, keys in LATENCY_KEYS.items() if name in keys]
        if owners and group.latency.model not in owners:
            yield (
                f"{shown}.latency.{name}",
                f"it belongs to the {owners[0]} model, and {group.latency.model} is asked for",
            )


def _router(router: RouterConfig) -> Iterator[tuple[str, str]]:
    if router.mode not in BUILT_IN_MODES:
        return  # what a plug-in reads is its own affair
    if router.mode not in MODES_WITH_TIES and router.tie_break != "seeded":
        yield "router.tie_break", f"{router.mode} has no ties to break"
    own = [f.name for f in fields(router) if f.name not in ("mode", "tie_break")]
    if router.mode != "kv":
        for name in _changed(router, own):
            yield f"router.{name}", f"the mode is {router.mode}; only kv reads it"
        return
    for name in _changed(router, NO_TIER):
        yield f"router.{name}", "no worker of this version has that tier"
    if not router.track_prefill_tokens:
        names = ("prefill_load_scale", "overlap_score_weight", "overlap_score_credit", "overlap_score_credit_decay")
        for name in _changed(router, names):
            yield f"router.{name}", "track_prefill_tokens is off, so the cost has no prefill term"
    if router.overlap_score_weight is not None:
        for name in _changed(router, ("prefill_load_scale",)):
            yield f"router.{name}", "overlap_score_weight, its older name, is given as well and holds"
    if not router.track_active_blocks:
        for name in _changed(router, ("decode_basis", "track_output_blocks")):
            yield f"router.{name}", "track_active_blocks is off, so the cost has no decode term"


def _observe(config: Config) -> Iterator[tuple[str, str]]:
    mode = config.router.mode
    if mode not in BUILT_IN_MODES:
        return
    if config.observe.kv_event_lag_s and not (mode == "kv" and config.router.use_kv_events):
        yield "observe.kv_event_lag_s", f"no policy of this run listens to KV events (the mode is {mode})"
    if config.observe.report_lag_s:
        yield "observe.report_lag_s", f"no policy of this run reads load reports (the mode is {mode})"
