"""What a trace is like: rate and burstiness, lengths, sharing of prefixes, sessions.

One pass over the batches. Memory is bounded by the distinct lengths, the distinct hash ids and the open sessions, not
by the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces import arrow
from traces.load import ReadOptions, TraceInfo, open_trace
from traces.prefixes import PrefixTree
from traces.schema import HASH_IDS, ISL, OSL, SESSION_ID
from traces.transform import arrivals_of

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
WINDOWS_S = (1, 10, 60)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class LengthStats(NamedTuple):
    """Token counts of all rows: mean, and the values at `QUANTILES` (linear between closest ranks)."""

    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """A trace in figures. None where a figure is not defined: never a zero.

    `rate_rps`: arrivals per second from the first to the last. `gap_cv`: standard deviation over mean of the gaps
    between arrivals (1: Poisson). `dispersion`: variance over mean of the arrivals in whole windows of `WINDOWS_S`
    seconds (1: Poisson); rows whose arrival follows an answer count in none of these. `peak_rps`: the busiest window of
    60 s. `hit_rate_blocks` and `hit_rate_tokens`: the share of prompt blocks (hash ids) and tokens that an endless
    cache, shared by all, would have held; a prompt's last block, and its last token, are always computed.
    """

    info: TraceInfo
    rows: int
    span_s: float
    rate_rps: float | None
    peak_rps: float | None
    gap_cv: float | None
    dispersion: tuple[float | None, ...]
    isl: LengthStats
    osl: LengthStats
    hit_rate_blocks: float | None
    hit_rate_tokens: float | None
    distinct_blocks: int | None
    sessions: int
    session_rows: int
    closed_loop_rows: int
    skipped: dict[str, int]
    remarks: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        plain = asdict(self)
        plain["info"]["path"] = str(self.info.path)
        plain["dispersion"] = {f"{window}s": value for window, value in zip(WINDOWS_S, self.dispersion, strict=True)}
        for name in (ISL, OSL):
            lengths: LengthStats = getattr(self, name)
            quantiles = {_quantile_name(q): v for q, v in zip(QUANTILES, lengths.quantiles, strict=True)}
            plain[name] = {"mean": lengths.mean, **quantiles}
        return plain

    def table(self) -> list[tuple[str, str]]:
        """Label and value pairs, as `twin traces show` prints them."""
        info = self.info
        kind = "synthetic" if info.synthetic else "not marked synthetic"
        lines = [
            ("format", f"{info.format}, {kind}"),
            *(("", note) for note in info.notes),
            ("source", info.source or "n/a"),
            ("licence", info.licence or "n/a"),
            ("rows", f"{self.rows:,}"),
            ("span", f"{self.span_s:,.3f} s"),
            ("rate", f"{_show(self.rate_rps)} requests/s, busiest minute {_show(self.peak_rps)}"),
            ("gaps, CV", f"{_show(self.gap_cv)} (Poisson: 1)"),
            *self._dispersion_lines(),
            ("tokens", "".join(f"{name:>9}" for name in (*map(_quantile_name, QUANTILES), "mean"))),
            *((name, _show_lengths(getattr(self, name))) for name in (ISL, OSL)),
            ("ideal hit rate", self._sharing()),
            ("sessions", self._session_line()),
        ]
        lines += [("left out", f"{count:,} {reason}") for reason, count in sorted(self.skipped.items())]
        lines += [("note", f"{count:,} {what}") for what, count in sorted(self.remarks.items())]
        return lines

    def _dispersion_lines(self) -> list[tuple[str, str]]:
        pairs = zip(WINDOWS_S, self.dispersion, strict=True)
        return [(f"dispersion, {window} s", f"{_show(value)} (Poisson: 1)") for window, value in pairs]

    def _sharing(self) -> str:
        if self.hit_rate_blocks is None or self.hit_rate_tokens is None:
            return "n/a (no hash ids: nothing is known of the content)"
        blocks = (
            f"{self.hit_rate_blocks:.1%} of blocks of {self.info.hash_block_tokens} ({self.distinct_blocks:,} distinct)"
        )
        return f"{self.hit_rate_tokens:.1%} of tokens, {blocks}"

    def _session_line(self) -> str:
        if not self.sessions:
            return "none"
        return f"{self.sessions:,} with {self.session_rows:,} turns, {self.closed_loop_rows:,} wait for an answer"


def describe(path: Path, options: ReadOptions | None = None) -> TraceStats:
    """Read a trace file once and describe it. Raises TraceError as reading does."""
    trace = open_trace(path, options)
    return describe_batches(trace, trace.info, trace.skipped, trace.remarks)


def describe_batches(
    batches: Iterable[pa.RecordBatch], info: TraceInfo, skipped: dict[str, int], remarks: dict[str, int]
) -> TraceStats:
    """Describe canonical batches; `skipped` and `remarks` are read when these have ended."""
    arrivals, isl, osl = _Arrivals(), _Lengths(), _Lengths()
    sharing, sessions = _Sharing(info.hash_block_tokens), _Sessions()
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        arrivals.add(arrivals_of(batch))
        isl.add(_column(batch, ISL))
        osl.add(_column(batch, OSL))
        sharing.add(batch)
        sessions.add(batch)
    closed_loop_rows = rows - arrivals.count
    return TraceStats(
        info=info,
        rows=rows,
        span_s=arrivals.span_s,
        rate_rps=arrivals.rate_rps(),
        peak_rps=arrivals.windows[-1].peak_rps(),
        gap_cv=arrivals.gap_cv(),
        dispersion=tuple(window.dispersion(arrivals.span_s) for window in arrivals.windows),
        isl=isl.stats(),
        osl=osl.stats(),
        hit_rate_blocks=sharing.rate(sharing.hit_blocks, sharing.blocks),
        hit_rate_tokens=sharing.rate(sharing.hit_tokens, sharing.tokens),
        distinct_blocks=sharing.distinct(),
        sessions=len(sessions.names),
        session_rows=sessions.rows,
        closed_loop_rows=closed_loop_rows,
        skipped=dict(skipped),
        remarks=dict(remarks),
    )


def _column(batch: pa.RecordBatch, name: str) -> Ints:
    values: Ints = arrow.values_under(batch.column(batch.schema.get_field_index(name)))
    return values


def _show(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _quantile_name(q: float) -> str:
    return {0.0: "min", 1.0: "max"}.get(q, f"p{q * 100:g}")


def _show_lengths(lengths: LengthStats) -> str:
    return "".join(f"{value:>9,.0f}" for value in lengths.quantiles) + f"{lengths.mean:>9,.1f}"


# ---------------------------------------------------------------- one quantity each


class _Arrivals:
    """Count, span, gaps and windows of arrivals that come in order."""

    def __init__(self) -> None:
        self.count = 0
        self.windows = [_Windows(width) for width in WINDOWS_S]
        self._first_s = self._last_s = 0.0
        self._gap_squares = 0.0

    @property
    def span_s(self) -> float:
        return self._last_s - self._first_s

    def add(self, arrival_s: Floats) -> None:
        if not len(arrival_s):
            return
        if not self.count:
            self._first_s = self._last_s = float(arrival_s[0])
        gaps = np.diff(arrival_s, prepend=self._last_s)
        self._gap_squares += float(np.dot(gaps, gaps))
        self.count += len(arrival_s)
        self._last_s = float(arrival_s[-1])
        for window in self.windows:
            window.add(arrival_s - self._first_s)

    def rate_rps(self) -> float | None:
        return (self.count - 1) / self.span_s if self.span_s > 0 else None

    def gap_cv(self) -> float | None:
        """Of the count - 1 gaps, with the population's standard deviation."""
        if self.span_s <= 0:
            return None
        gaps = self.count - 1
        mean = self.span_s / gaps
        return float(np.sqrt(max(self._gap_squares / gaps - mean**2, 0.0)) / mean)


