"""Pooled token gaps, computed from leaps: exact percentiles of gaps that are never stored.

A row says: `steps` steps, the j-th of which adds `gap_tokens` gaps of gap0 + gap1*j + gap2*j*j seconds. This file
expands such rows piece by piece and selects order statistics by the bits of the floats, in bounded memory; it must
never give a different answer from sorting the expanded gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from policies.errors import InvariantError
from policies.frozen import frozen
from reports.columns import F64, I64, Columns, distinct

PIECE_VALUES = 1 << 18
"""Values expanded at a time: 2 MB per array, so that a piece stays in cache."""

KEEP_VALUES = 1 << 21
"""Values that may be held at once for the last, exact selection."""

KEPT_PIECES = 4
"""Pieces that the first pass keeps for the next ones: a short run is expanded once."""

SHIFTS = (47, 31, 15, 0)
"""The 63 bits of a non-negative float64, cut into digits of 16, 16, 16 and 15 bits, most significant first."""

DIGIT_BINS = 1 << 16

GAP_COLUMNS = ("steps", "gap_tokens", "gap0_s", "gap1_s", "gap2_s")

Piece: TypeAlias = tuple[F64, I64]
"""Values, and how many times each of them counts."""

Stream: TypeAlias = Callable[[], Iterable[Piece]]
"""Starts the pieces anew each time it is called."""


class GapRows(NamedTuple):
    """Rows of steps.parquet that make gaps: equal-length arrays."""

    steps: I64
    gap_tokens: I64
    gap0_s: F64
    gap1_s: F64
    gap2_s: F64


@frozen
class GapSummary:
    """Moments and asked quantiles of a weighted sample; `quantiles` in the order asked, empty for no values."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    quantiles: tuple[float, ...]


def gap_rows(batch: Columns, since_s: float | None = None, bounds_s: F64 | None = None) -> GapRows:
    """The rows of a batch of steps.parquet that make gaps; with `since_s` those that began then or later, with
    `bounds_s` (ends of intervals in order: from, to, from, ...) those that began inside an interval."""
    weights = batch.ints("gap_tokens", null=0)
    has = weights > 0
    if since_s is not None:
        has &= batch.floats("start_s") >= since_s
    if bounds_s is not None:
        has &= np.searchsorted(bounds_s, batch.floats("start_s"), side="right") % 2 == 1
    polynomial = (batch.floats(name)[has] for name in ("gap0_s", "gap1_s", "gap2_s"))
    return GapRows(batch.ints("steps")[has], weights[has], *polynomial)


def expand(rows: GapRows) -> Iterator[Piece]:
    """The gaps of `rows` with their weights, in row order, in pieces of at most PIECE_VALUES values.

    Rows whose gaps are all equal become one value; a row of a million steps is cut, so memory stays bounded.
    """
    level = (rows.gap1_s == 0.0) & (rows.gap2_s == 0.0)
    counts = np.where(level, 1, rows.steps)
    weights = np.where(level, rows.gap_tokens * rows.steps, rows.gap_tokens)
    ends = np.cumsum(counts)
    starts = ends - counts
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, PIECE_VALUES):
        high = min(low + PIECE_VALUES, total)
        row, step = positions(starts, ends, low, high)
        offset = step.astype(np.float64)
        yield rows.gap0_s[row] + (rows.gap1_s[row] + rows.gap2_s[row] * offset) * offset, weights[row]


def positions(starts: I64, ends: I64, low: int, high: int) -> tuple[I64, I64]:
    """(row, place in the row) of the flat indices low..high-1 of rows laid end to end."""
    first = int(np.searchsorted(ends, low, side="right"))
    last = int(np.searchsorted(ends, high - 1, side="right"))
    span = np.arange(first, last + 1)
    row = np.repeat(span, np.minimum(ends[span], high) - np.maximum(starts[span], low))
    return row, np.arange(low, high) - starts[row]


def summarise(stream: Stream, quantiles: Sequence[float]) -> GapSummary | None:
    """Count, mean, population std, min, max and quantiles (0..1, numpy's linear rule) of the stream; None if empty.

    Two passes as a rule: moments and a histogram of the leading 16 bits, then the values of the bins that hold the
    asked ranks. Where those bins are too full to be held, the next 16 bits are counted first.
    """
    moments = _Moments()
    histogram, entries = np.zeros(DIGIT_BINS, dtype=np.int64), np.zeros(DIGIT_BINS, dtype=np.int64)
    kept: list[Piece] = []
    pieces = 0
    for values, weights in stream():
        pieces += 1
        if pieces <= KEPT_PIECES:
            kept.append((values, weights))
        moments.add(values, weights)
        digit = _keys(values) >> SHIFTS[0]
        histogram += _weighted_counts(digit, weights)
        entries += np.bincount(digit, minlength=DIGIT_BINS)
    if moments.count == 0:
        return None
    again: Stream = stream if pieces > KEPT_PIECES else lambda: kept
    return GapSummary(
        count=moments.count,
        mean=moments.mean,
        std=float(np.sqrt(moments.squares / moments.count)),
        min=moments.low,
        max=moments.high,
        quantiles=_quantiles(again, histogram, entries, moments.count, quantiles),
    )


