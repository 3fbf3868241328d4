"""The figures of a report by name, for tables over many runs: what each is called, its unit, and which way is better.

Names are the metric and its statistic (`ttft_p95`, `hit_rate`). It reads reports and defines no metric of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from policies.errors import ConfigError
from policies.frozen import frozen
from reports import text
from reports.report import Report

Unit: TypeAlias = Literal["s", "share", "count", "rate"]
Better: TypeAlias = Literal["low", "high"] | None
Read: TypeAlias = Callable[[Report], float | None]

STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
USUAL_FIGURES: Final = (
    "ttft_p95", "tpot_p95", "e2e_p95", "output_tokens_per_s", "hit_rate", "attainment", "goodput_rps", "rejected",
    "failed",
)  # fmt: skip
"""What a table over runs shows if nothing else is asked for, where it is not 0 throughout."""


@frozen
class Figure:
    """One figure of a run. `better` is None where neither way is: a peak, a duration."""

    name: str
    label: str
    unit: Unit
    better: Better
    read: Read

    def say(self, value: float | None) -> str:
        """The value with its unit, for a person."""
        say = {"s": text.time, "share": text.share, "rate": text.figures, "count": _count}[self.unit]
        return say(value)


def _count(value: float | None) -> str:
    """A count, or a mean of counts."""
    return text.count(value) if value is not None and value == int(value) else text.figures(value)


def figures_of(report: Report) -> dict[str, float | None]:
    """Every figure of a report by name."""
    return {name: figure.read(report) for name, figure in FIGURES.items()}


def chosen_figures(names: Iterable[str]) -> tuple[Figure, ...]:
    """Figures by name (dashes stand for underscores). Raises ConfigError that gives the nearest name."""
    return tuple(_chosen(name.strip().lower().replace("-", "_")) for name in names)


def _chosen(name: str) -> Figure:
    if name in FIGURES:
        return FIGURES[name]
    import difflib

    near = difflib.get_close_matches(name, FIGURES, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}" if near else f"there are {', '.join(FIGURES)}"
    raise ConfigError(f"--metric {name}: there is no such figure; {hint}")


def _latency(field: str, statistic: str) -> Read:
    return lambda report: getattr(report.latency, field).statistic(statistic)


def _latencies() -> Iterator[Figure]:
    for name, label in (
        ("ttft", "TTFT"),
        ("tpot", "TPOT"),
        ("itl", "ITL"),
        ("e2e", "E2E"),
        ("queue_wait", "queue wait"),
    ):
        for statistic in STATISTICS:
            yield Figure(
                name=f"{name}_{statistic}",
                label=f"{label} {statistic}",
                unit="s",
                better="low",
                read=_latency(f"{name}_s", statistic),
            )


def _sla(field: str) -> Read:
    return lambda report: None if report.sla is None else getattr(report.sla, field)


def _bound(field: str) -> Read:
    return lambda report: None if report.hit_bound is None else getattr(report.hit_bound, field)


def _routing(field: str) -> Read:
    return lambda report: None if report.routing is None else getattr(report.routing, field)


def _cost_regret(report: Report) -> float | None:
    explained = None if report.routing is None else report.routing.explained
    return None if explained is None else explained.regret_blocks.mean


def _oracle_regret(report: Report) -> float | None:
    oracle = None if report.routing is None else report.routing.oracle
    return None if oracle is None else oracle.regret_s.mean


def _summed(field: str) -> Read:
    """The sum over worker groups, None where one of them has no figure."""

    def read(report: Report) -> float | None:
        values = [getattr(group, field) for group in report.groups]
        return sum(values) if values and None not in values else None

    return read


_PLAIN: Final[tuple[tuple[str, str, Unit, Better, Read], ...]] = (
    ("requests_per_s", "requests/s", "rate", "high", lambda r: r.throughput.requests_per_s),
    ("requests_per_s_per_gpu", "requests/s per GPU", "rate", "high", lambda r: r.throughput.requests_per_s_per_gpu),
    ("output_tokens_per_s", "output tokens/s", "rate", "high", lambda r: r.throughput.output_tokens_per_s),
    (
        "output_tokens_per_s_per_gpu",
        "output tokens/s per GPU",
        "rate",
        "high",
        lambda r: r.throughput.output_tokens_per_s_per_gpu,
    ),
    ("tokens_per_s_per_user", "tokens/s per user, mean", "rate", "high", lambda r: r.tokens_per_s_per_user.mean),
    ("makespan_s", "duration", "s", None, lambda r: r.makespan_s),
    ("hit_rate", "hit rate", "share", "high", lambda r: r.hit_rate),
    ("upper_bound_hit_rate", "upper bound of hit rate", "share", None, _bound("upper_bound")),
    ("block_hit_rate", "hit rate in blocks", "share", "high", _bound("reached")),
    ("routing_effectiveness", "routing effectiveness", "share", None, _routing("effectiveness")),
    ("non_max_overlap", "non-max-overlap selections", "count", None, _routing("non_max_overlap")),
    ("overlap_lost_tokens", "overlap lost, tokens", "count", None, _routing("overlap_lost_tokens")),
    ("cost_regret_blocks", "cost regret, mean, blocks", "rate", None, _cost_regret),
    ("oracle_regret_s", "oracle regret, mean", "s", "low", _oracle_regret),
    ("kv_peak_share", "KV pool peak", "share", None, lambda r: r.kv_peak_share),
    ("busy_share", "busy share", "share", None, lambda r: r.busy_share),
    ("fairness", "fairness", "rate", "high", lambda r: r.fairness),
    ("preemptions", "preemptions", "count", "low", lambda r: r.preemptions),
    ("migrations", "migrations", "count", None, lambda r: r.migrations),
    ("completed", "completed", "count", "high", lambda r: r.counts.completed),
    ("rejected", "rejected", "count", "low", lambda r: r.counts.rejected),
    ("failed", "failed", "count", "low", lambda r: r.counts.failed),
    ("cancelled", "cancelled", "count", None, lambda r: r.counts.cancelled),
    ("attainment", "attainment", "share", "high", _sla("attainment")),
    ("goodput_rps", "goodput, requests/s", "rate", "high", _sla("goodput_rps")),
    ("goodput_rps_per_gpu", "goodput per GPU", "rate", "high", _sla("goodput_rps_per_gpu")),
    ("gpu_s", "GPU-seconds held", "rate", "low", lambda r: r.gpu_s),
    ("energy_j", "energy, J (estimate)", "rate", "low", _summed("energy_j")),
    ("cost_usd", "cost, USD", "rate", "low", _summed("cost_usd")),
)

FIGURES: Final[Mapping[str, Figure]] = MappingProxyType(
    {figure.name: figure for figure in _latencies()}
    | {
        name: Figure(name=name, label=label, unit=unit, better=better, read=read)
        for name, label, unit, better, read in _PLAIN
    }
)
"""Every figure that a table over runs can show, in the order of its columns."""
