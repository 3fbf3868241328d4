"""The vLLM scheduler: token budget, running first, FCFS waiting, chunked prefill, preemption with recompute.

A step is planned (blocks taken, hits pinned, time known) and later committed (tokens out, blocks back). While the batch
cannot change, decode steps are leapt: one plan covers many steps and `truncate` cuts it when something arrives. Leaping
changes no result. Rules and their evidence: docs/parity.md.
"""

from __future__ import annotations

from collections import deque

from policies.cluster.ids import Leg
from policies.errors import EngineError
from twin.engine.core import EngineCore, EngineParts
from twin.engine.ledger import Ledger
from twin.engine.plan import Outcome, StepPlan
from twin.engine.pool import BlockPool, Match
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.ticks import instant
from twin.perf.protocol import PrefillChunk


class VllmEngine(EngineCore):
    """One vLLM replica."""

    pool: BlockPool

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        self.pool = BlockPool(settings.blocks, events=parts.kv_events)
        self.ledger = Ledger(self.pool, settings.block_size, caching=settings.prefix_caching)
        self._holds_back: bool | None = None  # None: no such rule here
        self._partial: Sequence | None = None  # the one running request whose prompt is not complete
        self._blocked = False  # the head of waiting cannot enter until the batch changes
        self._literally = False  # running holds more than a decode batch and one partial prefill at its end
        self._whole = not settings.chunked_prefill or settings.exclusive_prefill  # a prompt is one step's work
        self._first_decodes = False  # whoever makes a first token pays for a decode too (speculative.py)

    # ------------------------------------------------------------ requests in and out

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request; returns the reason when it can never run here (it is then not queued)."""
        limits = self.settings
        needed = -(-seq.prompt // limits.block_size)
        if needed > limits.blocks:
            return (
                f"prompt of {seq.prompt} tokens needs {needed} KV blocks of {limits.block_size}, "
                f"the pool has {limits.blocks}"
            )
        if limits.max_model_len is not None:
            if seq.prompt >= limits.max_model_len:
                return f"prompt of {seq.prompt} tokens reaches max_model_len {limits.max_model_len}"
            seq.outputs_limit = min(seq.outputs_limit, limits.max_model_len - seq.prompt)
        if self._whole and seq.prompt > limits.max_num_batched_tokens:
            return (
                f"prompt of {seq.prompt} tokens exceeds max_num_batched_tokens {limits.max_num_batched_tokens}, "
                f"and a prompt is computed whole ({self._why_whole()})"
            )
        if not self.waiting:
            self._blocked = False
        self.waiting.append(seq)
        return None

    def cancel(self, seq: Sequence) -> None:
        """Forget a request, whatever its state, and free its blocks. Between steps only."""
        match seq.phase:
            case Phase.WAITING:
                self.waiting.remove(seq)
            case Phase.ACTIVATED:
                (self.activated if seq in self.activated else self.waiting).remove(seq)
                self.ledger.release(seq)
            case Phase.PREFILL | Phase.DECODE:
                if seq.phase is Phase.DECODE:
                    seq.last_token_s = self._log.left(seq)
                    self.batch.leave(seq)
                if seq is self._partial:
                    self._partial = None
                del self.running[seq]
                self.ledger.release(seq)
                self._epoch.piece = None
            case Phase.HELD | Phase.RESERVED:
                self.ledger.release(seq)
            case Phase.DONE:
                return
        seq.phase = Phase.DONE
        self._blocked = False

    def made(self, seq: Sequence) -> tuple[int, float | None]:
        """Tokens that a request has made, as far as steps are accounted for, and when it made the last of them."""
        if seq.phase is not Phase.DECODE:
            return seq.outputs, seq.last_token_s
        return self.batch.length(seq) - seq.prompt, self._log.last_token_s(seq)

    # ------------------------------------------------------------ hand-off

    def release(self, seq: Sequence) -> None:
        """Source side: a held prompt has been fetched, or given up."""
        self.ledger.release(seq)
        seq.phase = Phase.DONE
        self._blocked = False

    def reserve(self, seq: Sequence) -> bool:
        """Destination side: room for a whole prompt, while a slot is free, preempting nobody."""
        if len(self.running) >= self.settings.max_num_seqs or not self.ledger.reserve(seq):
            return False
        seq.phase = Phase.RESERVED
        return True

    def activate(self, seq: Sequence) -> bool:
        """Destination side: the prompt is here; it runs with the next step, in the order of asking for room."""
        self.ledger.arrived(seq)
        seq.phase = Phase.ACTIVATED
        self._insert_as_asked(self.activated if self._holds_back is None else self.waiting, seq)
        self._blocked = False
        return False

    @staticmethod
    def _insert_as_asked(queue: list[Sequence] | deque[Sequence], seq: Sequence) -> None:
        """Give a sequence its place by the order in which they asked for room."""
        at = len(queue)
        while at and queue[at - 1].asked > seq.asked:
            at -= 1
        queue.insert(at, seq)

    def hold_back(self, hold: bool) -> None:
        """The reference's rule: one queue in order of asking for room, which preempted requests lead, and which they
        may not leave while others wait for room (`hold`)."""
        if hold is not self._holds_back:
            self._holds_back = hold
            self._blocked = False

    def audit(self) -> None:
        """Recount the blocks of the pool; raises InvariantError where a count is off."""
        self.pool.audit()

    @property
    def head_is_blocked(self) -> bool:
        """Whether whoever waits cannot enter before the batch changes, so that a newcomer behind changes nothing."""
        return self._blocked and len(self.waiting) > 1

    # ------------------------------------------------------------ plan

    def _plan(self, now_s: float) -> StepPlan | None:
        step = StepPlan(now_s)
        if (
            self._partial is not None
            or (self.waiting and not self._blocked)
            or (self.activated and self._slot_is_free())
        ):
            if self.settings.exclusive_prefill and not self._has_arrived():
                self._plan_exclusive(step)
            elif self._is_short():
                return self._plan_literal(step)
            else:
                self._plan_mixed(step)
            if step.mixed:
                return step
        elif self._literally:
            return self._plan_literal(step)
        if self.batch.size:
            return self._plan_decode(step)
        return self._plan_stuck(step) if self.waiting else None

    def _slot_is_free(self) -> bool:
        """Whether one more may run."""
        return len(self.running) < self.settings.max_num_seqs

    def _has_arrived(self) -> bool:
        """Whether somebody whose prompt came from elsewhere is next to enter the batch."""
        if self._holds_back is None:
            return bool(self.activated)
        seq = self._next_as_asked()
        return seq is not None and seq.phase is Phase.ACTIVATED

    def _next_as_asked(self) -> Sequence | None:
        """Whose turn it is in the one queue; only those whose prompt has come while others wait for room."""
        free = (seq for seq in self.waiting if seq.phase is Phase.ACTIVATED or not self._holds_back)
        seq = next(free, None)
        if seq is None or self.running or seq.phase is Phase.ACTIVATED:
            return seq
        if self._admissible(seq, self.settings.max_num_batched_tokens) is None:
            # nothing runs that could make room for the head: whoever holds blocks already goes first
            return next((other for other in self.waiting if other.phase is Phase.ACTIVATED), seq)
        return seq

    def _is_short(self) -> bool:
        """Whether blocks or budget are too short to schedule the running requests as one."""
        if self._literally:
            return True
        batch = self.batch
        pool = self.pool
        room = pool.free + pool.inactive - batch.crossings(1)
        left = self.settings.max_num_batched_tokens - batch.size
        partial = self._partial
        if partial is not None and left > 0:
            want = min(partial.prompt + partial.outputs - partial.computed, left)
            room -= self.ledger.needed(partial, want)
        return room < 0 or left < 0

    def _plan_decode(self, step: StepPlan) -> StepPlan:
        """Nothing but decode steps: as many as are certain, or one when leaping is off."""
        batch, pool = self.batch, self.pool
        size, room = batch.size, pool.free + pool.inactive
        if size > self.settings.max_num_batched_tokens or (room < size and batch.crossings(1) > room):
            return self._plan_literal(step)
        self._plan_batch(step)
        return step

    def shut(self, shut: bool) -> None:
        if shut is not self._is_shut:
            self._is_shut = shut
            self._blocked = False

    def _advance(self, step: StepPlan) -> None:
        """Decode steps are over: blocks taken, rows written, totals moved on."""
        batch, log, steps = self.batch, self._log, step.steps
        need = batch.crossings(steps)
        if need:
            self.pool.take(need)
        log.decode(step, self._epoch, batch, self.pool, (len(self.running), step.waiting))
        self._epoch.done += steps
        batch.advance(steps)
        log.emitted(step.end_s)

    def _plan_mixed(self, step: StepPlan) -> None:
        """Decode batch, then the partial prefill, then admissions, when blocks suffice for all that run."""
        batch, pool = self.batch, self.pool
        left = self.settings.max_num_batched_tokens - batch.size
        work: list[tuple[Sequence, PrefillChunk]] = []
        crossing = batch.crossings(1)
        taken = False
        partial = self._partial
        if partial is not None and left > 0:
            pool.take(crossing)
            taken = True
            want = partial.prompt + partial.outputs - partial.computed
            if want > left:
                want = left
            left -= want
            work.append((partial, self.ledger.extend(partial, want)))
        if (self.waiting or self.activated) and left > 0:
            if crossing and not taken:
                pool.take(crossing)
                taken = True
            self._admit_all(step, work, left)
        if work:
            self._partial = None
            step.mixed = True
            self._price(step, work, batch.size, batch.ctx_tokens)
        else:
            self._blocked = True
            if taken:
                pool.free += crossing  # planned again, and taken at commit, as a decode step

    def _plan_exclusive(self, step: StepPlan) -> None:
        """One whole prompt, alone, when the head of waiting can be admitted."""
        if len(self.running) >= self.settings.max_num_seqs:
            self._blocked = True
            return
        seq = self.waiting[0]
        budget = self.settings.max_num_batched_tokens
        match = self._admissible(seq, budget)
        if match is None:
            self._blocked = True
            return
        chunk = self.ledger.extend(seq, self._admit(seq, match, budget, step.start_s))
        step.entering.append(seq)
        step.mixed = step.exclusive = True
        step.chunks, step.prefill_tokens = 1, chunk.new_tokens + chunk.recomputed_tokens
        if step.prefill_tokens == 1 and seq.outputs:  # all but the newest token is cached: a decode of one request
            took_s = self.latency.decode_piece(1, seq.length).g0
        else:
            took_s = self.latency.step_s((chunk,), 0, 0, 0, 0)
        step.end_s = instant(step.start_s + took_s)
        self._epoch.piece = None

    def _price(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], batch: int, ctx: int) -> None:
        """Sort the scheduled work into prompt work and decodes, and ask the latency model what the step takes.

        `batch` requests of total length `ctx` decode anyway. A recomputation that lacks one token is a decode.
        """
        chunks: list[PrefillChunk] = []
        resumed = resumed_ctx = tokens = 0
        for seq, chunk in work:
            new, _, again, _ = chunk
            length = seq.prompt + seq.outputs
            emits = seq.computed == length
            if new or again > 1 or not emits:
                chunks.append(chunk)
                tokens += new + again
                if emits and (seq.outputs or self._first_decodes):
                    resumed += 1
                    resumed_ctx += length
            else:
                batch += 1
                ctx += length
            if emits:
                step.entering.append(seq)
            else:
                self._partial = seq
        step.chunks = len(chunks)
        step.prefill_tokens = tokens
        if chunks:
            took_s = self.latency.step_s(chunks, batch, ctx, resumed, resumed_ctx)
        else:
            took_s = self.latency.decode_piece(batch, ctx).g0 if batch else 0.0
        step.end_s = instant(step.start_s + took_s)
        step.decodes = batch
        self._epoch.piece = None

    # ------------------------------------------------------------ admission

    def _admit_all(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], left: int) -> None:
        """Let in whom slots, blocks and the `left` tokens of the budget allow: prompts that came from elsewhere, then
        the head of waiting as long as it fits."""
        running, slots = self.running, self.settings.max_num_seqs
        if self._holds_back is not None:
            self._admit_as_asked(step, work, left)
            return
        while self.activated and len(running) < slots:
            left_after = self._take_in(self.activated[0], step, work, left)
            if left_after is None:
                break
            del self.activated[0]
            left = left_after
        waiting = self.waiting
        if self.settings.exclusive_prefill or self._is_shut:
            return
        while waiting and left > 0 and len(running) < slots:
            seq = waiting[0]
            match = self._admissible(seq, left)
            if match is None:
                break
            want = self._admit(seq, match, left, step.start_s)
            left -= want
            work.append((seq, self.ledger.extend(seq, want)))

    def _admit_as_asked(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], left: int) -> None:
        """One queue, strictly in order; while others wait for room only those whose prompt has come may leave it."""
        while len(self.running) < self.settings.max_num_seqs:
            seq = self._next_as_asked()
            if seq is None:
                return
            if seq.phase is Phase.ACTIVATED:
                left_after = self._take_in(seq, step, work, left)
                if left_after is None:
                    return
                self.waiting.remove(seq)
                left = left_after
                continue
            match = self._admissible(seq, left) if left > 0 and not self._is_shut else None
            if match is None:
                return
            want = self._admit(seq, match, left, step.start_s)
            left -= want
            work.append((seq, self.ledger.extend(seq, want)))

    def _take_in(
        self, seq: Sequence, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], left: int
    ) -> int | None:
        """Start a sequence whose prompt has come from elsewhere; the budget left, None if it does not fit."""
        want = seq.prompt + seq.outputs - seq.computed
        if want > left or self.ledger.needed(seq, want) > self.pool.free + self.pool.inactive:
            return None
        self._start(seq, step.start_s, seq.published * self.settings.block_size)
        work.append((seq, self.ledger.extend(seq, want)))
        return left - want

    def _admissible(self, seq: Sequence, left: int) -> Match | None:
        """The cached prefix to start from when the head of waiting fits now, else None. Touches nothing."""
        match = self.ledger.prefix(seq)
        if not self.ledger.fits(seq, match):
            return None
        settings = self.settings
        if self._whole and seq.prompt + seq.outputs - match.blocks * settings.block_size > left:
            return None
        return match

    def _admit(self, seq: Sequence, match: Match, left: int, now_s: float) -> int:
        """Move the head of waiting to running with its hits; returns how many tokens it computes in this step."""
        self.waiting.popleft()
        hit_tokens = self.ledger.start(seq, match)
        self._start(seq, now_s, hit_tokens)
        want = seq.prompt + seq.outputs - hit_tokens
        return want if want < left else left

    def _start(self, seq: Sequence, now_s: float, hit_tokens: int) -> None:
        """Put a sequence at the end of running."""
        seq.let_in(now_s, hit_tokens)
        self._order += 1
        seq.order = self._order
        seq.phase = Phase.PREFILL
        self.running[seq] = None

    # ------------------------------------------------------------ the literal step

    def _plan_literal(self, step: StepPlan) -> StepPlan:
        """A step request by request, as the rules are written: blocks or budget are short (engine section 5.1)."""
        settings, pool = self.settings, self.pool
        self._dissolve()
        step.literal = True
        budget = settings.max_num_batched_tokens
        running = list(self.running)
        scheduled: dict[Sequence, PrefillChunk] = {}
        i = 0
        while i < len(running) and budget > 0:
            seq = running[i]
            length = seq.prompt + seq.outputs
            want = min(length - seq.computed, budget)
            if self._whole and seq.computed < seq.prompt and length - seq.computed > budget:
                break
            need = self.ledger.needed(seq, want)
            if seq.owned + need > settings.blocks:
                self._give_up(seq, running, step)
                continue
            while need > pool.free + pool.inactive:
                at = len(running) - 1 if settings.preemption == "lifo" else 0
                victim = running.pop(at)
                gone = scheduled.pop(victim, None)
                if gone is not None:
                    budget += gone.new_tokens + gone.recomputed_tokens
                self._preempt(victim, step)
                if victim is seq:
                    break
                if at < i and not settings.fifo_skip:
                    i -= 1
            if seq.phase is Phase.WAITING:
                continue
            scheduled[seq] = self.ledger.extend(seq, want)
            budget -= want
            i += 1
        work = list(scheduled.items())
        if not step.preempted and (not settings.exclusive_prefill or self._has_arrived()):
            self._admit_all(step, work, budget)
        if not work and not step.preempted and not step.failed:
            raise EngineError(self._stuck())
        self._price(step, work, 0, 0)
        self._partial = None
        return step

    def _dissolve(self) -> None:
        """Give every running request its own state back, for a literal step."""
        for seq in self.running:
            if seq.phase is Phase.DECODE:
                seq.last_token_s = self._log.last_token_s(seq)
        self.batch.dissolve(list(self.running))
        self._partial = None
        self._epoch.piece = None

    def _preempt(self, victim: Sequence, step: StepPlan) -> None:
        del self.running[victim]
        self.ledger.release(victim)
        victim.phase = Phase.WAITING
        self.waiting.appendleft(victim)
        step.preempted += 1
        self.preemptions += 1

    def _give_up(self, seq: Sequence, running: list[Sequence], step: StepPlan) -> None:
        """End a request that has outgrown the whole pool: preempting it would go on for ever."""
        settings = self.settings
        seq.finish_reason = (
            f"kv pool exhausted: {seq.length} tokens need {-(-seq.length // settings.block_size)} KV blocks of "
            f"{settings.block_size}, the pool has {settings.blocks}"
        )
        if settings.abort_when_stuck:
            raise EngineError(f"request {seq.request_id!r}: {seq.finish_reason}")
        running.remove(seq)
        step.failed.append(seq)

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        """Nothing runs and the head of waiting cannot enter: if nobody holds blocks, it never will."""
        if self.pool.active or self.activated:
            return None  # blocks are held for a hand-off: their release changes that
        seq = self.waiting.popleft()
        self.running[seq] = None
        step.literal = True
        if self._whole and seq.length > self.settings.max_num_batched_tokens:
            seq.finish_reason = (
                f"{seq.length} tokens to compute again exceed max_num_batched_tokens "
                f"{self.settings.max_num_batched_tokens}, and a prompt is computed whole ({self._why_whole()})"
            )
            if self.settings.abort_when_stuck:
                raise EngineError(f"request {seq.request_id!r}: {seq.finish_reason}")
            step.failed.append(seq)
        else:
            self._give_up(seq, [seq], step)
        return step

    # ------------------------------------------------------------ commit

    def commit(self, step: StepPlan) -> Outcome:
        """The planned step is over: hand out its tokens, let the finished go, take the entering into the batch."""
        outcome = Outcome()
        end_s = step.end_s
        if step.literal:
            self._commit_literal(step, outcome)
            return outcome
        batch = self.batch
        if not step.mixed:
            self._advance(step)
        else:
            self._log.mixed(step, batch, self.pool, (len(self.running), step.waiting))
            if batch.size and not step.exclusive:
                batch.advance(1)
                self._log.emitted(end_s)
        if not step.exclusive:
            for seq in batch.pop_finished():
                self._complete(seq, end_s, outcome)
        for seq in step.entering:
            self._enter(seq, end_s, outcome)
        if step.entering or outcome.ended:
            self._epoch.piece = None
            self._blocked = False
            outcome.freed = bool(outcome.ended)
        return outcome

    def _enter(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        """A prompt (or a recomputation) is complete: one token, then the decode batch."""
        if seq.outputs:
            if seq.last_token_s is not None:
                self._log.gaps((seq.last_token_s,), end_s)
        elif seq.outputs_limit:
            seq.first_token_s = end_s
            if seq.leg is not Leg.PREFILL:
                outcome.firsts.append(seq)
        else:
            self._complete(seq, end_s, outcome)
            return
        seq.outputs += 1
        if seq.outputs >= seq.outputs_limit:
            self._complete(seq, end_s, outcome)
            return
        self._log.joined(seq, end_s, alone=not self.batch.size)
        self.batch.join(seq)

    def _complete(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        if seq.outputs:
            seq.last_token_s = end_s
        del self.running[seq]
        if seq.leg is Leg.PREFILL:
            seq.phase = Phase.HELD
            outcome.held.append(seq)
            return
        seq.phase = Phase.DONE
        self.ledger.release(seq)
        outcome.ended.append(seq)

    def _commit_literal(self, step: StepPlan, outcome: Outcome) -> None:
        end_s = step.end_s
        since_s: list[float] = []
        for seq in step.failed:
            seq.phase = Phase.DONE
            del self.running[seq]
            self.ledger.release(seq)
            outcome.ended.append(seq)
        for seq in step.entering:
            if not seq.outputs:
                if not seq.outputs_limit:
                    self._complete(seq, end_s, outcome)
                    continue
                seq.first_token_s = end_s
                if seq.leg is not Leg.PREFILL:
                    outcome.firsts.append(seq)
            elif seq.last_token_s is not None:
                since_s.append(seq.last_token_s)
            made = self._emit(seq)
            if made > 1:
                since_s += [end_s] * (made - 1)
            seq.last_token_s = end_s
            if seq.outputs >= seq.outputs_limit:
                self._complete(seq, end_s, outcome)
        self._reform(end_s)
        self._blocked = False
        outcome.freed = bool(outcome.ended or step.preempted)
        self._log.literal(step, self.batch, self.pool, (len(self.running), step.waiting))
        self._log.gaps(since_s, end_s)

    def _emit(self, seq: Sequence) -> int:
        """Tokens that a request makes at the end of a step that was scheduled request by request; they are noted."""
        seq.outputs += 1
        return 1

    def _reform(self, end_s: float) -> None:
        """Build the decode batch anew after a literal step."""
        others = []
        self._log.emitted(end_s)
        for seq in self.running:
            if seq.outputs and seq.computed == seq.prompt + seq.outputs - 1:
                self._log.joined(seq, end_s if seq.last_token_s is None else seq.last_token_s, alone=False)
                self.batch.join(seq)
            else:
                others.append(seq)
        last = next(reversed(self.running)) if self.running else None
        self._partial = last if others == [last] else None
        self._literally = bool(others) and self._partial is None

    def _why_whole(self) -> str:
        return "exclusive_prefill is on" if self.settings.exclusive_prefill else "chunked_prefill is off"

    def _stuck(self) -> str:
        names = ", ".join(repr(seq.request_id) for seq in list(self.running)[:5] + list(self.waiting)[:5])
        counts = f"{len(self.running)} running and {len(self.waiting)} waiting"
        return f"engine {self.worker_id}: {counts} cannot proceed: {names}"
