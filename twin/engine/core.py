"""What every scheduler is built from, and what it does the same way: the standing batch, its pace, leaps over it.

A scheduler says which leaps are safe and what a step does to its books; nothing here decides who runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from policies.frozen import frozen
from twin.engine.batch import DecodeBatch
from twin.engine.epoch import Epoch
from twin.engine.leaping import Leaping
from twin.engine.plan import Look, StepPlan
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.engine.steplog import Row, StepLog
from twin.perf.protocol import DecodePiece, LatencyModel, PrefillChunk


@frozen
class EngineParts:
    """What an engine needs beside its settings: what steps cost, and who wants to hear of them.

    `record`, when given, takes one row per step or leap in the order of `reports.record.STEP_COLUMNS`. With `kv_events`
    the pool notes what becomes findable and what is lost; without `leap_past_evictions` leaps end before the latter.
    """

    latency: LatencyModel
    worker_id: int = 0
    record: Callable[[Row], None] | None = None
    kv_events: bool = False
    leap_past_evictions: bool = True


class CachePool(Protocol):
    """The KV blocks of one scheduler, as far as planning a leap needs to know them."""

    events: bool
    evictions: int
    capacity: int
    free: int
    inactive: int

    @property
    def active(self) -> int: ...

    @property
    def removed(self) -> object: ...

    def audit(self) -> None: ...


class EngineCore(Leaping):
    """One engine, or one rank of a group that waits for its slowest. The caller owns the clock: `submit`, then
    `plan(now)`, wait, `commit(plan)`, and again.
    """

    pool: CachePool
    _is_watchful = False  # whether anything but blocks and the ends of members bounds a leap

    def __init__(self, settings: EngineSettings, parts: EngineParts, *, newest_has_slot: bool = False) -> None:
        self.settings = settings
        self.latency = parts.latency
        self.worker_id = parts.worker_id
        self.batch = DecodeBatch(settings.block_size, newest_has_slot=newest_has_slot)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.activated: list[Sequence] = []
        self.preemptions = 0
        self._leap_past_evictions = parts.leap_past_evictions
        self._log = StepLog(parts.worker_id, parts.record)
        self._epoch = Epoch()
        self._order = 0
        self._is_shut = False  # nobody may begin a prompt in this step

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and not self.activated

    @property
    def decodes(self) -> bool:
        """Whether a step that began now would make tokens for somebody who has some."""
        return self.batch.size > 0 or any(seq.outputs for seq in self.running)

    def withhold(self, since_s: float) -> None:
        """Tokens made at `since_s` or later reach nobody until `deliver`."""
        self._log.withhold(since_s)

    def deliver(self, at_s: float) -> None:
        """The tokens that were withheld arrive now."""
        self._log.deliver(at_s)

    @property
    def loaded_blocks(self) -> int:
        """Blocks that came up from a lower tier so far."""
        return 0

    def load(self, step: StepPlan | None, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached blocks at `at_s`, within the planned `step`. Touches nothing."""
        pool = self.pool
        taken = freed = 0
        if step is not None and step.steps and not step.mixed and not step.literal:
            steps = 1
            if step.steps > 1:
                steps = self._epoch.steps_to(at_s, step.start_s, step.end_s, step.steps)
            taken = self.batch.crossings(steps)
            freed = max(0, taken - pool.free)
        running, waiting = self._queues()
        return running, waiting, pool.active + taken, pool.inactive - freed

    def look(self, step: StepPlan | None, at_s: float) -> Look:
        """The step of a planned `step` or leap that is under way behind `at_s`, and who waits. Touches nothing."""
        wall_s, ctx_tokens, decodes = 0.0, 0, 0
        if step is not None:
            wall_s, decodes = step.end_s - step.start_s, step.decodes
            if step.literal:
                ctx_tokens = sum(seq.length for seq in self.running if seq.outputs)
            elif not step.exclusive:
                ctx_tokens = self.batch.ctx_tokens
            if step.steps > 1:
                n = self._epoch.steps_to(at_s, step.start_s, step.end_s, step.steps)
                if n < step.steps and self._epoch.end_s(n) <= at_s:
                    n += 1
                began_s = step.start_s if n == 1 else self._epoch.end_s(n - 1)
                wall_s = self._epoch.end_s(n) - began_s
                ctx_tokens += (n - 1) * self.batch.size
        prompts: list[Sequence] = []
        paused = [*self.activated]
        for seq in self.waiting:
            (paused if seq.outputs else prompts).append(seq)
        return Look(
            wall_s=wall_s,
            prefills=0 if step is None else step.chunks,
            prefill_tokens=0 if step is None else step.prefill_tokens,
            decodes=decodes,
            ctx_tokens=ctx_tokens,
            queued=len(prompts),
            queued_tokens=sum(seq.prompt for seq in prompts),
            paused=len(paused),
            paused_tokens=sum(seq.length for seq in paused),
        )

    def _queues(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.running), len(self.waiting)

    # ------------------------------------------------------------ plan

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step or leap and take what it needs; None when there is nothing to do.

        Raises EngineError when requests are open and none of them can ever proceed.
        """
        step = self._plan(now_s)
        if step is not None:
            step.waiting = len(self.waiting) + len(self.activated)
        return step

    def _plan(self, now_s: float) -> StepPlan | None:
        raise NotImplementedError

    def _undisturbed(self, step: StepPlan, steps: int) -> int:
        """For how many of `steps` decode steps, from 1, nothing but blocks could get in the way (asked if watchful)."""
        return steps

    def _plan_batch(self, step: StepPlan) -> None:
        """Nothing but decode steps of the batch, in the epoch under way or a new one."""
        batch, epoch = self.batch, self._epoch
        piece = epoch.piece
        if piece is None or epoch.done >= piece.steps:
            epoch.begin(self.latency.decode_piece(batch.size, batch.ctx_tokens), step.start_s)
        self._stretch(step)

    def _stretch(self, step: StepPlan) -> None:
        """Make a decode plan as long as is certain, or one step when leaping is off."""
        batch, pool, epoch, piece = self.batch, self.pool, self._epoch, self._epoch.piece
        steps = 1
        step.decodes = batch.size
        step.evict_s = None
        if self.settings.leap and piece is not None:
            steps = batch.next_finish()
            if piece.steps - epoch.done < steps:
                steps = piece.steps - epoch.done
            if self._is_watchful:
                steps = self._undisturbed(step, steps)
            steps = batch.steps_within(steps, pool.free + pool.inactive)
            if pool.events and steps > 1:
                until = 1 if pool.removed else batch.steps_within(steps, pool.free) + 1
                if until < steps:
                    if self._leap_past_evictions:
                        step.evict_s = epoch.end_s(until)
                    else:
                        steps = until
        step.steps = steps
        step.end_s = epoch.end_s(steps)

    def blocks_s(self, lo: int, hi: int) -> float:
        """What blocks `lo..hi` of a prompt take to compute when everything before them is there."""
        if hi <= lo:
            return 0.0
        size = self.settings.block_size
        return self.latency.step_s((PrefillChunk((hi - lo) * size, lo * size, 0, False),), 0, 0, 0, 0)

    # ------------------------------------------------------------ one rank of a group that waits for its slowest

    def shut(self, shut: bool) -> None:
        """Whether nobody may begin a prompt in the next step."""
        self._is_shut = shut

    def own_pace(self) -> DecodePiece:
        """What the steps of this batch would last from here on if nobody else had to be waited for."""
        return self.latency.decode_piece(self.batch.size, self.batch.ctx_tokens)

    def pace(self) -> DecodePiece | None:
        """The step times that were last set, where they still hold for the batch."""
        piece = self._epoch.piece
        return piece if piece is not None and self._epoch.done < piece.steps else None

    def set_pace(self, step: StepPlan | None, piece: DecodePiece | None) -> None:
        """The decode steps from the start of `step` on last what `piece` says; without one, ask again."""
        if piece is None or step is None:
            self._epoch.piece = None
        else:
            self._epoch.begin(piece, step.start_s)
            self._stretch(step)

    def shorten(self, step: StepPlan, steps: int) -> None:
        """Cut a decode plan to its first `steps` steps."""
        step.steps = steps
        step.end_s = self._epoch.end_s(steps)
        if step.evict_s is not None and step.evict_s >= step.end_s:
            step.evict_s = None

    def emitted_at(self, at_s: float) -> bool:
        """Whether every member of the decode batch made a token at `at_s`."""
        return not self._log.late and self._log.emitted_s == at_s
