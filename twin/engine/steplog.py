"""The record of an engine: one row per step or leap, and the token gaps that are longer than a step.

A gap is the time between two tokens of one request. In a standing batch every gap is a step; a request that was
stalled, starved of budget or preempted has a longer one, which gets a row of kind "gap". Columns:
`reports.record.STEP_COLUMNS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from twin.engine.batch import DecodeBatch
from twin.engine.epoch import Epoch
from twin.engine.plan import StepPlan
from twin.engine.sequence import Sequence

Row = tuple[float | int | str, ...]


class Counted(Protocol):
    """A pool of KV blocks, as far as a row tells of it."""

    capacity: int
    free: int
    inactive: int


class StepLog:
    """Knows when the batch last emitted (`emitted_s`), and the members for which that is another time (`late`).

    While tokens are withheld from the clients, steps are rows as ever and no gap is written.
    """

    __slots__ = ("_withheld_s", "_write", "emitted_s", "late", "worker_id")

    def __init__(self, worker_id: int, write: Callable[[Row], None] | None) -> None:
        self.worker_id = worker_id
        self._write = write
        self.emitted_s = 0.0
        self.late: dict[Sequence, float] = {}
        self._withheld_s: float | None = None  # since when

    # ------------------------------------------------------------ who emitted when

    def joined(self, seq: Sequence, at_s: float, *, alone: bool) -> None:
        """A sequence that emitted at `at_s` joins the batch."""
        if alone:
            self.emitted_s = at_s
        elif at_s != self.emitted_s:
            self.late[seq] = at_s

    def emitted(self, at_s: float) -> None:
        """Every member of the batch emitted at `at_s`."""
        self.emitted_s = at_s
        if self.late:
            self.late.clear()

    def last_token_s(self, seq: Sequence) -> float:
        """When a member of the batch last emitted."""
        return self.late.get(seq, self.emitted_s) if self.late else self.emitted_s

    def left(self, seq: Sequence) -> float:
        """A member leaves the batch between steps; when it last emitted."""
        return self.late.pop(seq, self.emitted_s)

    def withhold(self, since_s: float) -> None:
        """Nobody hears of tokens made at `since_s` or later."""
        self._withheld_s = since_s

    def deliver(self, at_s: float) -> None:
        """The tokens that were withheld arrive: for what follows, that is when they were made."""
        since_s, self._withheld_s = self._withheld_s, None
        if since_s is None:
            return
        if self.emitted_s >= since_s:
            self.emitted_s = at_s
        self.late = {seq: at_s if last_s >= since_s else last_s for seq, last_s in self.late.items()}

    # ------------------------------------------------------------ rows

    def decode(
        self,
        step: StepPlan,
        epoch: Epoch,
        batch: DecodeBatch,
        pool: Counted,
        load: tuple[int, int],
        firsts: int = 0,
    ) -> None:
        """Decode steps; the first one after a stall gets a row of its own, with its longer gaps beside it.

        So does one in which `firsts` members make their first token, which ends no gap.
        """
        if self._write is None or not step.steps:
            return
        start_s, steps, skip = step.start_s, step.steps, 0
        if self.late or self.emitted_s != start_s or firsts:
            end_s = epoch.end_s(1)
            self._row(step, "step", start_s, end_s, 1, batch.ctx_tokens, pool, load, 0, (0.0, 0.0, 0.0))
            self._longer(end_s, batch.size - firsts)
            start_s, steps, skip = end_s, steps - 1, 1
            if not steps:
                return
        kind = "leap" if steps > 1 else "step"
        ctx_tokens = batch.ctx_tokens + skip * batch.size
        self._row(step, kind, start_s, step.end_s, steps, ctx_tokens, pool, load, batch.size, epoch.gaps(skip))

    def mixed(self, step: StepPlan, batch: DecodeBatch, pool: Counted, load: tuple[int, int]) -> None:
        """A step with prompt work; the standing batch emits too unless it stood still."""
        if self._write is None:
            return
        if step.exclusive or not batch.size:
            self._row(step, "step", step.start_s, step.end_s, 1, batch.ctx_tokens, pool, load, 0, (0.0, 0.0, 0.0))
        elif self.late or self.emitted_s != step.start_s:
            self._row(step, "step", step.start_s, step.end_s, 1, batch.ctx_tokens, pool, load, 0, (0.0, 0.0, 0.0))
            self._longer(step.end_s, batch.size)
        else:
            gap_s = step.end_s - step.start_s
            self._row(
                step, "step", step.start_s, step.end_s, 1, batch.ctx_tokens, pool, load, batch.size, (gap_s, 0.0, 0.0)
            )

    def literal(self, step: StepPlan, batch: DecodeBatch, pool: Counted, load: tuple[int, int]) -> None:
        """A step scheduled request by request; its gaps come one by one through `gaps`."""
        if self._write is not None and (step.chunks or step.decodes or step.preempted):
            self._row(step, "step", step.start_s, step.end_s, 1, batch.ctx_tokens, pool, load, 0, (0.0, 0.0, 0.0))

    def gaps(self, since_s: Iterable[float], end_s: float) -> None:
        """Single gaps that end now: one per entry of `since_s`."""
        if self._write is None or self._withheld_s is not None:
            return
        for last_s, count in Counter(since_s).items():
            gap = (self.worker_id, "gap", last_s, end_s, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, count, end_s - last_s, 0.0, 0.0)
            self._write(gap)

    def _longer(self, end_s: float, size: int) -> None:
        late = list(self.late.values())
        self.gaps([self.emitted_s] * (size - len(late)) + late, end_s)

    def _row(
        self,
        step: StepPlan,
        kind: str,
        start_s: float,
        end_s: float,
        steps: int,
        ctx_tokens: int,
        pool: Counted,
        load: tuple[int, int],
        gap_tokens: int,
        gaps: tuple[float, float, float],
    ) -> None:
        running, waiting = load
        if self._withheld_s is not None:
            gap_tokens, gaps = 0, (0.0, 0.0, 0.0)
        self._write(  # type: ignore[misc]
            (
                self.worker_id,
                kind,
                start_s,
                end_s,
                steps,
                step.decodes,
                ctx_tokens,
                step.chunks,
                step.prefill_tokens,
                running,
                waiting,
                pool.capacity - pool.free - pool.inactive,
                pool.inactive,
                step.preempted,
                gap_tokens,
                *gaps,
            )
        )
