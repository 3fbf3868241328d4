"""Step shapes of one measured row: what steps asked of a rank, with their weights in the row's mean TTFT and TPOT.

Steps that are alike are put together: equal prompt tokens and decodes to within a few percent count as one, at the
weighted mean of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twin.calibrate.protocol import ClosedLoop
from twin.calibrate.unit_time import Asked
from twin.perf.models import Model
from twin.perf.work import StepWork, step_work

F64: TypeAlias = npt.NDArray[np.float64]

COLUMNS = (
    *("tokens", "samples", "pairs", "window_pairs", "sequences", "ctx_tokens", "window_ctx_tokens"),
    *("group_tokens", "group_sequences", "prefill"),
)
PROMPT_BINS, BATCH_BINS, EXACT_BATCH = 8, 16, 16
"""Bins per doubling of prompt tokens and of the batch; batches up to the last are told apart one by one."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """`work[i]` has the `COLUMNS` of shape i; a mean TTFT is the sum of `ttft[i]` times the seconds of shape i."""

    work: F64
    ttft: F64
    tpot: F64
    prompt_tokens: float  # of a request, in the mean


def work_row(work: StepWork, window_tokens: int) -> tuple[float, ...]:
    """The `COLUMNS` of one step."""
    return (*work[:6], min(work.ctx_tokens, window_tokens * work.sequences), *work[6:])


def window_of(model: Model) -> int:
    """Tokens that window or sparse layers look back; 0 if there are none."""
    if model.indexer:
        return model.indexer.top_k
    return model.window.tokens if model.window else 0


class ShapeLog:
    """Takes steps as they come. `waiting`: requests that were sent and have no token yet."""

    def __init__(self, *, dp: int, window_tokens: int) -> None:
        self._dp, self._window = dp, window_tokens
        self.waiting = 0
        self._decoding = 0.0  # sum over decoding requests of 1 / (tokens - 1)
        self._counted = 0  # requests with more than one token
        self._rows: list[tuple[float, ...]] = []

    def first(self, outputs: int) -> None:
        """A request has made its first token."""
        self.waiting -= 1
        if outputs > 1:
            self._decoding += 1 / (outputs - 1)
            self._counted += 1

    def ended(self, outputs: int) -> None:
        """A request has made its last token."""
        if outputs > 1:
            self._decoding -= 1 / (outputs - 1)

    def add_step(self, asked: Asked | None, decodes: int) -> None:
        """One step that computed prompts; None: it took no time."""
        if asked is None:
            return
        chunks, batch, ctx_tokens, resumed, resumed_ctx = asked
        work = step_work(chunks, batch, ctx_tokens, resumed, resumed_ctx, dp=self._dp, window_tokens=self._window)
        self._rows.append((*work_row(work, self._window), 1, self.waiting, self._decoding, len(chunks)))

    def add_decodes(self, batch: int, ctx_tokens: int, steps: int) -> None:
        """`steps` steps of a standing batch, at its mean context."""
        work = step_work((), batch, ctx_tokens, 0, 0, dp=self._dp, window_tokens=self._window)
        share = work.sequences
        first = work.ctx_tokens
        near = _mean_below(first, share, steps, self._window * share)
        at = StepWork(*work[:5], first + share * (steps - 1) / 2, *work[6:])
        self._rows.append((*at[:6], near, *at[6:], steps, self.waiting, self._decoding, 0))

    def work(self) -> F64:
        """What each step that was taken asked of a rank, in the `COLUMNS`."""
        return np.array(self._rows, dtype=np.float64)[:, : len(COLUMNS)]

    def shapes(self, loop: ClosedLoop) -> Shapes:
        """What came of the whole loop."""
        rows = np.array(self._rows, dtype=np.float64)
        work, (steps, waiting, decoding, chunks) = rows[:, : len(COLUMNS)], rows[:, len(COLUMNS) :].T
        ttft = waiting * steps / len(loop.prompts)
        tpot = decoding * steps / max(1, self._counted)
        bins = _bins(work, chunks)
        merged = _merged(bins, work, ttft / ttft.sum() + tpot / (tpot.sum() or 1.0))
        return Shapes(
            work=merged,
            ttft=np.bincount(bins, ttft).astype(np.float64),
            tpot=np.bincount(bins, tpot).astype(np.float64),
            prompt_tokens=float(np.mean(loop.prompts)),
        )


def _bins(work: F64, chunks: F64) -> npt.NDArray[np.intp]:
    """A number for each row; rows that are alike have the same, and none is left out."""
    sequences = work[:, COLUMNS.index("sequences")]
    prompt = work[:, COLUMNS.index("tokens")] - sequences
    by_prompt = np.where(prompt > 0, np.rint(np.log2(np.maximum(prompt, 1)) * PROMPT_BINS) + 1, 0)
    coarse = np.rint(np.log2(np.maximum(sequences, 1)) * BATCH_BINS) + 1000
    by_batch = np.where(sequences > EXACT_BATCH, coarse, sequences)
    keys = by_prompt * 1e6 + by_batch * 10 + np.minimum(chunks, 9)
    bins: npt.NDArray[np.intp] = np.unique(keys, return_inverse=True)[1].reshape(-1)
    return bins


def _merged(bins: npt.NDArray[np.intp], work: F64, weights: F64) -> F64:
    """The weighted mean of the rows of each bin."""
    weights = np.maximum(weights, 1e-300)
    total = np.bincount(bins, weights)
    return np.column_stack([np.bincount(bins, weights * column) / total for column in work.T])


def _mean_below(first: float, slope: float, steps: int, limit: float) -> float:
    """Mean of min(first + slope j, limit) over j = 0 .. steps - 1."""
    if slope <= 0 or first >= limit:
        return min(first, limit)
    inside = min(steps, int((limit - first) / slope) + 1)
    total = inside * first + slope * inside * (inside - 1) / 2 + (steps - inside) * limit
    return total / steps
