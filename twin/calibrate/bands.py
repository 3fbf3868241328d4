"""How far off a fit is where it was not measured, for each level of nearness that a prediction can have.

Each band comes from fits that had not seen what the level lacks: the configuration, the model, the engine on that GPU
family, the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twin.calibrate.errors import Errors, errors_of
from twin.calibrate.fitted import Design
from twin.calibrate.folds import Key, by_block, by_family, by_group, by_model, unseen
from twin.calibrate.pricing import Means
from twin.calibrate.shapes import F64

LEAST_ROWS = 8
"""Fewer make no band of their own: that of the whole block stands in."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Bands:
    """By level: (engine, family, model), (engine, family), family, and for anything else."""

    models: Mapping[tuple[str, str, str], Metrics]
    blocks: Mapping[tuple[str, str], Metrics]
    families: Mapping[str, Metrics]
    generic: Metrics
    configurations: Means  # predictions of each row by fits without its configuration


@dataclass(frozen=True, slots=True)
class Metrics:
    """Errors of the two times; None where there is nothing to compare."""

    tpot: Errors | None
    ttft: Errors | None


def bands(design: Design, told: Callable[[str], None] = lambda what: None) -> Bands:
    """The bands of all levels; `told` hears what is being fitted."""
    by_key: dict[Key, Means] = {}
    for key, what in ((by_group, "configurations"), (by_model, "models"), (by_block, "engines"), (by_family, "GPUs")):
        told(f"fits without {what}")
        by_key[key] = unseen(design, key)
    blocks = np.array([by_block(row) for row in design.rows])
    families = np.array([row.family for row in design.rows])
    models = np.array([row.model for row in design.rows])
    of_models, of_blocks = {}, {}
    for engine, family in sorted({(row.engine, row.family) for row in design.rows}):
        block = blocks == f"{engine}/{family}"
        of_blocks[engine, family] = _metrics(design, by_key[by_model], block)
        for model in sorted(set(models[block].tolist())):
            of_models[engine, family, model] = _metrics(design, by_key[by_group], block & (models == model), block)
    return Bands(
        models=of_models,
        blocks=of_blocks,
        families={
            str(family): _metrics(design, by_key[by_block], families == family) for family in sorted(set(families))
        },
        generic=_metrics(design, by_key[by_family], np.ones(len(models), dtype=bool)),
        configurations=by_key[by_group],
    )


def _metrics(design: Design, predicted: Means, rows: Mask, instead: Mask | None = None) -> Metrics:
    """Errors of some rows, of more of them where they are too few."""

    def of(metric: str) -> Errors | None:
        measured: F64 = getattr(design.measured, metric)
        answers: F64 = getattr(predicted, metric)
        there = ~np.isnan(measured) & ~np.isnan(answers)
        used = rows if instead is None or (rows & there).sum() >= LEAST_ROWS else instead
        limited = np.where(there & used, measured, math.nan)
        return errors_of(answers, limited)

    return Metrics(tpot=of("tpot"), ttft=of("ttft"))
