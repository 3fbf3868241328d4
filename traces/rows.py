"""Rows on their way from a reader to the checks: the columns as the file has them, and where each row stands.

Numbers are numpy arrays, so that checking a clean chunk costs a few vector operations. Nothing here judges a value or
leaves out a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces import arrow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NumberArray = npt.NDArray[Any]
"""An array of int64 or float64."""


@dataclass(slots=True)
class Numbers:
    """A numeric column: int64 where every value is whole, else float64. Values under `missing` mean nothing."""

    values: NumberArray
    missing: Flags | None = None

    def take(self, index: Ints) -> Numbers:
        """The rows at `index`."""
        return Numbers(self.values[index], None if self.missing is None else self.missing[index])

    def present(self) -> Flags:
        """Which rows have a value."""
        return np.ones(len(self.values), np.bool_) if self.missing is None else ~self.missing

    def to_arrow(self, dtype: type[np.generic]) -> pa.Array:
        """An Arrow array of `dtype` with nulls where values are missing."""
        values = self.values if self.missing is None else np.where(self.missing, 0, self.values)
        return arrow.numbers(values.astype(dtype, copy=False), self.missing)

    @staticmethod
    def concat(parts: Sequence[Numbers]) -> Numbers:
        """The rows of all parts, in order."""
        missing = None
        if any(part.missing is not None for part in parts):
            missing = np.concatenate([~part.present() for part in parts])
        return Numbers(np.concatenate([part.values for part in parts]), missing)


@dataclass(slots=True)
class IdLists:
    """One list of 64-bit ids per row: row i has `values[offsets[i]:offsets[i + 1]]`; an empty list means unknown."""

    offsets: Ints
    values: Ints

    def lengths(self) -> Ints:
        """Ids per row."""
        return np.diff(self.offsets)

    def take(self, index: Ints) -> IdLists:
        """The rows at `index`."""
        lengths = self.lengths()[index]
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return IdLists(offsets, self.values[np.repeat(self.offsets[index], lengths) + within])

    def to_arrow(self) -> pa.Array:
        """`list<int64>` with null for the empty lists."""
        return arrow.int_lists(self.lengths(), self.values[self.offsets[0] : self.offsets[-1]])

    @staticmethod
    def concat(parts: Sequence[IdLists]) -> IdLists:
        """The rows of all parts, in order."""
        offsets = np.zeros(1 + sum(len(part.offsets) - 1 for part in parts), np.int64)
        np.cumsum(np.concatenate([part.lengths() for part in parts]), out=offsets[1:])
        return IdLists(offsets, np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts]))


@dataclass(slots=True, kw_only=True)
class Rows:
    """Up to one batch of rows of a trace file, before any of them has been checked.

    `numbers` and `texts` are keyed by canonical column; the arrival is in ticks of the file's own unit from any origin,
    `delay_s` is in seconds. `unreadable` says, per index, why a row could not even be taken apart: its values mean
    nothing. `left_out` counts lines that are no requests, `remarks` rows that are but are worth a word, both by reason.
    `place` gives the 1-based line or row of an index.
    """

    count: int
    numbers: dict[str, Numbers]
    place: Callable[[int], int]
    texts: dict[str, pa.Array] = field(default_factory=dict)
    ids: IdLists | None = None
    unreadable: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)

    def take(self, index: Ints) -> Rows:
        """The rows at `index`, in that order."""
        place = self.place
        return Rows(
            count=len(index),
            numbers={name: column.take(index) for name, column in self.numbers.items()},
            place=lambda i: place(int(index[i])),
            texts={name: column.take(arrow.numbers(index)) for name, column in self.texts.items()},
            ids=None if self.ids is None else self.ids.take(index),
        )

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, which have the same columns; places are those within the whole."""
        first = parts[0]
        ids = [part.ids for part in parts if part.ids is not None]
        return Rows(
            count=sum(part.count for part in parts),
            numbers={name: Numbers.concat([part.numbers[name] for part in parts]) for name in first.numbers},
            place=lambda i: i + 1,
            texts={name: pa.concat_arrays([part.texts[name] for part in parts]) for name in first.texts},
            ids=IdLists.concat(ids) if ids else None,
        )
