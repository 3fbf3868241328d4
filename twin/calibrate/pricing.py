"""The roofline over all step shapes of all rows at once: seconds, and how they move with each of its costs.

The formulas are those of `twin.perf.roofline`; a test holds that they give the same seconds. What a coefficient does to
a cost is not repeated here: `twin.perf.costs` is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twin.calibrate.shapes import COLUMNS, F64, Shapes
from twin.perf.costs import StepCosts

COSTS = (
    *("weights_s", "token_s", "sample_s", "half_tokens", "pair_s", "window_pair_s", "ctx_token_s"),
    *("window_ctx_token_s", "sequence_s", "layers_s", "host_s", "host_sequence_s", "host_prefill_s"),
    *("m_decode", "m_prefill", "experts.read_s", "experts.token_s", "experts.spread_tokens", "experts.half_tokens"),
    *("experts.missed", "links.step_s", "links.token_s", "links.group_token_s"),
)
"""Costs of a step that `cost_row` puts side by side; `experts.missed` follows from the model alone."""


def cost_row(costs: StepCosts) -> tuple[float, ...]:
    """The `COSTS` of one model on one worker."""
    experts, links = costs.experts, costs.links
    of_experts = (0.0, 0.0, 0.0, 0.0, 1.0)
    if experts is not None:
        of_experts = (experts.read_s, experts.token_s, experts.spread_tokens, experts.half_tokens, experts.missed)
    own = [getattr(costs, name) for name in COSTS if "." not in name]
    return (*own, *of_experts, links.step_s, links.token_s, links.group_token_s)


@dataclass(frozen=True, slots=True)
class Means:
    """By row: seconds inside the engine of the mean TTFT, and the mean TPOT; or their slopes, with a last axis."""

    ttft: F64
    tpot: F64


class Pricing:
    """The shapes of all rows, stacked; `cells[i]` is the line of row i in the table of costs that is priced with."""

    def __init__(self, shapes: Sequence[Shapes], cells: Sequence[int]) -> None:
        counts = [len(one.ttft) for one in shapes]
        self.rows = len(shapes)
        self._row = np.repeat(np.arange(self.rows), counts)
        self._cell = np.repeat(np.asarray(cells, dtype=np.intp), counts)
        work = np.vstack([one.work for one in shapes])
        self._work = {name: np.ascontiguousarray(work[:, at]) for at, name in enumerate(COLUMNS)}
        self._prefill = self._work["prefill"] > 0
        self._weights = [np.concatenate([getattr(one, name) for one in shapes]) for name in ("ttft", "tpot")]

    def means(self, table: F64) -> Means:
        """Of every row, under a table of costs (a line per cell, a column for each of `COSTS`)."""
        seconds = self.seconds(table)
        return Means(*(self._summed(weights * seconds) for weights in self._weights))

    def seconds(self, table: F64) -> F64:
        """Of every shape."""
        return _Terms(self._work, self._prefill, table[self._cell].T).seconds

    def slopes(self, table: F64) -> Means:
        """How the means of every row move with each of the `COSTS` (rows, costs)."""
        by_cost = _Terms(self._work, self._prefill, table[self._cell].T).slopes()
        slopes = []
        for weights in self._weights:
            slope = np.zeros((self.rows, len(COSTS)))
            for at, name in enumerate(COSTS):
                if name in by_cost:
                    slope[:, at] = self._summed(weights * by_cost[name])
            slopes.append(slope)
        return Means(*slopes)

    def _summed(self, values: F64) -> F64:
        return np.bincount(self._row, values, minlength=self.rows).astype(np.float64)


class _Terms:
    """The parts of each step, as in `RooflineLatency.parts`."""

    def __init__(self, work: dict[str, F64], prefill: npt.NDArray[np.bool_], costs: F64) -> None:
        w, c = work, dict(zip(COSTS, costs, strict=True))
        self._w, self._c, self._prefill = w, c, prefill
        self._tokens = np.maximum(w["tokens"], 1.0)
        self._slow = 1.0 + c["half_tokens"] / self._tokens
        self._products = c["token_s"] * w["tokens"] + c["sample_s"] * w["samples"]
        self._gemm = _smax(c["weights_s"], self._products * self._slow)
        group = w["group_tokens"]
        self._touched = 1.0 - c["experts.missed"] ** group
        self._spread = np.sqrt(c["experts.spread_tokens"] * group)
        self._expert_slow = 1.0 + c["experts.half_tokens"] / np.maximum(group, 1.0)
        self._read = c["experts.read_s"] * self._touched
        self._multiplied = c["experts.token_s"] * (group + self._spread) * self._expert_slow
        self._experts = _smax(self._read, self._multiplied)
        attention = c["pair_s"] * w["pairs"] + c["window_pair_s"] * w["window_pairs"]
        attention += c["ctx_token_s"] * w["ctx_tokens"] + c["window_ctx_token_s"] * w["window_ctx_tokens"]
        attention += c["sequence_s"] * w["sequences"]
        comm = c["links.step_s"] + c["links.token_s"] * w["tokens"] + c["links.group_token_s"] * group
        self._device = self._gemm + self._experts + attention + comm + c["layers_s"]
        self._m = np.where(prefill, c["m_prefill"], c["m_decode"])
        host = c["host_s"] + c["host_sequence_s"] * w["group_sequences"] + c["host_prefill_s"] * prefill
        self.seconds: F64 = self._device * self._m + host

    def slopes(self) -> dict[str, F64]:
        """Of `seconds`, by cost."""
        w, c, m = self._w, self._c, self._m
        reads, multiplies = _share(c["weights_s"], self._gemm), _share(self._products * self._slow, self._gemm)
        touches, computes = _share(self._read, self._experts), _share(self._multiplied, self._experts)
        group = w["group_tokens"]
        spread = c["experts.spread_tokens"]
        wider = np.where(spread > 0, 0.5 * self._spread / np.where(spread > 0, spread, 1.0), 0.0)
        ones = np.ones_like(group)
        return {
            "weights_s": m * reads,
            "token_s": m * multiplies * self._slow * w["tokens"],
            "sample_s": m * multiplies * self._slow * w["samples"],
            "half_tokens": m * multiplies * self._products / self._tokens,
            "pair_s": m * w["pairs"],
            "window_pair_s": m * w["window_pairs"],
            "ctx_token_s": m * w["ctx_tokens"],
            "window_ctx_token_s": m * w["window_ctx_tokens"],
            "sequence_s": m * w["sequences"],
            "layers_s": m,
            "host_s": ones,
            "host_sequence_s": w["group_sequences"],
            "host_prefill_s": w["prefill"],
            "m_decode": np.where(self._prefill, 0.0, self._device),
            "m_prefill": np.where(self._prefill, self._device, 0.0),
            "experts.read_s": m * touches * self._touched,
            "experts.token_s": m * computes * (group + self._spread) * self._expert_slow,
            "experts.spread_tokens": m * computes * c["experts.token_s"] * wider * self._expert_slow,
            "experts.half_tokens": m
            * computes
            * c["experts.token_s"]
            * (group + self._spread)
            / np.maximum(group, 1.0),
            "links.step_s": m,
            "links.token_s": m * w["tokens"],
            "links.group_token_s": m * group,
        }


def _smax(a: F64, b: F64) -> F64:
    """Smooth maximum (a^3 + b^3)^(1/3), as `twin.perf.costs.smax`."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = low / np.where(high > 0, high, 1.0)
    result: F64 = high * np.cbrt(1.0 + ratio**3)
    return result


def _share(part: F64, whole: F64) -> F64:
    """Slope of the smooth maximum in one of its two parts."""
    share: F64 = (part / np.where(whole > 0, whole, 1.0)) ** 2
    return share
