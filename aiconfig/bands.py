"""How far off estimates may be, by where the coefficients of the latency model were calibrated.

A band is a measured error, never a guess: where none was measured, only what was seen of an uncalibrated prototype is
told, and nothing is called certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiconfig.estimate import Band, Estimate

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


def band_of(estimate: Estimate, metric: str) -> Band | None:
    """The band of a metric; None if nothing is known of it."""
    bands = [estimate.bands.get(name) for name in BASIS.get(metric, ())]
    known = [band for band in bands if band is not None]
    if not known or len(known) < len(bands):
        return None
    return max(known, key=lambda band: (float("inf") if band.wide is None else band.wide, band.typical))
