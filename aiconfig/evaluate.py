"""One candidate at one load through the twin: percentiles, goodput, KV peak, energy, or why there are none.

It writes the deployment as `twin replay` would be given it, replays that file, and reads the report: there is no second
way, so a recommendation can be replayed and comes to the same figures. Everything but the result is gone afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from aiconfig.candidate import Candidate
from aiconfig.demand import Protocol, protocol
from aiconfig.deployment import USUAL, Setting, write_deployment
from aiconfig.estimate import NO_BANDS, SIMULATED, Estimate, Load
from aiconfig.evaluation import ClosedFormEvaluation
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.stability import Growth, growth
from aiconfig.workload import Workload
from policies.errors import CapabilityError, InvariantError, TwinError
from policies.frozen import frozen
from reports.columns import F64, Columns
from reports.figures import FIGURES
from reports.metrics import quantiles, tokens_per_s_per_user
from reports.record import RunRecord
from reports.report import Report
from reports.sla import STATISTICS
from twin.calibrated import BEYOND
from twin.replay import replay

KV_FULL: Final = 0.95
"""From this share on the KV pool is what limits a deployment, whatever the closed form says."""
LONGEST_RUNS: Final = 2
"""How often an open loop is played again with more requests because its warm-up was shorter than an answer."""
MOST_REQUESTS: Final = 50_000


def simulate(
    candidate: Candidate,
    workload: Workload,
    load: Load,
    setting: Setting = USUAL,
    *,
    prior: Estimate | None = None,
) -> Estimate | Rejection:
    """Play `load` of `workload` on the deployment.

    Figures are those that `twin replay` reports of the file that `write_deployment` writes: of the rows behind the
    warm-up (`demand.protocol`). In an open loop that is not told how many requests to play, there are more if a mean
    answer takes longer than the warm-up. `prior` is the closed form's estimate, from which bound, bands and
    what was never measured are taken.

    A queue that grows is a Rejection `unstable`, a simulation that refuses, or in which a request does not complete,
    one `failed` with its text. Raises
    ConfigError for a load that the workload's arrivals cannot have, and TraceError for a trace that cannot be read.
    """
    played = protocol(workload, load)
    try:
        run = _run(candidate, workload, load, setting)
        if workload.requests is None and load.rps is not None:
            for _ in range(LONGEST_RUNS):
                if run.overtaken or not _is_short(run, played, load):
                    break
                workload = replace(workload, requests=_longer(run, played, load))
                played = protocol(workload, load)
                run = _run(candidate, workload, load, setting)
    except InvariantError:
        raise
    except TwinError as error:
        return Rejection(name=candidate.name, reason="failed", detail=str(error))
    if run.growth is not None and (run.overtaken or (run.growth.grows and not _is_short(run, played, load))):
        return _unstable(candidate, run.growth)
    if run.report.counts.completed < run.report.demand.requests:
        return _unserved(candidate, run.report)
    return _estimate(candidate, load, played, run, prior)


class Simulation:
    """`evaluation.Evaluate` by simulation: None where the queue grows, CapabilityError with the text of what refused.

    Bound, bands and what was never measured are those of the closed form at the same load. A question that was asked
    before is not simulated again; `runs` counts those that were.
    """

    def __init__(self, setting: Setting = USUAL) -> None:
        self._setting = setting
        self._closed = ClosedFormEvaluation(setting.physics)
        self._known: dict[tuple[Candidate, Workload, Load], Estimate | Rejection] = {}
        self.runs = 0

    def __call__(self, candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
        asked = (candidate, workload, load)
        found = self._known.get(asked)
        if found is None:
            prior = self._closed(candidate, workload, load)
            found = self._known[asked] = simulate(candidate, workload, load, self._setting, prior=prior)
            self.runs += 1
        if isinstance(found, Estimate):
            return found
        if found.reason == "unstable":
            return None
        raise CapabilityError(found.detail)


def setting_of(request: SearchRequest) -> Setting:
    """What a search sets beside candidate and demand."""
    return Setting(
        sla=request.sla.text if request.sla is not None else None,
        physics=request.physics,
        usd_per_hour=request.usd_per_gpu_hour,
    )


@frozen
class _Run:
    """What is kept of a replay: its report, how fast its users saw tokens come (slow ones first), and how an open
    loop's queue behaved."""

    report: Report
    speeds: F64
    growth: Growth | None

    @property
    def overtaken(self) -> bool:
        """Whether the queue grows for sure, however short the run."""
        return self.growth is not None and self.growth.grows and self.growth.slows


