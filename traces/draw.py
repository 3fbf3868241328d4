"""Random draws that stay the same: inverse distribution functions of named PCG64 streams.

Only uniform numbers come from numpy, whose bit generators are stable between versions; its distributions are not. Each
use of chance has a stream of its own, so a new one never shifts the numbers of another.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Fit = Mapping[str, Any]
"""Fitted figures as JSON has them; `traces/README.md` says what they mean."""

_BELOW_ONE = 1 - 2.0**-53


class Stream:
    """Uniform numbers in [0, 1), determined by the seed and the name."""

    def __init__(self, seed: int, name: str) -> None:
        self._generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))

    def uniform(self, count: int) -> Floats:
        """The next `count` numbers."""
        return self._generator.random(count)

    def one(self) -> float:
        """The next number."""
        return self._generator.random()

    def normal(self, count: int) -> Floats:
        """Standard normal numbers, one uniform each."""
        from scipy.special import ndtri

        drawn: Floats = ndtri(np.clip(self.uniform(count), 1 - _BELOW_ONE, _BELOW_ONE))
        return drawn

    def gamma(self, shape: float, count: int) -> Floats:
        """Gamma numbers of mean 1, one uniform each; their coefficient of variation is `shape` ** -0.5."""
        from scipy.special import gammaincinv

        drawn: Floats = gammaincinv(shape, self.uniform(count)) / shape
        return drawn


class Quantiles:
    """An inverse distribution function as a table, linear in between."""

    __slots__ = ("_u", "_v")

    def __init__(self, table: Fit | Sequence[float]) -> None:
        """From {u, v}, or from values at equal steps of u."""
        self._u: list[float]
        self._v: list[float]
        if isinstance(table, Mapping):
            self._u, self._v = table["u"], table["v"]
        else:
            self._u, self._v = np.linspace(0.0, 1.0, len(table)).tolist(), list(table)

    def at(self, u: Floats) -> Floats:
        """The values at `u`."""
        return np.interp(u, self._u, self._v)

    def one(self, u: float) -> float:
        """The value at one `u`."""
        i = min(bisect_right(self._u, u), len(self._u) - 1)
        left, low = self._u[i - 1], self._v[i - 1]
        return low + (self._v[i] - low) * (u - left) / (self._u[i] - left)


class Lengths:
    """A distribution of token counts: single values with a probability of their own, and a table for the rest."""

    __slots__ = ("_rest", "_upto", "_values")

    def __init__(self, model: Fit) -> None:
        """From {atoms: [[value, probability], ...], rest: {u, v}}, or rest null where the single values are all."""
        atoms = model["atoms"]
        self._values: list[int] = [value for value, _ in atoms]
        upto: list[float] = np.cumsum([probability for _, probability in atoms], dtype=np.float64).tolist()
        self._rest = None if model["rest"] is None else Quantiles(model["rest"])
        self._upto = [each / upto[-1] for each in upto] if self._rest is None else upto

    def at(self, u: Floats) -> Ints:
        """Whole lengths of at least 1, one per uniform number."""
        single = self._upto[-1] if self._upto else 0.0
        drawn = np.ones(len(u), np.float64)
        if self._rest is not None:
            drawn = np.rint(self._rest.at(np.maximum(u - single, 0.0) / (1.0 - single)))
        if self._upto:
            index = np.minimum(np.searchsorted(self._upto, u, side="right"), len(self._upto) - 1)
            drawn = np.where(u < single, np.array(self._values)[index], drawn)
        return np.maximum(drawn, 1).astype(np.int64)

    def one(self, u: float) -> int:
        """One length."""
        single = self._upto[-1] if self._upto else 0.0
        if u < single or self._rest is None:
            return max(1, self._values[min(bisect_right(self._upto, u), len(self._upto) - 1)])
        return max(1, round(self._rest.one((u - single) / (1.0 - single))))


class Conditional(NamedTuple):
    """One distribution of lengths per class of another quantity; classes are right-open, the outer ones unbounded."""

    edges: Ints
    tables: tuple[Lengths, ...]

    @classmethod
    def of(cls, edges: Sequence[int], tables: Sequence[Fit]) -> Conditional:
        """From class edges and one length model per class."""
        return cls(np.array(edges, np.int64), tuple(map(Lengths, tables)))

    def at(self, given: Ints, u: Floats) -> Ints:
        """Whole lengths, one per uniform number, each from the class of `given`."""
        drawn = np.zeros(len(given), np.int64)
        bins = classes(self.edges, given)
        for index, table in enumerate(self.tables):
            inside = bins == index
            drawn[inside] = table.at(u[inside])
        return drawn


def classes(edges: Ints, values: Ints) -> Ints:
    """The class of each value: 0 below `edges[1]`, 1 from there to below `edges[2]`, and so on."""
    found: Ints = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return found


def one_class(edges: Sequence[int], value: int) -> int:
    """The class of one value."""
    return min(max(bisect_right(edges, value) - 1, 0), len(edges) - 2)


@cache
def fit(name: str) -> Fit:
    """The fitted figures called `name` that ship with this package."""
    text = files("traces").joinpath("fits", f"{name}.json").read_text(encoding="utf-8")
    found: Fit = json.loads(text)
    return found
