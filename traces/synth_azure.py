"""Demand in the shape of Azure's 2023 trace: a conversation and a coding service, merged in order of time.

Conversation arrivals are a renewal process whose rate changes from minute to minute; coding arrivals come in bursts.
Every part is a prefix of what a longer draw would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from traces.draw import Conditional, Fit, Floats, Ints, Lengths, Quantiles, Stream, fit

SPAN_S = 2623.3
"""From the first recorded arrival, 2023-11-16 18:15:46.68, to the end of the recorded slice, 18:59:30."""

_MINUTE_S = 60.0
_CHUNK = 4096


class Requests(NamedTuple):
    """Requests in order of arrival."""

    arrival_s: Floats
    isl: Ints
    osl: Ints


def draw_azure(duration_s: float, seed: int) -> Requests:
    """Both services for `duration_s`."""
    parts = [draw_conversation(duration_s, seed), draw_code(duration_s, seed)]
    arrival_s = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(arrival_s, kind="stable")
    isl, osl = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("isl", "osl"))
    return Requests(arrival_s[order], isl, osl)


def draw_conversation(duration_s: float, seed: int) -> Requests:
    """The conversation service for `duration_s`, minute rates as recorded and beyond that an AR(1) of their log."""
    figures = fit("azure_conv")
    return _with_lengths(conversation_arrivals(figures, duration_s, seed), figures, seed, "azure_conv")


def draw_code(duration_s: float, seed: int) -> Requests:
    """The coding service for `duration_s`."""
    figures = fit("azure_code")
    return _with_lengths(code_arrivals(figures, duration_s, seed), figures, seed, "azure_code")


def draw_lengths(count: int, seed: int) -> tuple[Ints, Ints]:
    """Prompt and output lengths of the conversation service, for arrivals from elsewhere."""
    found = _with_lengths(np.zeros(count), fit("azure_conv"), seed, "azure_conv")
    return found.isl, found.osl


def _with_lengths(arrival_s: Floats, figures: Fit, seed: int, name: str) -> Requests:
    isl = Lengths(figures["isl"]).at(Stream(seed, f"{name}.isl").uniform(len(arrival_s)))
    table = figures["osl_given_isl"]
    osl = Conditional.of(table["isl_edges"], table["bins"]).at(isl, Stream(seed, f"{name}.osl").uniform(len(isl)))
    return Requests(arrival_s, isl, osl)


# ---------------------------------------------------------------- conversation


def conversation_arrivals(figures: Fit, duration_s: float, seed: int) -> Floats:
    """Gamma gaps of mean 1 in operational time, which runs at the rate of the minute."""
    arrivals = figures["arrivals"]
    ends_s, rates_rps = _minute_rates(figures, duration_s, Stream(seed, "azure_conv.rate"))
    widths_s = np.diff(ends_s, prepend=0.0)
    operational = np.concatenate([[0.0], np.cumsum(widths_s * rates_rps)])
    gaps = Stream(seed, "azure_conv.gaps")
    drawn: list[Floats] = []
    reached = 0.0
    while reached < operational[-1]:
        points = reached + np.cumsum(gaps.gamma(arrivals["gamma_shape"], _CHUNK))
        drawn.append(points)
        reached = float(points[-1])
    points = np.concatenate(drawn)
    points = points[points < operational[-1]]
    arrival_s: Floats = np.interp(points, operational, np.concatenate([[0.0], ends_s]))
    return arrival_s


def _minute_rates(figures: Fit, duration_s: float, stream: Stream) -> tuple[Floats, Floats]:
    """Ends of the minutes up to `duration_s`, and the rate in each."""
    arrivals = figures["arrivals"]
    counts = arrivals["minute_counts"]
    recorded_s = len(counts) * _MINUTE_S
    last_s = figures["span_s"] - recorded_s
    ends_s = [*(_MINUTE_S * np.arange(1, len(counts) + 1)), figures["span_s"]]
    rates_rps = [count / _MINUTE_S for count in counts] + [(figures["n"] - sum(counts)) / last_s]
    ar1 = arrivals["ar1_log_rate"]
    log_rate = np.log(rates_rps[-1] * _MINUTE_S)
    noise = ar1["sd"] * np.sqrt(1 - ar1["phi"] ** 2)
    while ends_s[-1] < duration_s:
        log_rate = ar1["mean"] + ar1["phi"] * (log_rate - ar1["mean"]) + noise * float(stream.normal(1)[0])
        ends_s.append(ends_s[-1] + _MINUTE_S)
        rates_rps.append(np.exp(log_rate) / _MINUTE_S)
    ends, rates = np.array(ends_s), np.array(rates_rps)
    used = int(np.searchsorted(ends, duration_s)) + 1
    return np.minimum(ends[:used], duration_s), rates[:used]


# ---------------------------------------------------------------- code


def code_arrivals(figures: Fit, duration_s: float, seed: int) -> Floats:
    """Bursts with correlated gaps inside, and a longer gap before each."""
    drawn = []
    for burst_s in _bursts(figures["arrivals"], seed):
        if burst_s[0] >= duration_s:
            break
        drawn.append(burst_s)
    points = np.concatenate(drawn) if drawn else np.zeros(0)
    return points[points < duration_s]


def _bursts(arrivals: Fit, seed: int) -> Iterator[Floats]:
    """The arrivals of one burst after the other, without end."""
    gap, size = Quantiles(arrivals["gap"]), Quantiles(arrivals["size_quantiles_101"])
    classes = arrivals["iat_by_burst_size"]
    inside = [Quantiles(each["iat"]) if each["iat"] else None for each in classes]
    phi = arrivals["copula_ar1_phi"]
    gaps, sizes, steps = (Stream(seed, f"azure_code.{name}") for name in ("gap", "size", "iat"))
    at_s = 0.0
    while True:
        at_s += gap.one(gaps.one())
        count = round(size.one(sizes.one()))
        table = next(table for each, table in zip(classes, inside, strict=True) if count < each["size_to"])
        points = np.full(count, at_s)
        if table is not None and count > 1:
            points[1:] += np.cumsum(table.at(_correlated(phi, steps.normal(count - 1))))
        yield points
        at_s = float(points[-1])


def _correlated(phi: float, noise: Floats) -> Floats:
    """Uniform numbers from a Gaussian AR(1) with correlation `phi`, driven by standard normal `noise`."""
    from scipy.special import ndtr

    path = noise * np.sqrt(1 - phi**2)
    path[0] = noise[0]
    for i in range(1, len(path)):
        path[i] += phi * path[i - 1]
    uniform: Floats = ndtr(path)
    return uniform
