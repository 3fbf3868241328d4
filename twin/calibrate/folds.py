"""Which rows a fit must not see: folds by configuration, or everything that one model, engine or family has.

A fold follows from the text of a key alone: it is the same in every process, on every machine, in every order of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from twin.calibrate.fit import fit
from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement
from twin.calibrate.pricing import Means

FOLDS = 5

Key = Callable[[Measurement], str]


def fold_of(key: str, folds: int = FOLDS) -> int:
    """A number from 0 to `folds` - 1."""
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % folds


def by_group(row: Measurement) -> str:
    """One of the folds of a cross-validation over configurations."""
    return str(fold_of(row.group))


def by_model(row: Measurement) -> str:
    return row.model


def by_block(row: Measurement) -> str:
    return f"{row.engine}/{row.family}"


def by_family(row: Measurement) -> str:
    return row.family


def by_pair(row: Measurement) -> str:
    """A model on a GPU: leaving it out asks for a pair that was never measured together."""
    return f"{row.model}/{row.placed.gpu.name}"


def by_version(row: Measurement) -> str:
    """A minor release of an engine."""
    return f"{row.engine} {'.'.join(row.engine_version.split('.')[:2])}"


def unseen(design: Design, key: Key) -> Means:
    """What fits predict for rows that they have not seen: for each value of the key, a fit to all other rows.

    NaN where nothing would be left to fit.
    """
    keys = np.array([key(row) for row in design.rows])
    ttft, tpot = np.full(len(keys), math.nan), np.full(len(keys), math.nan)
    for value in sorted(set(keys.tolist())):
        out = keys == value
        if out.all():
            continue
        predicted = design.part(out).predict(fit(design.part(~out)))
        ttft[out], tpot[out] = predicted.ttft, predicted.tpot
    return Means(ttft, tpot)


def known_elsewhere(rows: Sequence[Measurement]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows whose model is measured on another GPU too, and whose GPU with another model."""
    models: dict[str, set[str]] = {}
    gpus: dict[str, set[str]] = {}
    for row in rows:
        models.setdefault(row.model, set()).add(row.placed.gpu.name)
        gpus.setdefault(row.placed.gpu.name, set()).add(row.model)
    return np.array([len(models[row.model]) > 1 and len(gpus[row.placed.gpu.name]) > 1 for row in rows])
