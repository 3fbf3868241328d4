"""How far off estimates may be, by where the coefficients of the latency model were calibrated.

A band is a measured error, never a guess: where none was measured, only what was seen of an uncalibrated prototype is
told, and nothing is called certain. Errors were measured on the means of runs; that percentiles are off by as much is
our assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiconfig.estimate import Band, Estimate
from twin.perf.protocol import Provenance

UNCALIBRATED: Final = "no calibration: errors of an uncalibrated prototype at the median, 90th percentile not known"
UNCALIBRATED_BANDS: Final[Mapping[str, Band | None]] = MappingProxyType(
    {
        "ttft": Band(typical=0.45, wide=None, level=UNCALIBRATED),
        "tpot": Band(typical=0.14, wide=None, level=UNCALIBRATED),
    }
)
"""Specification §8, line "no calibration at all"."""

BASIS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"ttft": ("ttft",), "tpot": ("tpot",), "itl": ("tpot",), "tps_user": ("tpot",), "e2e": ("ttft", "tpot")}
)
"""Whose band a metric has; of two, the wider one."""


def calibrated_band(provenance: Provenance, metric: str, prompt_tokens: float) -> Band | None:
    """The band of "ttft" or "tpot" of a latency model; None if none was measured and none is known of its kind."""
    if provenance.band is None or provenance.nearness is None:
        return UNCALIBRATED_BANDS[metric]
    errors = provenance.band.ttft if metric == "ttft" else provenance.band.tpot
    if errors is None:
        return None
    outside_s = provenance.client_s + provenance.client_s_per_token * prompt_tokens if metric == "ttft" else 0.0
    typical, wide = errors
    return Band(typical=typical, wide=wide, level=provenance.nearness, outside_s=outside_s)


def band_of(estimate: Estimate, metric: str) -> Band | None:
    """The band of a metric; None if nothing is known of it."""
    bands = [estimate.bands.get(name) for name in BASIS.get(metric, ())]
    known = [band for band in bands if band is not None]
    if not known or len(known) < len(bands):
        return None
    return max(known, key=lambda band: (float("inf") if band.wide is None else band.wide, band.typical))
