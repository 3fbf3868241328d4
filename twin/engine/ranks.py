"""Attention data parallelism: the ranks of one worker, each with its own scheduler and pool, in step with each other.

A step starts for all ranks together and ends at the slowest one; the tokens of every rank appear at that end. Requests
go to the rank that the router has chosen for them, the others to the ranks in turn. It looks like one engine from
outside and never moves a request between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from policies.cluster.blocks import BlockRun, Branch, merged_runs
from twin.engine.batch import DecodeBatch
from twin.engine.core import CachePool
from twin.engine.plan import Look, Outcome, StepPlan
from twin.engine.protocol import Engine
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.engine.steplog import Row
from twin.engine.ticks import instant
from twin.perf.pieces import steps_on_this_side
from twin.perf.protocol import DecodePiece, LatencyModel


class RankPool(CachePool, Protocol):
    """The pool of one rank, which can also say what it does not have."""

    stored: list[BlockRun]
    removed: list[BlockRun]

    def lacking(self, branch: Branch, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those blocks of the spans of a branch that are not in this pool."""
        ...

    def findable(self) -> list[BlockRun]:
        """What can be found and others can share, parents before children, each block once."""
        ...


class Rank(Engine, Protocol):
    """An engine whose pace somebody else can set; see `EngineCore`, which every scheduler inherits."""

    worker_id: int
    preemptions: int

    @property
    def waiting(self) -> Collection[Sequence]: ...

    @property
    def running(self) -> Collection[Sequence]: ...

    @property
    def pool(self) -> RankPool: ...

    @property
    def decodes(self) -> bool: ...

    def shut(self, shut: bool) -> None: ...

    def own_pace(self) -> DecodePiece: ...

    def pace(self) -> DecodePiece | None: ...

    def set_pace(self, step: StepPlan | None, piece: DecodePiece | None) -> None: ...

    def shorten(self, step: StepPlan, steps: int) -> None: ...

    def emitted_at(self, at_s: float) -> bool: ...


