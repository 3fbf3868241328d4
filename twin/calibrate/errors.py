"""How far predictions are from measurements: relative errors of a set of rows, in the usual figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from policies.frozen import frozen
from twin.calibrate.measured import Measurement
from twin.calibrate.shapes import F64

KINDS: Mapping[str, str] = {"dense": "dense models", "gqa": "MoE, GQA", "other": "MoE, MLA / hybrid / sparse"}


@frozen
class Errors:
    """Relative errors predicted / measured - 1, as shares (0.1 is 10 %).

    `mape`: mean of |e|; `bias`: median of e; `p90` of |e|; `within`: share of rows with |e| up to 10, 20 and 50 %.
    `coverage`: share of rows that have a prediction; a row without one counts as an error of 100 %.
    """

    rows: int
    mape: float
    median: float
    bias: float
    p90: float
    within: tuple[float, float, float]
    coverage: float


def errors_of(predicted: F64, measured: F64) -> Errors | None:
    """Over the rows that were measured (not NaN); None if there are none."""
    there = ~np.isnan(measured)
    if not there.any():
        return None
    relative = predicted[there] / measured[there] - 1
    answered = ~np.isnan(relative)
    size = np.where(answered, np.abs(relative), 1.0)
    within = tuple(float((size <= limit).mean()) for limit in (0.1, 0.2, 0.5))
    return Errors(
        rows=int(there.sum()),
        mape=float(size.mean()),
        median=float(np.median(size)),
        bias=float(np.median(relative[answered])) if answered.any() else float("nan"),
        p90=float(np.quantile(size, 0.9)),
        within=(within[0], within[1], within[2]),
        coverage=float(answered.mean()),
    )


def kind_of(row: Measurement) -> str:
    """Of which `KINDS` its model is."""
    model = row.placed.model
    if model.experts is None:
        return "dense"
    return "other" if model.latent or model.linear or model.indexer else "gqa"


def slices(rows: tuple[Measurement, ...]) -> dict[str, npt.NDArray[np.bool_]]:
    """Parts of a table by name: all of it, kinds of models, engines, GPUs."""
    parts: dict[str, npt.NDArray[np.bool_]] = {"overall": np.ones(len(rows), dtype=bool)}

    def add(label: Callable[[str], str], key: Callable[[Measurement], str], values: list[str]) -> None:
        keys = np.array([key(row) for row in rows])
        parts.update({label(value): keys == value for value in values if (keys == value).any()})

    add(lambda kind: KINDS[kind], kind_of, list(KINDS))
    add(str, lambda row: row.engine, sorted({row.engine for row in rows}))
    add(str, lambda row: row.placed.gpu.name, sorted({row.placed.gpu.name for row in rows}))
    return parts
