"""Gauges of the twin beside a live cluster: predicted against measured, and what was not compared.

Read at the moment of a scrape. Without a shadow there is none of them; one that has ended has only that it has, and its
counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from executors.backend import Backend
from executors.frontend.glance import shadow
from executors.shadow.figures import Compared, Glance, Spread

PREFIX: Final = "dynatwin_shadow"


class ShadowGauges(Collector):
    """Of the shadow of `backend`, if it has one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is asked of the backend before it serves

    def collect(self) -> Iterator[Metric]:
        seen = shadow(self._backend)
        if seen is None:
            return
        yield _gauge("up", "Whether the twin runs beside the cluster.", float(seen.up))
        yield _counter("compared", "Requests that completed here and in the twin.", seen.compared_total)
        left_out = CounterMetricFamily(
            f"{PREFIX}_not_compared", "Requests that did not, by reason.", labels=("reason",)
        )
        for reason, count in sorted(seen.left_out.items()):
            left_out.add_metric((reason,), count)
        yield left_out
        yield _counter("arrivals_dropped", "Arrivals that the twin was too far behind for.", seen.dropped_total)
        if seen.up:
            yield from _figures(seen)


def _figures(seen: Glance) -> Iterator[Metric]:
    yield _gauge("lag_seconds", "How old the latest news is that the twin has simulated.", seen.lag_s)
    yield _gauge("delay_seconds", "How far behind now the twin is, waiting for lengths of answers.", seen.delay_s)
    yield _gauge("open_requests", "Requests whose prediction is not known yet.", seen.open)
    yield _gauge("window_seconds", "Over how long predicted and measured are taken.", seen.window_s)
    yield _gauge("window_requests", "Requests within the window.", seen.window_requests)
    for side in ("predicted", "measured"):
        family = _family(f"{side}_seconds", f"What was {side} of the requests of the window.", ("metric", "stat"))
        for metric, compared in seen.metrics.items():
            for stat, value in _stats(getattr(compared, side)).items():
                family.add_metric((metric, stat), value)
        yield family
    for name, text, of in _RATIOS:
        family = _family(name, text, ("metric",))
        for metric, compared in seen.metrics.items():
            ratio = of(compared)
            if ratio is not None:
                family.add_metric((metric,), ratio)
        yield family


_RATIOS: Final[tuple[tuple[str, str, Callable[[Compared], float | None]], ...]] = (
    ("drift_ratio", "Mean predicted over mean measured.", lambda one: one.drift),
    ("error_ratio", "Mean difference per request, without its sign, over the mean measured.", lambda one: one.error),
)


def told(seen: Glance | None) -> Mapping[str, object] | None:
    """The same for the dashboard, in short."""
    if seen is None:
        return None
    return {
        "up": seen.up,
        "why": seen.why,
        "lag_s": round(seen.lag_s, 1),
        "delay_s": round(seen.delay_s, 1),
        "compared": seen.compared_total,
        "drift": {name: _rounded(one) for name, one in seen.metrics.items()} if seen.up else {},
    }


def _rounded(compared: Compared) -> float | None:
    return None if compared.drift is None else round(compared.drift, 3)


def _stats(spread: Spread) -> dict[str, float]:
    known = {"mean": spread.mean, "p50": spread.p50, "p95": spread.p95}
    return {name: value for name, value in known.items() if value is not None}


def _family(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