class RankedEngine:
    """Engines that share the beginning and the end of every step.

    `interval`: while a rank decodes, its new prompts start only in every so-many-th step of the group, unless its last
    chance left requests waiting. `balance_wait`: while every rank decodes, new prompts start only in a step for which
    there are some on every rank, or in every so-many-th; 0 is off. `record` takes one row per step of the group. Leaps
    cover the steps that are certain on every rank; step times inside are those of the slowest, so that leaping changes
    no instant.
    """

    def __init__(
        self,
        build: Callable[[Callable[[Row], None] | None], Rank],
        ranks: int,
        *,
        interval: int = 1,
        balance_wait: int = 0,
        record: Callable[[Row], None] | None = None,
    ) -> None:
        self._rows: list[tuple[int, Row]] = []
        self._write = record
        self.ranks = tuple(build(self._recorder(at) if record is not None else None) for at in range(ranks))
        self.pool = RankPools([rank.pool for rank in self.ranks])
        self._interval = interval
        self._steps = 0  # of the group, so far
        self._left_waiting = [False] * ranks
        self._balance_wait = balance_wait
        self._unbalanced = 0  # steps since the last in which prompts could start, balanced or not
        self._counts = False  # whether the planned steps are such steps
        self._turn = 0
        self.routed: Callable[[Sequence], int | None] = lambda seq: None  # the rank that a router has chosen, if any
        self._latest = 0
        self._rank_of: dict[Sequence, int] = {}
        self._in_pace: list[Rank] = []  # ranks that decoded together in the step that was planned last
        self._parts: list[StepPlan | None] = [None] * ranks  # of the step that was planned last

    # ------------------------------------------------------------ what it looks like

    @property
    def settings(self) -> EngineSettings:
        """Of one rank."""
        return self.ranks[0].settings

    @property
    def latency(self) -> LatencyModel:
        return self.ranks[0].latency

    @latency.setter
    def latency(self, latency: LatencyModel) -> None:
        for rank in self.ranks:
            rank.latency = latency

    @property
    def worker_id(self) -> int:
        return self.ranks[0].worker_id

    @property
    def preemptions(self) -> int:
        return sum(rank.preemptions for rank in self.ranks)

    @property
    def batch(self) -> DecodeBatch:
        """A rank's decode batch that is not empty, if there is one."""
        return next((rank.batch for rank in self.ranks if rank.batch.size), self.ranks[0].batch)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(seq for rank in self.ranks for seq in rank.waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(seq for rank in self.ranks for seq in rank.running)

    @property
    def idle(self) -> bool:
        return all(rank.idle for rank in self.ranks)

    @property
    def loaded_blocks(self) -> int:
        return sum(rank.loaded_blocks for rank in self.ranks)

    @property
    def head_is_blocked(self) -> bool:
        """Whether the request that came last waits behind one that cannot enter before its rank's batch changes."""
        return self.ranks[self._latest].head_is_blocked

    def load(self, step: StepPlan | None, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached blocks of all ranks at `at_s`. Touches nothing."""
        parts = self._parts
        loads = [rank.load(parts[at] if step is not None else None, at_s) for at, rank in enumerate(self.ranks)]
        running, waiting, active, cached = (sum(column) for column in zip(*loads, strict=True))
        return running, waiting, active, cached

    def look(self, step: StepPlan | None, at_s: float) -> Look:
        """What all ranks do together in the step that is under way behind `at_s`. Touches nothing."""
        parts = self._parts
        looks = [rank.look(parts[at] if step is not None else None, at_s) for at, rank in enumerate(self.ranks)]
        sums = [sum(column) for column in zip(*looks, strict=True)]
        return Look(max(one.wall_s for one in looks), *sums[1:])

    # ------------------------------------------------------------ requests in and out

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request on its rank; returns the reason when it can never run here."""
        at = self._rank_for(seq)
        refusal = self.ranks[at].submit(seq)
        if refusal is None:
            self._rank_of[seq] = self._latest = at
        return refusal

    def cancel(self, seq: Sequence) -> None:
        """Forget a request, whatever its state. Between steps only."""
        at = self._rank_of.pop(seq, None)
        if at is not None:
            self.ranks[at].cancel(seq)

    def made(self, seq: Sequence) -> tuple[int, float | None]:
        """Tokens that a request has made, as far as steps are accounted for, and when it made the last of them."""
        at = self._rank_of.get(seq)
        return self.ranks[at].made(seq) if at is not None else (seq.outputs, seq.last_token_s)

    def withhold(self, since_s: float) -> None:
        """Tokens made at `since_s` or later reach nobody until `deliver`."""
        for rank in self.ranks:
            rank.withhold(since_s)

    def deliver(self, at_s: float) -> None:
        """The tokens that were withheld arrive now."""
        for rank in self.ranks:
            rank.deliver(at_s)

    def release(self, seq: Sequence) -> None:
        """Source side of a hand-off: a held prompt has been fetched, or given up."""
        self.ranks[self._rank_of.pop(seq)].release(seq)

    def reserve(self, seq: Sequence) -> bool:
        """Destination side: room on the rank that the request got when it first asked."""
        at = self._rank_of.get(seq)
        if at is None:
            at = self._rank_of[seq] = self._rank_for(seq)
        return self.ranks[at].reserve(seq)

    def activate(self, seq: Sequence) -> bool:
        """Destination side: the prompt is here."""
        self._latest = self._rank_of[seq]
        return self.ranks[self._latest].activate(seq)

    def hold_back(self, hold: bool) -> None:
        """Whether preempted requests must stay out while others wait for room."""
        for rank in self.ranks:
            rank.hold_back(hold)

    def _rank_for(self, seq: Sequence) -> int:
        """Where the router wants a request; else the rank whose turn it is."""
        chosen = self.routed(seq)
        if chosen is not None:
            return chosen
        at = self._turn
        self._turn = (at + 1) % len(self.ranks)
        return at

    # ------------------------------------------------------------ steps

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step of every rank that has work, ended by the slowest; None when there is nothing to do."""
        ranks = self.ranks
        waits = self._balance_wait > 0 and self._waits_for_balance()
        shut = [waits or self._is_shut(at) for at in range(len(ranks))]
        decoding = [rank for rank in ranks if rank.batch.size]
        paces = [rank.pace() for rank in decoding]
        in_pace = decoding == self._in_pace and None not in paces
        for at, rank in enumerate(ranks):
            rank.shut(shut[at])
            if not in_pace:
                rank.set_pace(None, None)
            self._parts[at] = rank.plan(now_s)
        decoding = [rank for rank in ranks if rank.batch.size]  # planning can change a batch
        if in_pace:
            in_pace = decoding == self._in_pace and all(a.pace() is b for a, b in zip(decoding, paces, strict=True))
        if not self._planned():
            return None
        for at, rank in enumerate(ranks):
            if not shut[at]:
                self._left_waiting[at] = bool(rank.waiting)
        step = _group_plan(now_s, self._planned())
        if step.mixed or step.literal:
            self._wait_for_slowest(step)
        else:
            self._decode_together(step, in_pace=in_pace)
        self._in_pace = decoding
        return step

    def _waits_for_balance(self) -> bool:
        """Whether new prompts must wait for prompts on other ranks. Steps count whether or not anybody waits."""
        slots = self.settings.max_num_seqs
        is_balanced = all(rank.waiting and len(rank.running) < slots for rank in self.ranks)
        self._counts = not is_balanced and all(rank.decodes for rank in self.ranks)
        if not self._counts:
            self._unbalanced = 0
        return self._counts and self._unbalanced + 1 < self._balance_wait

    def _count(self, steps: int) -> None:
        """So many steps of the group are over."""
        self._steps += steps
        if self._counts:
            self._unbalanced = (self._unbalanced + steps) % self._balance_wait

    def _is_shut(self, at: int) -> bool:
        """Whether new prompts of a rank must wait for the group's next chance."""
        if not self._steps % self._interval or self._left_waiting[at]:
            return False
        return bool(self.ranks[at].running)

    def _wait_for_slowest(self, step: StepPlan) -> None:
        """A step with prompt work on some rank: the others make one decode step and wait."""
        now_s = end_s = step.start_s
        for rank, part in self._planned():
            if part.mixed or part.literal:
                end_s = max(end_s, part.end_s)
            else:
                end_s = max(end_s, instant(now_s + rank.own_pace().g0))
        step.end_s = end_s
        for rank, part in self._planned():
            if part.mixed or part.literal:
                part.end_s = end_s
            else:
                rank.set_pace(part, DecodePiece(end_s - now_s, 0.0, 0.0, 1))
                rank.shorten(part, 1)
                part.end_s = end_s

    def _decode_together(self, step: StepPlan, *, in_pace: bool) -> None:
        """Decode steps on every rank, as many as all are certain of."""
        if not in_pace:
            piece = slowest([rank.own_pace() for rank, _ in self._planned()])
            for rank, part in self._planned():
                rank.set_pace(part, piece)
        steps = min(part.steps for _, part in self._planned())
        if not all(rank.emitted_at(step.start_s) for rank, _ in self._planned()):
            steps = 1  # so that the rows of all ranks cover the same steps
        past = self._steps % self._interval
        if past and any(rank.waiting for rank in self.ranks):
            steps = min(steps, self._interval - past)
        if self._counts and any(rank.waiting for rank in self.ranks):
            steps = min(steps, max(1, self._balance_wait - 1 - self._unbalanced))
        for rank, part in self._planned():
            rank.shorten(part, steps)
        self._agree(step)

    def truncate(self, step: StepPlan, at_s: float) -> bool:
        """Shorten a planned leap to the step in which `at_s` falls; returns whether its end has moved."""
        moved = False
        if not (step.mixed or step.literal):
            for rank, part in self._planned():
                moved = rank.truncate(part, at_s)
            self._agree(step)
        return moved

    def settle(self, step: StepPlan, at_s: float) -> None:
        """Account for the steps of a planned leap that have ended by `at_s`; its end does not move."""
        if step.mixed or step.literal:
            return
        before = step.steps
        for rank, part in self._planned():
            rank.settle(part, at_s)
        self._agree(step)
        self._count(before - step.steps)
        self._record()

    def reprice(self, step: StepPlan | None, end_s: float | None = None) -> None:
        """Step times have changed: the next step of the group is priced anew."""
        if step is not None and end_s is not None:
            step.end_s = end_s
        for rank, part in zip(self.ranks, self._parts, strict=True):
            rank.reprice(part if step is not None else None, end_s)

    def commit(self, step: StepPlan) -> Outcome:
        """The planned step is over on every rank; outcomes in the order of ranks."""
        outcome = Outcome()
        for rank, part in self._planned():
            one = rank.commit(part)
            outcome.firsts += one.firsts
            outcome.held += one.held
            outcome.ended += one.ended
            outcome.freed |= one.freed
        for seq in outcome.ended:
            del self._rank_of[seq]
        self._count(step.steps)
        self._record()
        return outcome

    def _planned(self) -> list[tuple[Rank, StepPlan]]:
        return [(rank, part) for rank, part in zip(self.ranks, self._parts, strict=True) if part is not None]

    def _agree(self, step: StepPlan) -> None:
        """Take over what the parts of a decode plan have in common."""
        parts = [part for _, part in self._planned()]
        step.start_s, step.end_s = parts[0].start_s, parts[0].end_s
        step.steps, step.settled = parts[0].steps, parts[0].settled
        step.evict_s = min((part.evict_s for part in parts if part.evict_s is not None), default=None)

    # ------------------------------------------------------------ the record

    def _recorder(self, at: int) -> Callable[[Row], None]:
        return lambda row: self._rows.append((at, row))

    def _record(self) -> None:
        """Write the rows of the ranks as one of the group; a rank without a row counts with what it holds."""
        rows, self._rows = self._rows, []
        if self._write is None:
            return
        steps = [(at, row) for at, row in rows if row[1] != "gap"]
        if steps:
            self._write(self._merged(steps))
        for _, row in rows:
            if row[1] == "gap":
                self._write(row)

    def _merged(self, rows: list[tuple[int, Row]]) -> Row:
        """One row: load columns added up, and the gaps of those ranks whose gaps the row carries."""
        first = max((row for _, row in rows), key=lambda row: row[_GAP_TOKENS])
        sums = [sum(row[column] for _, row in rows) for column in range(_DECODES, _GAP_TOKENS + 1)]  # type: ignore[misc]
        there = {at for at, _ in rows}
        for at, rank in enumerate(self.ranks):
            if at not in there:
                for column, count in zip(range(_RUNNING, _RUNNING + 4), rank.load(None, 0.0), strict=True):
                    sums[column - _DECODES] += count
        return (*first[:_DECODES], *sums, *first[_GAP_TOKENS + 1 :])

    def audit(self) -> None:
        """Recount the blocks of every rank."""
        for rank in self.ranks:
            rank.audit()


def _group_plan(start_s: float, planned: list[tuple[Rank, StepPlan]]) -> StepPlan:
    """A step of the group with what its ranks' parts add up to."""
    step = StepPlan(start_s)
    for _, part in planned:
        step.mixed |= part.mixed
        step.literal |= part.literal
        step.chunks += part.chunks
        step.prefill_tokens += part.prefill_tokens
        step.decodes += part.decodes
        step.preempted += part.preempted
    return step


_DECODES, _RUNNING, _GAP_TOKENS = 5, 9, 14  # places in reports.record.STEP_COLUMNS


def slowest(pieces: list[DecodePiece]) -> DecodePiece:
    """The piece with the longest steps, cut where another one may overtake it or where any of them ends."""
    longest = max(pieces, key=lambda piece: (piece.g0, piece.g1, piece.g2))
    steps = min(piece.steps for piece in pieces)
    for piece in pieces:
        lead = longest.g0 - piece.g0, longest.g1 - piece.g1, longest.g2 - piece.g2
        if any(lead):
            steps = min(steps, steps_on_this_side(*lead))
    return DecodePiece(longest.g0, longest.g1, longest.g2, steps)


class RankPools:
    """The pools of all ranks as one, for those who count blocks or listen to KV events.

    A block counts as removed from the worker when no rank has it any more; unless they are told `apart`, each by
    `each`.
    """

    def __init__(self, pools: list[RankPool]) -> None:
        self._pools = pools
        self.apart = False

    @property
    def each(self) -> list[RankPool]:
        """The pools, by rank."""
        return self._pools

    @property
    def active(self) -> int:
        return sum(pool.active for pool in self._pools)

    @property
    def inactive(self) -> int:
        return sum(pool.inactive for pool in self._pools)

    @property
    def free(self) -> int:
        return sum(pool.free for pool in self._pools)

    @property
    def capacity(self) -> int:
        return sum(pool.capacity for pool in self._pools)

    @property
    def evictions(self) -> int:
        return sum(pool.evictions for pool in self._pools)

    @property
    def stored(self) -> list[BlockRun]:
        return [run for pool in self._pools for run in pool.stored]

    @stored.setter
    def stored(self, runs: list[BlockRun]) -> None:
        for pool in self._pools:
            pool.stored = []

    @property
    def removed(self) -> list[BlockRun]:
        if self.apart:
            return [run for pool in self._pools for run in pool.removed]
        removed: list[BlockRun] = []
        for at, pool in enumerate(self._pools):
            if pool.removed:
                others = self._pools[:at] + self._pools[at + 1 :]
                left: list[BlockRun] = []
                for run in pool.removed:
                    spans = [(run.lo, run.hi)]
                    for other in others:
                        spans = other.lacking(run.branch, spans)
                    left += [BlockRun(run.branch, lo, hi) for lo, hi in spans]
                pool.removed = left  # what another rank still has is not lost
                removed += left
        return removed

    @removed.setter
    def removed(self, runs: list[BlockRun]) -> None:
        for pool in self._pools:
            pool.removed = []

    def findable(self) -> list[BlockRun]:
        """What can be found on any rank and others can share, parents before children, each block once."""
        return merged_runs(run for pool in self._pools for run in pool.findable())

    def audit(self) -> None:
        for pool in self._pools:
            pool.audit()
