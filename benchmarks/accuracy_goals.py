"""What the error table of docs/accuracy.md should reach: goals from an earlier prototype, beside what is reached.

A goal is missed by any part of a percent that is above it as printed. Goals bind medians and means alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from twin.calibrate.bands import Metrics
from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement
from twin.calibrate.pricing import Means

FOLDED = "overall, five folds"
GOALS: Mapping[str, tuple[float, float, float, float]] = MappingProxyType(
    {
        "overall": (11, 8, 25, 15),
        FOLDED: (13, 9.5, 27, 17),
        "dense models": (9, 7, 22, 11),
        "MoE, GQA": (11, 8, 25, 15),
        "MoE, MLA / hybrid / sparse": (12, 9, 25, 18),
        "vllm": (9, 7, 22, 13),
        "sglang": (12, 9, 27, 17),
        "trtllm": (11, 9, 25, 14),
        "model and GPU seen, never together": (10, 8, 18, 12),
        "model never measured": (12, 10, 27, 24),
        "engine version never measured": (16, 12, 33, 25),
        "no calibration": (18, 15, 45, 38),
    }
)
"""Percent by slice: mean and median error of TPOT, then of TTFT. `overall` is for a table outside the fit (`--score`);
folds are harder, since one may hold the only runs of a model."""

KEPT_MEAN, KEPT_WORST, TAU = 0.98, 0.85, 0.88


def goal_table(found: Mapping[str, Metrics]) -> str:
    """A line for each goal whose slice was `found`, in Markdown."""
    lines = ["| slice | time | goal: mean / median | reached | missed by |", "|---|---|---|---|---|"]
    for name, goals in GOALS.items():
        if name not in found:
            continue
        for time, errors, goal in (("TPOT", found[name].tpot, goals[:2]), ("TTFT", found[name].ttft, goals[2:])):
            if errors is not None:
                reached = (100 * errors.mape, 100 * errors.median)
                lines.append(
                    f"| {name} | {time} | {goal[0]:g} / {goal[1]:g} | {_pair(reached)} | {_missed(goal, reached)} |"
                )
    return "\n".join(lines)


def _pair(percent: Iterable[float]) -> str:
    return " / ".join(f"{one:.1f}" for one in percent)


def _missed(goals: tuple[float, ...], reached: tuple[float, ...]) -> str:
    over = [round(now, 1) - goal for goal, now in zip(goals, reached, strict=True)]
    return " / ".join(f"{one:.1f}" if one > 0 else "–" for one in over) if max(over) > 0 else ""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well predictions order configurations under the same load: `sets` of them, and `pairs` within sets.

    `kept` by set: measured tokens/s/GPU of the one that is predicted best, as a share of the best measured.
    `tau`: (pairs in the right order - pairs in the wrong one) / pairs.
    """

    kept: np.ndarray
    pairs: int
    tau: float

    def lines(self) -> Iterator[str]:
        """The three goals, in Markdown."""
        yield f"| ranking under the same load, {len(self.kept)} sets, {self.pairs:,} pairs | goal | reached |"
        yield "|---|---|---|"
        kept = "of the best measured tokens/s/GPU kept by our pick"
        yield f"| share {kept}, mean | ≥ {KEPT_MEAN} | {self.kept.mean():.3f} |"
        yield f"| the same, worst | ≥ {KEPT_WORST} | {self.kept.min():.2f} |"
        yield f"| Kendall's τ | ≥ {TAU} | {self.tau:.2f} |"


def ranking(design: Design, predicted: Means) -> Ranking | None:
    """Over configurations that were measured with the same model, GPU, lengths and users; None if there are none.

    Tokens/s are those of a closed loop, users x osl / (TTFT + (osl - 1) TPOT); runs that lack a time are left out.
    """
    sets: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, row in enumerate(design.rows):
        if row.ttft_s is not None and row.tpot_s is not None and not math.isnan(predicted.ttft[at]):
            sets[row.model, row.placed.gpu.name, row.isl, row.osl, row.users].append(at)
    kept, order = [], []
    for rows in sets.values():
        if len({design.rows[at].group for at in rows}) < 2:
            continue
        measured = np.array([_rate(design.rows[at], design.measured, at) for at in rows])
        ours = np.array([_rate(design.rows[at], predicted, at) for at in rows])
        kept.append(measured[ours.argmax()] / measured.max())
        first, second = np.triu_indices(len(rows), 1)
        order.append(np.sign(measured[first] - measured[second]) * np.sign(ours[first] - ours[second]))
    if not kept:
        return None
    signs = np.concatenate(order)
    return Ranking(kept=np.array(kept), pairs=len(signs), tau=float(signs.mean()))


def _rate(row: Measurement, times: Means, at: int) -> float:
    """Tokens/s/GPU of one replica."""
    return row.users * row.osl / (times.ttft[at] + (row.osl - 1) * times.tpot[at]) / row.placed.layout.ranks