class _Moments:
    """Count, mean and sum of squared deviations, merged piece by piece (Chan's formula)."""

    __slots__ = ("count", "high", "low", "mean", "squares")

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.low, self.high = np.inf, -np.inf

    def add(self, values: F64, weights: I64) -> None:
        if not bool((values >= 0.0).all()):
            bad = values[~(values >= 0.0)][0]
            raise InvariantError(f"steps.parquet: a token gap of {bad} s; gaps are never negative or undefined")
        count = int(weights.sum())
        mean = float((values * weights).sum() / count)
        squares = float((weights * (values - mean) ** 2).sum())
        total = self.count + count
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))


def _keys(values: F64) -> I64:
    """Integers in the order of the (non-negative) values: the bits of the floats."""
    return (values + 0.0).view(np.int64)


def _weighted_counts(digit: I64, weights: I64) -> I64:
    return np.bincount(digit, weights=weights, minlength=DIGIT_BINS).astype(np.int64)


def _quantiles(
    stream: Stream, histogram: I64, entries: I64, count: int, quantiles: Sequence[float]
) -> tuple[float, ...]:
    places = [(count - 1) * quantile for quantile in quantiles]
    ranks = sorted({rank for place in places for rank in (int(place), min(int(place) + 1, count - 1))})
    found = dict(zip(ranks, _order_statistics(stream, histogram, entries, ranks), strict=True))
    pairs = ((found[int(place)], found[min(int(place) + 1, count - 1)], place - int(place)) for place in places)
    return tuple(lerp(low, high, share) for low, high, share in pairs)


def lerp(low: float, high: float, share: float) -> float:
    """Between two values, rounded as numpy's percentile rounds it."""
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1.0 - share)


def _order_statistics(stream: Stream, histogram: I64, entries: I64, ranks: Sequence[int]) -> list[float]:
    """The values at the given ranks (0-based, ascending) of the expanded sample."""
    prefixes, left = _descend(histogram, np.asarray(ranks, dtype=np.int64))
    held = int(entries[distinct(prefixes)].sum())
    for level in range(1, len(SHIFTS)):
        if held <= KEEP_VALUES:
            return _pick(stream, SHIFTS[level - 1], prefixes, left)
        prefixes, left, held = _next_digit(stream, level, prefixes, left)
    return [float(value) for value in prefixes.view(np.float64)]  # every bit is known


def _descend(histogram: I64, ranks: I64) -> tuple[I64, I64]:
    """The bin that holds each rank, and the rank within that bin."""
    upto = np.cumsum(histogram)
    bins = np.searchsorted(upto, ranks, side="right")
    return bins, ranks - (upto[bins] - histogram[bins])


def _members(keys: I64, shift: int, active: I64) -> tuple[I64, I64]:
    """(index of the keys whose prefix is in `active`, position of that prefix in it)."""
    prefix = keys >> shift
    place = np.minimum(np.searchsorted(active, prefix), len(active) - 1)
    member = np.flatnonzero(active[place] == prefix)
    return member, place[member]


def _next_digit(stream: Stream, level: int, prefixes: I64, left: I64) -> tuple[I64, I64, int]:
    active = distinct(prefixes)
    histogram = np.zeros((len(active), DIGIT_BINS), dtype=np.int64)
    entries = np.zeros_like(histogram)
    width = SHIFTS[level - 1] - SHIFTS[level]
    for values, weights in stream():
        keys = _keys(values)
        member, place = _members(keys, SHIFTS[level - 1], active)
        digit = (keys[member] >> SHIFTS[level]) & ((1 << width) - 1)
        np.add.at(histogram, (place, digit), weights[member])
        np.add.at(entries, (place, digit), 1)
    longer, remaining = np.empty_like(prefixes), np.empty_like(left)
    for index, prefix in enumerate(active):
        mine = prefixes == prefix
        digit, remaining[mine] = _descend(histogram[index], left[mine])
        longer[mine] = (prefix << width) | digit
    held = {int(key): int(entries[np.searchsorted(active, key >> width), key & ((1 << width) - 1)]) for key in longer}
    return longer, remaining, sum(held.values())


def _pick(stream: Stream, shift: int, prefixes: I64, left: I64) -> list[float]:
    """Collect the values with these prefixes and take the asked ranks of each prefix from them, sorted."""
    active = distinct(prefixes)
    kept: list[Piece] = []
    for values, weights in stream():
        member, _ = _members(_keys(values), shift, active)
        kept.append((values[member], weights[member]))
    values, weights = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    order = np.argsort(values, kind="stable")
    values, upto = values[order], np.cumsum(weights[order])
    prefix_of = _keys(values) >> shift
    before = np.searchsorted(prefix_of, prefixes, side="left")
    base = np.where(before > 0, upto[before - 1], 0)
    picked: F64 = values[np.searchsorted(upto, base + left, side="right")]
    return [float(value) for value in picked]
