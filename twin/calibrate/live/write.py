"""What a fit to live runs hands over: the runs' own configuration with fitted step times, as `twin replay` takes it.

Nothing but step times, the way to the engine, and the size of pools as the engines told it differs from what was
served; the trace and the rows that the fit has seen may be named in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType

from policies.frozen import frozen
from twin.calibrate.live.fit import GroupFit, fit_group, parts
from twin.calibrate.live.run import ALL, LiveRun, Part
from twin.cluster import build_groups
from twin.config import Config, LatencyConfig, TraceConfig
from twin.config_text import to_toml


@frozen
class LiveFit:
    """Runs with what was fitted to them, by group. `part` of each was looked at."""

    runs: tuple[LiveRun, ...]
    groups: tuple[GroupFit, ...]
    part: Part

    def rests_on(self) -> str:
        """For provenance: which runs, and how much of them."""
        named = ", ".join(f"{run.folder.name} ({run.digest})" for run in self.runs)
        return f"fitted to {self.part.words()}live runs {named}"


def fit_runs(runs: Sequence[LiveRun], part: Part = ALL, told: object = None) -> LiveFit:
    """Fit every group to all of the runs together, which are repeats of one configuration."""
    say = told if callable(told) else (lambda what: None)
    groups = []
    for built in build_groups(_assumed(runs[0].config)):
        name = built.config.name
        workers = [worker for run in runs for worker in run.workers if worker.group == name]
        groups.append(fit_group(name, workers, built.settings, say))
    return LiveFit(runs=tuple(runs), groups=tuple(groups), part=part)


def _assumed(config: Config) -> Config:
    """The configuration with step times that need no hardware: those are what is looked for."""
    some = LatencyConfig(model="fixed", params=MappingProxyType({"decode_s": 1.0}))
    return replace(config, workers=tuple(replace(group, latency=some) for group in config.workers))


def fitted_config(fit: LiveFit, trace: Path | None = None) -> Config:
    """The configuration of the runs with the fitted step times; with `trace` it replays that one, and leaves the rows
    that the fit has seen out of its figures."""
    run = fit.runs[0]
    by_group = {one.group: one for one in fit.groups}
    blocks = {worker.group: worker.total_blocks for worker in run.workers}
    groups = []
    for group in run.config.workers:
        found = by_group[group.name]
        groups.append(
            replace(
                group,
                path_s=found.path_s,
                engine=replace(group.engine, kv_blocks=blocks.get(group.name, group.engine.kv_blocks)),
                latency=LatencyConfig(model="linear", params=MappingProxyType(dict(_params(fit, found)))),
            )
        )
    has_part = trace is not None and fit.part.first is not None
    demand = TraceConfig(path=trace, warmup=run.trace_rows[0] if has_part else None)
    return replace(run.config, workers=tuple(groups), trace=demand)


def _params(fit: LiveFit, found: GroupFit) -> Mapping[str, float | str]:
    batch, prompt_tokens, context_tokens = found.reach
    return {
        **{name: value for name, value in parts(found) if name != "path_s"},
        "source": fit.rests_on(),
        "engine_version": fit.runs[0].engines,
        "error_band": found.unseen.text()
        if found.unseen is not None
        else "not known: too few requests to leave any out",
        "measured_batch": batch,
        "measured_prompt_tokens": prompt_tokens,
        "measured_context_tokens": context_tokens,
    }


def fitted_toml(fit: LiveFit, day: date, trace: Path | None = None) -> str:
    """The whole file. The same runs give the same text, but for the day."""
    head = (
        f"# {fit.rests_on()[0].upper()}{fit.rests_on()[1:]}, {day.isoformat()}: docs/fidelity.md.\n"
        "# Single coefficients trade against one another; only what they come to for a step means something.\n"
        "# It holds for the host and the load that it was measured with, and for no other.\n"
    )
    return head + to_toml(fitted_config(fit, trace), beside=trace.parent if trace is not None else None)
