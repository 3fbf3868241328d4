"""Which rows a fit must not see: folds by configuration, or everything that one model, engine or family has.

A fold follows from the text of a key alone: it is the same in every process, on every machine, in every order of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twin.calibrate.fit import fit
from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement
from twin.calibrate.pricing import Means

FOLDS = 5
ALWAYS_SEEN = ""

Key = Callable[[Measurement], str]


def fold_of(key: str, folds: int = FOLDS) -> int:
    """A number from 0 to `folds` - 1."""
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % folds


def by_group(row: Measurement) -> str:
    """One of the folds of a cross-validation over configurations."""
    return str(fold_of(row.group))


def by_model(row: Measurement) -> str:
    return row.model


def by_gpu(row: Measurement) -> str:
    return row.placed.gpu.name


def by_block(row: Measurement) -> str:
    return f"{row.engine}/{row.family}"


def by_family(row: Measurement) -> str:
    return row.family


def by_pair(row: Measurement) -> str:
    """Models on GPUs, in folds: with its fold left out, a pair is one that was never measured together."""
    return str(fold_of(f"{row.model}/{row.placed.gpu.name}"))


def by_version(row: Measurement) -> str:
    """Releases of engines, in folds; runs whose release is not known are never left out."""
    return str(fold_of(f"{row.engine}/{row.engine_version}")) if row.engine_version else ALWAYS_SEEN


def unseen(design: Design, key: Key) -> Means:
    """What fits predict for rows that they have not seen: for each value of the key, a fit to all other rows.

    NaN where nothing would be left to fit, and where the key is `ALWAYS_SEEN`.
    """
    keys = np.array([key(row) for row in design.rows])
    ttft, tpot = np.full(len(keys), math.nan), np.full(len(keys), math.nan)
    for value in sorted(set(keys.tolist())):
        out = keys == value
        if out.all() or value == ALWAYS_SEEN:
            continue
        predicted = design.part(out).predict(fit(design.part(~out)))
        ttft[out], tpot[out] = predicted.ttft, predicted.tpot
    return Means(ttft, tpot)


def still_known(rows: Sequence[Measurement], key: Key, *parts: Key) -> npt.NDArray[np.bool_]:
    """Rows of which each of the `parts` is found among rows with another `key`, too."""
    found = np.ones(len(rows), dtype=bool)
    for part in parts:
        keys: dict[str, set[str]] = {}
        for row in rows:
            keys.setdefault(part(row), set()).add(key(row))
        found &= np.array([len(keys[part(row)]) > 1 for row in rows])
    return found