def _run(candidate: Candidate, workload: Workload, load: Load, setting: Setting) -> _Run:
    with TemporaryDirectory(prefix="aiconfig-") as name:
        folder = Path(name)
        made = write_deployment(folder, candidate, workload, load, setting)
        done = replay(made.config, config_file=made.path, out=folder / "run", html=False)
        if not done.complete:
            raise KeyboardInterrupt
        requests = RunRecord(done.folder).requests.behind(protocol(workload, load).warmup)
        return _Run(
            report=done.report,
            speeds=_speeds(requests),
            growth=growth(requests) if load.rps is not None else None,
        )


def _speeds(requests: Columns) -> F64:
    """Tokens a second of each completed request that had more than one (others have no TPOT), ascending."""
    speeds = tokens_per_s_per_user(requests.floats("tpot_s"))
    return np.sort(speeds[~np.isnan(speeds)])


def _is_short(run: _Run, played: Protocol, load: Load) -> bool:
    """Whether the warm-up of an open loop was over before a mean answer was."""
    e2e_s = run.report.latency.e2e_s.mean
    return load.rps is not None and e2e_s is not None and played.warmup < e2e_s * load.rps


def _longer(run: _Run, played: Protocol, load: Load) -> int:
    """How many requests to play instead, so that a warm-up takes two mean answers."""
    assert load.rps is not None
    e2e_s = run.report.latency.e2e_s.mean or 0.0
    return min(MOST_REQUESTS, int(2 * e2e_s * load.rps / played.warmup * played.requests) + 1)


def _unstable(candidate: Candidate, grown: Growth) -> Rejection:
    return Rejection(
        name=candidate.name,
        reason="unstable",
        needs=grown.arrived_rps,
        has=grown.served_rps,
        unit="requests/s",
        detail=grown.line(),
    )


def _unserved(candidate: Candidate, report: Report) -> Rejection:
    """Nothing sheds load in a search, so a request that does not complete is one that the deployment cannot serve."""
    counts, asked = report.counts, report.demand.requests
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in sorted(counts.reasons.items()))
    return Rejection(
        name=candidate.name,
        reason="failed",
        needs=asked,
        has=counts.completed,
        unit="requests",
        detail=f"{asked - counts.completed:,} of {asked:,} requests did not complete{': ' if reasons else ''}{reasons}",
    )


# ---------------------------------------------------------------- a report as an estimate


def _estimate(candidate: Candidate, load: Load, played: Protocol, run: _Run, prior: Estimate | None) -> Estimate:
    report = run.report
    energy_j = FIGURES["energy_j"].read(report)
    kv_share = report.kv_peak_share or 0.0
    full = report.preemptions > 0 or kv_share >= KV_FULL
    return Estimate(
        candidate=candidate,
        load=load,
        level=SIMULATED,
        stats=_stats(run),
        requests_per_s=report.throughput.requests_per_s or 0.0,
        output_tokens_per_s=report.throughput.output_tokens_per_s or 0.0,
        kv_share=kv_share,
        bound="kv" if full else prior.bound if prior is not None else "unknown",
        goodput_share=report.sla.attainment if report.sla is not None and _limits_requests(report) else None,
        hit_share=report.hit_rate,
        energy_j=energy_j,
        output_tokens=sum(group.output_tokens for group in report.groups if group.role != "prefill"),
        requests=played.requests,
        bands=dict(prior.bands if prior is not None else NO_BANDS),
        unmeasured=prior.unmeasured if prior is not None else (),
        beyond_load=tuple(line for line in report.meta.warnings if BEYOND in line),
        notes=tuple(_notes(run, played, load)),
    )


def _stats(run: _Run) -> Mapping[str, Mapping[str, float | None]]:
    """Every latency of a report by metric and statistic; tps_user counts from the slow end, as limits on it do."""
    latency = run.report.latency
    samples = {"ttft": latency.ttft_s, "tpot": latency.tpot_s, "itl": latency.itl_s, "e2e": latency.e2e_s}
    stats = {metric: {name: sample.statistic(name) for name in STATISTICS} for metric, sample in samples.items()}
    return {**stats, "tps_user": {"mean": run.report.tokens_per_s_per_user.mean, **_from_the_slow_end(run.speeds)}}


def _from_the_slow_end(speeds: F64) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01, "max": 0.0}
    if not len(speeds):
        return dict.fromkeys(shares)
    return dict(zip(shares, quantiles(speeds, list(shares.values())), strict=True))


def _limits_requests(report: Report) -> bool:
    return report.sla is not None and any(limit.metric != "goodput" for limit in report.sla.limits)


def _notes(run: _Run, played: Protocol, load: Load) -> list[str]:
    notes = [f"simulated: {played.line()}"]
    if not played.warmup:
        notes.append("fewer than two requests a user: the opening burst is part of the figures")
    if _is_short(run, played, load):
        notes.append("too short to tell whether the queue grows: a mean answer takes longer than the warm-up")
    return notes