class _Windows:
    """Arrivals per whole window of one width, counted from the first arrival."""

    def __init__(self, width_s: int) -> None:
        self._width_s = width_s
        self._open = 0
        self._in_open = 0
        self._sum = self._squares = self._peak = 0

    def add(self, offset_s: Floats) -> None:
        index, counts = np.unique((offset_s // self._width_s).astype(np.int64), return_counts=True)
        if index[0] == self._open:
            counts[0] += self._in_open
        else:
            self._close(np.array([self._in_open]))
        self._close(counts[:-1])
        self._open, self._in_open = int(index[-1]), int(counts[-1])

    def _close(self, counts: Ints) -> None:
        self._sum += int(counts.sum())
        self._squares += int((counts**2).sum())
        self._peak = max(self._peak, int(counts.max(initial=0)))

    def peak_rps(self) -> float | None:
        """The busiest whole window; None when there is none."""
        return self._peak / self._width_s if self._open else None

    def dispersion(self, span_s: float) -> float | None:
        """Variance over mean; the window in which the trace ends is left out. None with fewer than two windows."""
        windows = int(span_s // self._width_s)
        if windows < 2 or not self._sum:
            return None
        mean = self._sum / windows
        return (self._squares / windows - mean**2) / mean


class _Lengths:
    """Exact quantiles from the distinct values and how often each occurs."""

    def __init__(self) -> None:
        self._values: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def add(self, values: Ints) -> None:
        found, counts = np.unique(values, return_counts=True)
        merged, inverse = np.unique(np.concatenate([self._values, found]), return_inverse=True)
        total = np.zeros(len(merged), np.int64)
        np.add.at(total, inverse, np.concatenate([self._counts, counts]))
        self._values, self._counts = merged, total

    def stats(self) -> LengthStats:
        ends = np.cumsum(self._counts)
        rows = int(ends[-1])
        at = np.array(QUANTILES) * (rows - 1)
        low, high = np.floor(at).astype(np.int64), np.ceil(at).astype(np.int64)
        below, above = (self._values[np.searchsorted(ends, rank, side="right")] for rank in (low, high))
        quantiles = below + (above - below) * (at - low)
        return LengthStats(float((self._values * self._counts).sum() / rows), tuple(quantiles.tolist()))


class _Sharing:
    """Blocks and tokens that an endless cache would have held."""

    def __init__(self, block: int | None) -> None:
        self._block = block
        self._tree = PrefixTree(block or 1)
        self._rows = 0
        self.blocks = self.tokens = self.hit_blocks = self.hit_tokens = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if self._block is None or HASH_IDS not in batch.schema.names:
            return
        lists = batch.column(batch.schema.get_field_index(HASH_IDS))
        values = arrow.values_under(lists.values).tolist()
        offsets = arrow.values_under(lists.offsets).tolist()
        valid = arrow.valid_flags(lists).tolist()
        for row, isl in enumerate(_column(batch, ISL).tolist()):
            ids = values[offsets[row] : offsets[row + 1]] if valid[row] else []
            self._rows += bool(ids)
            known = self._tree.add(ids, isl) if ids else 0
            self.tokens += isl
            self.blocks += -(-isl // self._block)
            self.hit_tokens += min(known, isl - 1)
            self.hit_blocks += min(known, isl - 1) // self._block

    def rate(self, hits: int, total: int) -> float | None:
        return hits / total if self._rows else None

    def distinct(self) -> int | None:
        return len(self._tree) if self._rows else None


class _Sessions:
    """Names and turns of sessions."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if SESSION_ID not in batch.schema.names:
            return
        column = batch.column(batch.schema.get_field_index(SESSION_ID))
        turns = len(column) - column.null_count
        if turns:
            self.rows += turns
            self.names.update(name for name in column.to_pylist() if name is not None)
