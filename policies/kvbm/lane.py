"""One lane from a tier to the next: candidates become batches, batches go one after another.

A batch is released when it is full, when it is large enough and the lane is idle, when the timer of its first member
is due, or when all is flushed. The lane owns no clock: it is told the time, and says when it is due next.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import NamedTuple

from policies.cluster.blocks import BlockRun
from policies.errors import ConfigError
from policies.frozen import frozen


@frozen
class BatchRules:
    """Sizes in blocks. `at_once` batches of a lane may be under way together; `queue_blocks` is the most that may wait
    to be released (None: no limit); beyond it the lowest priority is dropped."""

    max_blocks: int = 64
    min_blocks: int = 8
    flush_s: float = 0.010
    at_once: int = 1
    queue_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_blocks <= self.max_blocks or self.at_once < 1 or self.flush_s < 0:
            raise ConfigError(
                f"batches of {self.min_blocks} to {self.max_blocks} blocks, {self.at_once} at once, flushed after "
                f"{self.flush_s} s; sizes must ascend from 1, at least one must go, and no time is below 0"
            )


class Waiting(NamedTuple):
    """Blocks that wait for a batch, in order of (priority, arrival). `staged`: they have left the tier above, their
    bytes are kept aside for this move."""

    priority: int
    seq: int
    run: BlockRun
    staged: bool


class Batch(NamedTuple):
    """Blocks that move together; `why` it was released: full, idle, timer or flush."""

    released_s: float
    parts: tuple[Waiting, ...]
    why: str

    @property
    def blocks(self) -> int:
        return sum(part.run.hi - part.run.lo for part in self.parts)


class Lane:
    """Candidates in, batches out. `dropped_blocks` counts what did not fit into the queue."""

    __slots__ = ("_first_s", "_pending", "_released", "_running", "_seq", "blocks", "dropped_blocks", "rules")

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.blocks = 0  # that wait to be released
        self.dropped_blocks = 0
        self._pending: list[Waiting] = []
        self._first_s: float | None = None  # when the first of them came
        self._released: deque[Batch] = deque()
        self._running = 0
        self._seq = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, nor released to be."""
        return not self._running and not self._released

    @property
    def empty(self) -> bool:
        """Whether nothing is here at all."""
        return self.idle and not self._pending

    @property
    def queued_blocks(self) -> int:
        """Blocks that are here and not under way."""
        return self.blocks + sum(batch.blocks for batch in self._released)

    @property
    def due_s(self) -> float | None:
        """When the timer of what waits is due."""
        return None if self._first_s is None else self._first_s + self.rules.flush_s

    def offer(self, now_s: float, run: BlockRun, *, priority: int = 0, staged: bool = False) -> list[BlockRun]:
        """Blocks want to move; a timer that is due goes first. Returns what was dropped because the queue is full."""
        self.poll(now_s)
        if self._first_s is None:
            self._first_s = now_s
        insort(self._pending, Waiting(priority, self._seq, run, staged), key=_rank)
        self._seq += 1
        self.blocks += run.hi - run.lo
        dropped = self._shed()
        self._release_full(now_s)
        return dropped

    def flush(self, now_s: float) -> None:
        """Release everything that waits, now."""
        self.poll(now_s)
        while self._pending:
            self._release(now_s, "flush")

    def poll(self, now_s: float) -> None:
        """Release what is due by now."""
        due_s = self.due_s
        while due_s is not None and due_s <= now_s:
            self._release(due_s, "timer")
            due_s = self.due_s
        self._release_idle(now_s)

    def withdraw(self, run: BlockRun) -> int:
        """Nobody wants these blocks moved any more; returns how many of them had not been released."""
        branch, lo, hi = run
        kept, taken = [], 0
        for part in self._pending:
            other, a, b = part.run
            if other is not branch or b <= lo or a >= hi:
                kept.append(part)
                continue
            taken += min(b, hi) - max(a, lo)
            kept += [part._replace(run=BlockRun(branch, c, d)) for c, d in ((a, lo), (hi, b)) if c < d]
        self._pending = kept
        self.blocks -= taken
        if not kept:
            self._first_s = None
        return taken

    def clear(self) -> list[BlockRun]:
        """Nothing that is here and not under way will move; returns what that was."""
        parts = [*self._pending, *(part for batch in self._released for part in batch.parts)]
        self._pending.clear()
        self._released.clear()
        self.blocks, self._first_s = 0, None
        return [part.run for part in parts]

    def start(self) -> Batch | None:
        """The next batch, if it may be under way now; it counts as running until `done`."""
        if not self._released or self._running >= self.rules.at_once:
            return None
        self._running += 1
        return self._released.popleft()

    def done(self, now_s: float) -> None:
        """A batch is over, or came to nothing."""
        self._running -= 1
        self.poll(now_s)

    # ------------------------------------------------------------ inside

    def _release_full(self, now_s: float) -> None:
        while self.blocks >= self.rules.max_blocks:
            self._release(now_s, "full")
        self._release_idle(now_s)

    def _release_idle(self, now_s: float) -> None:
        if self.blocks >= self.rules.min_blocks and self.idle:
            self._release(now_s, "idle")

    def _release(self, now_s: float, why: str) -> None:
        room = self.rules.max_blocks
        parts: list[Waiting] = []
        pending = self._pending
        taken = 0
        while taken < len(pending) and room:
            part = pending[taken]
            branch, lo, hi = part.run
            if hi - lo > room:
                parts.append(part._replace(run=BlockRun(branch, lo, lo + room)))
                pending[taken] = part._replace(run=BlockRun(branch, lo + room, hi))
                room = 0
            else:
                parts.append(part)
                room -= hi - lo
                taken += 1
        del pending[:taken]
        batch = Batch(now_s, tuple(parts), why)
        self.blocks -= batch.blocks
        self._first_s = now_s if pending else None
        self._released.append(batch)

    def _shed(self) -> list[BlockRun]:
        limit = self.rules.queue_blocks
        dropped = []
        while limit is not None and self.blocks > limit:
            last = self._pending.pop()
            branch, lo, hi = last.run
            over = min(self.blocks - limit, hi - lo)
            if over < hi - lo:
                self._pending.append(last._replace(run=BlockRun(branch, lo, hi - over)))
            dropped.append(BlockRun(branch, hi - over, hi))
            self.blocks -= over
            self.dropped_blocks += over
        return dropped


def _rank(part: Waiting) -> tuple[int, int]:
    return part.priority, part.seq
