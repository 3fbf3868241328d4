"""What "best" may mean: each objective with its definition and denominator in words, so that no figure stands alone.

Larger scores are better in all of them. A figure that is not known has no score and never wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from aiconfig.estimate import Estimate
from policies.frozen import frozen


@frozen
class Terms:
    """What an objective needs beside an estimate: GPUs that are paid for, and dollars for one of them an hour."""

    gpus_bought: int
    usd_per_gpu_hour: float | None = None


@frozen
class Objective:
    """`figure` is what people read, in `unit`; it is better if it is higher unless `lower_is_better`."""

    name: str
    unit: str
    definition: str
    denominator: str
    figure: Callable[[Estimate, Terms], float | None]
    lower_is_better: bool = False

    def score(self, estimate: Estimate, terms: Terms) -> float:
        """Larger is better; minus infinity where the figure is not known."""
        value = self.figure(estimate, terms)
        if value is None or math.isnan(value):
            return -math.inf
        return -value if self.lower_is_better else value


def _throughput_per_gpu(estimate: Estimate, terms: Terms) -> float | None:
    return estimate.output_tokens_per_s / terms.gpus_bought


def _goodput_per_gpu(estimate: Estimate, terms: Terms) -> float | None:
    if estimate.goodput_share is None:
        return None
    return estimate.requests_per_s * estimate.goodput_share / terms.gpus_bought


def _throughput(estimate: Estimate, terms: Terms) -> float | None:
    return estimate.output_tokens_per_s


def _cost(estimate: Estimate, terms: Terms) -> float | None:
    if terms.usd_per_gpu_hour is None or not estimate.output_tokens_per_s:
        return None
    return terms.gpus_bought * terms.usd_per_gpu_hour / 3600.0 / estimate.output_tokens_per_s * 1e6


def _energy(estimate: Estimate, terms: Terms) -> float | None:
    if estimate.energy_j is not None and estimate.output_tokens:
        return estimate.energy_j / estimate.output_tokens
    if estimate.power_w is None or not estimate.output_tokens_per_s:
        return None
    return estimate.power_w / estimate.output_tokens_per_s


def _gpus(estimate: Estimate, terms: Terms) -> float | None:
    return float(estimate.candidate.gpus)


def _latency(estimate: Estimate, terms: Terms) -> float | None:
    return estimate.value("e2e", "mean")


_ALL: Final = (
    Objective(
        name="throughput-per-gpu",
        unit="tok/s/GPU",
        definition="output tokens a second at the load point, for each GPU",
        denominator="GPUs of the budget, idle ones included",
        figure=_throughput_per_gpu,
    ),
    Objective(
        name="goodput-per-gpu",
        unit="req/s/GPU",
        definition="requests a second that meet every per-request limit, for each GPU; known from simulated runs alone",
        denominator="GPUs of the budget, idle ones included",
        figure=_goodput_per_gpu,
    ),
    Objective(
        name="throughput",
        unit="tok/s",
        definition="output tokens a second at the load point",
        denominator="none: the whole deployment",
        figure=_throughput,
    ),
    Objective(
        name="cost",
        unit="USD/Mtok",
        definition="dollars for a million output tokens at the load point and the given price of a GPU-hour",
        denominator="output tokens; the price counts every GPU of the budget",
        figure=_cost,
        lower_is_better=True,
    ),
    Objective(
        name="energy",
        unit="J/tok",
        definition="joules for an output token (an estimate) of the GPUs in use, at the load point",
        denominator="output tokens",
        figure=_energy,
        lower_is_better=True,
    ),
    Objective(
        name="min-gpus",
        unit="GPUs",
        definition="GPUs that are used",
        denominator="none: the whole deployment",
        figure=_gpus,
        lower_is_better=True,
    ),
    Objective(
        name="latency",
        unit="s",
        definition="mean time from a request's arrival to its last token, at the load point",
        denominator="requests",
        figure=_latency,
        lower_is_better=True,
    ),
)
OBJECTIVES: Final[Mapping[str, Objective]] = MappingProxyType({one.name: one for one in _ALL})
