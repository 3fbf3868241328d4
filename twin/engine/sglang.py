"""The SGLang scheduler: prompts first and alone, a radix cache, admission against a reserve, retraction.

A step is prompt work or decoding, never both. Who waits is let in while what running requests may still need, weighed
with a ratio that falls from step to step, leaves room; when that proves too bold, requests are retracted and computed
again. As with the vLLM engine, decode steps are leapt while nothing can change, and leaping changes no result. Rules
and their evidence: docs/engines/sglang.md.
"""

from __future__ import annotations

from policies.cluster.ids import Leg
from policies.errors import EngineError, InvariantError
from twin.engine.core import EngineCore, EngineParts
from twin.engine.plan import Outcome, StepPlan
from twin.engine.radix import RadixCache, Stamp
from twin.engine.radix_host import HostedLedger
from twin.engine.radix_ledger import RadixLedger
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import SglangSettings
from twin.engine.sglang_queue import PrefillQueue, Work
from twin.engine.ticks import instant
from twin.engine.token_ratio import TokenRatio
from twin.perf.protocol import PrefillChunk


class SglangEngine(EngineCore):
    """One SGLang replica, driven like `VllmEngine`."""

    _is_watchful = True

    settings: SglangSettings
    pool: RadixCache

    def __init__(self, settings: SglangSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts, newest_has_slot=True)
        self.pool = RadixCache(settings.blocks, events=parts.kv_events)
        self._hosted: HostedLedger | None = None  # what comes up from a plain host tier
        self.ledger = self._make_ledger()
        self._ratio = TokenRatio(settings.schedule_conservativeness)
        self._queue = self._make_queue()
        self._prefilled: list[Sequence] = []  # computed in the planned step
        self._silent: list[Sequence] = []  # members without a token yet, or with complete pages not in the tree
        self._shut = 0  # decode steps that let nobody in
        self._unseen: list[Sequence] = []  # they have come, and the scheduler has not looked
        self._since_look = settings.recv_interval  # decode steps; it looks after as many as the interval has
        self._holds_back = False

    def _make_ledger(self) -> RadixLedger:
        if self.settings.host is None:
            return RadixLedger(self.pool, self.batch, caching=self.settings.prefix_caching)
        self._hosted = HostedLedger(self.pool, self.batch, self.settings.host)
        return self._hosted

    def _make_queue(self) -> PrefillQueue:
        return PrefillQueue(self.settings, self.ledger, self._ratio, self.batch, self.waiting, self.running)

    # ------------------------------------------------------------ requests in and out

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request; returns the reason when it can never run here (it is then not queued)."""
        settings = self.settings
        room_tokens = settings.blocks * settings.block_size
        if self.ledger.whole(seq.prompt + 1) > room_tokens and not settings.abort_when_stuck:
            return f"prompt of {seq.prompt} tokens leaves no room for an output: the pool holds {room_tokens} tokens"
        if settings.max_model_len is not None:
            if seq.prompt >= settings.max_model_len:
                return f"prompt of {seq.prompt} tokens reaches max_model_len {settings.max_model_len}"
            seq.outputs_limit = min(seq.outputs_limit, settings.max_model_len - seq.prompt)
        if settings.recv_interval > 1:
            self._unseen.append(seq)
        else:
            self._queue.append(seq)
        return None

    def cancel(self, seq: Sequence) -> None:
        """Forget a request, whatever its state, and free its pages. Between steps only."""
        if seq.phase is Phase.DONE:
            return
        if seq.phase is Phase.DECODE:
            self._leave(seq)
        elif seq in self._unseen:
            self._unseen.remove(seq)
        elif seq.phase is Phase.WAITING:
            self._queue.remove(seq)
        elif seq.phase is Phase.ACTIVATED:
            self.activated.remove(seq)
        self._give_back(seq)
        seq.phase = Phase.DONE

    def made(self, seq: Sequence) -> tuple[int, float | None]:
        """Tokens that a request has made, as far as steps are accounted for, and when it made the last of them."""
        if seq.phase is not Phase.DECODE or seq in self._silent:
            return seq.outputs, seq.last_token_s
        return self.batch.length(seq) - seq.prompt, self._log.last_token_s(seq)

    @property
    def idle(self) -> bool:
        return not self._unseen and super().idle

    @property
    def head_is_blocked(self) -> bool:
        """Whether whoever waits cannot enter before the batch changes, so that a newcomer behind changes nothing."""
        return self.settings.schedule_policy == "fifo" and len(self.waiting) > 1 and not self._unseen

    @property
    def loaded_blocks(self) -> int:
        return 0 if self._hosted is None else self._hosted.host.loaded_blocks

    def _queues(self) -> tuple[int, int]:
        waiting = len(self.waiting) + len(self.activated) + len(self._unseen)
        return len(self.running) + len(self._prefilled), waiting

    # ------------------------------------------------------------ hand-off

    def release(self, seq: Sequence) -> None:
        """Source side: a held prompt has been fetched, or given up; only now others can find its last pages."""
        self.ledger.settle()
        self.ledger.publish_computed(seq)
        self._give_back(seq)
        seq.phase = Phase.DONE

    def reserve(self, seq: Sequence) -> bool:
        """Destination side: room for a whole prompt beside what is cached of it, retracting nobody."""
        if len(self.running) >= self.settings.max_num_seqs:
            return False
        ledger = self.ledger
        ledger.settle()
        pages = -(-(seq.prompt + seq.expected) // self.settings.block_size)
        if not ledger.begin(seq, seq.prompt, pages - ledger.cached(seq, seq.prompt)):
            return False
        seq.phase = Phase.RESERVED
        return True

    def activate(self, seq: Sequence) -> bool:
        """Destination side: the prompt is here; it runs with the next step, in the order of arrival.

        Returns whether pages that are in the cache by now came back.
        """
        self.ledger.settle()
        seq.computed = seq.prompt
        free = self.pool.free
        self.ledger.publish_computed(seq)
        seq.phase = Phase.ACTIVATED
        self.activated.append(seq)
        return self.pool.free > free

    def hold_back(self, hold: bool) -> None:
        """Whether retracted requests must stay out while others wait for room (a rule of the reference)."""
        self._holds_back = hold

    # ------------------------------------------------------------ plan

    def plan(self, now_s: float) -> StepPlan | None:
        step = super().plan(now_s)
        if step is not None:
            step.waiting += len(self._unseen)
        return step

    def _plan(self, now_s: float) -> StepPlan | None:
        step = StepPlan(now_s)
        self._queue.certain = 0
        if self._unseen and self._since_look == self.settings.recv_interval:
            self._look()
        if self.activated:
            self._take_in_activated(now_s)
        if self.waiting and not self._holds_back and not self._is_shut and not (self._shut and self.batch.size):
            work = self._queue.admit(now_s)
            if work:
                self._begin_prefill(step, work)
                return step
        if self.batch.size:
            return self._plan_decode(step)
        if self._unseen:  # an idle scheduler looks all the time
            self._look()
            return self._plan(now_s)
        return self._plan_stuck(step) if self.waiting and not self._holds_back else None

    def _look(self) -> None:
        """The scheduler sees who has come."""
        for seq in self._unseen:
            self._queue.append(seq)
        self._unseen.clear()
        self._since_look = 0

    def _take_in_activated(self, now_s: float) -> None:
        """Prompts that came from elsewhere go straight to the batch, as far as there are slots."""
        while self.activated and len(self.running) < self.settings.max_num_seqs:
            seq = self.activated.pop(0)
            seq.let_in(now_s, seq.published * self.settings.block_size)
            self._join(seq, now_s)

    def _begin_prefill(self, step: StepPlan, work: Work) -> None:
        """The step is prompt work alone; what is computed again on a decode worker may be free."""
        chunks = self._priced(work)
        self._prefilled = [seq for seq, _ in work]
        step.mixed = step.exclusive = True
        step.chunks = len(chunks)
        step.prefill_tokens = sum(chunk.new_tokens for chunk in chunks)
        took_s = self._took_s(chunks)
        step.end_s = instant(step.start_s + took_s)
        if self._hosted is not None:
            step.end_s = self._hosted.ends_s(step.start_s, took_s)
        self._shut = self.settings.prefill_decode_interval
        self._since_look = self.settings.recv_interval  # it looks behind a prompt step, whatever came before
        self._epoch.piece = None

    def _priced(self, work: Work) -> list[PrefillChunk]:
        """What of a step's work takes time."""
        free = self.settings.free_recompute
        return [chunk for seq, chunk in work if not (free and seq.leg is Leg.DECODE)]

    def _took_s(self, chunks: list[PrefillChunk]) -> float:
        return self.latency.step_s(chunks, 0, 0, 0, 0) if chunks else 0.0

    # ------------------------------------------------------------ decode

    def _plan_decode(self, step: StepPlan) -> StepPlan | None:
        """Decode steps: as many as are certain, or one when leaping is off or somebody had to be retracted."""
        if self._growth() > self.pool.room and not self._retract(step):
            return self._plan_outgrown(step)
        self._plan_batch(step)
        return step

    def _growth(self) -> int:
        """Pages that the next step takes."""
        return self.batch.crossings(1)

    def _undisturbed(self, step: StepPlan, steps: int) -> int:
        """For how many of `steps` decode steps nobody who waits can enter, nor their order change."""
        if step.preempted or self._silent:
            return 1
        if self._unseen:
            steps = min(steps, self.settings.recv_interval - self._since_look)
        if not self.waiting or self._holds_back or self._is_shut:
            return steps
        if self._shut:
            return min(steps, self._shut)
        if self._queue.is_sorted:
            steps = max(1, self.batch.steps_within(steps, self.pool.free))
        if len(self.running) < self.settings.max_num_seqs:
            steps = min(steps, max(self._queue.certain, 1))
        return steps

    def _retract(self, step: StepPlan) -> bool:
        """Send back those with the fewest tokens made until the others can grow; False where one alone cannot."""
        batch = self.batch
        while self._growth() > self.pool.room and batch.size > 1:
            victim = self._victim()
            self._leave(victim)
            self._give_back(victim)
            victim.phase = Phase.WAITING
            self._queue.append(victim)
            step.preempted += 1
            self.preemptions += 1
        if self._growth() > self.pool.room:
            return False
        made = sum(batch.length(seq) - seq.prompt for seq in self.running)
        self._ratio.retracted(made, sum(seq.outputs_limit for seq in self.running), batch.size)
        return True

    def _victim(self) -> Sequence:
        """Who has the fewest tokens made; the first of them in running order."""
        batch = self.batch
        return min(self.running, key=lambda seq: batch.length(seq) - seq.prompt)

    def _plan_outgrown(self, step: StepPlan) -> StepPlan:
        """The last one that runs cannot make its next token: others let go, or it waits for that, or it ends."""
        step.literal = True
        if self._restart_begun(self._queue.begun(), step):
            return step
        seq = next(iter(self.running))
        self._leave(seq)
        self._give_back(seq)
        step.preempted += 1
        room_tokens = self.settings.blocks * self.settings.block_size
        if self.ledger.whole(seq.length + 1) > room_tokens:
            self._fail(seq, step, f"{seq.length} tokens and one more exceed the KV pool of {room_tokens} tokens")
        else:
            seq.phase = Phase.WAITING
            self._queue.append(seq)
            self.preemptions += 1
        return step

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        """Nothing runs and the head of waiting cannot enter. Waiting longer helps if somebody else holds pages."""
        self._ratio.sink()
        begun = self._queue.begun()
        if len(self.ledger.ends) > len(begun) or self.activated:
            return None  # held or reserved for a hand-off: what becomes of it changes that
        seq = self.waiting[0]
        step.literal = True
        if self._restart_begun([other for other in begun if other is not seq], step):
            return step
        self._queue.remove(seq)
        settings = self.settings
        reserve = min(seq.outputs_limit - seq.outputs, settings.clip_max_new_tokens)
        self._give_back(seq)
        room_tokens = settings.blocks * settings.block_size
        first = min(self.ledger.whole(seq.length), settings.chunked_prefill_size)
        if first > settings.max_prefill_tokens:
            why = f"a chunk of {first} tokens exceeds max_prefill_tokens {settings.max_prefill_tokens}"
        else:
            why = f"{seq.length} tokens and a reserve of {reserve} outputs exceed the KV pool of {room_tokens} tokens"
        self._fail(seq, step, why)
        return step

    def _restart_begun(self, begun: list[Sequence], step: StepPlan) -> int:
        """Prompts computed in part hold pages that somebody needs to go on: they start again."""
        for seq in begun:
            self._give_back(seq)
        step.preempted += len(begun)
        return len(begun)

    def _fail(self, seq: Sequence, step: StepPlan, reason: str) -> None:
        seq.finish_reason = f"can never go on: {reason}"
        if self.settings.abort_when_stuck:
            raise EngineError(f"request {seq.request_id!r}: {seq.finish_reason}")
        step.failed.append(seq)

    # ------------------------------------------------------------ leaps

    def _advance(self, step: StepPlan) -> None:
        """Decode steps are over: pages taken, rows written, totals moved on."""
        batch, steps = self.batch, step.steps
        need = batch.crossings(steps)
        if need and not self.pool.take(need):
            raise InvariantError(f"radix cache: {need} pages for decode steps, {self.pool.room} of them there")
        load = (len(self.running), step.waiting)
        firsts = sum(1 for seq in self._silent if seq.first_token_s is None)
        self._log.decode(step, self._epoch, batch, self.pool, load, firsts)
        self._epoch.done += steps
        batch.advance(steps)
        self._log.emitted(step.end_s)
        self._without_prompts(step, steps)

    def _without_prompts(self, step: StepPlan, steps: int) -> None:
        """So many steps without prompt work are over; one with a retraction does not lower the ratio."""
        if not step.preempted:
            self._ratio.decay(steps)
        self._shut = max(0, self._shut - steps)
        self._since_look = (self._since_look + steps - 1) % self.settings.recv_interval + 1

    # ------------------------------------------------------------ commit

    def commit(self, step: StepPlan) -> Outcome:
        """The planned step is over: hand out its tokens, let the finished go, take the entering into the batch."""
        outcome = Outcome()
        if step.literal:
            self._log.literal(step, self.batch, self.pool, (len(self.running), step.waiting))
            self._commit_literal(step, outcome)
        elif step.mixed:
            load = (len(self.running) + len(self._prefilled), step.waiting)
            self._log.mixed(step, self.batch, self.pool, load)
            self._commit_prefill(step, outcome)
        else:
            self._advance(step)
            self._commit_decode(step, outcome)
        outcome.freed = bool(outcome.ended or step.preempted)
        if outcome.freed:
            self._epoch.piece = None
        return outcome

    def _commit_literal(self, step: StepPlan, outcome: Outcome) -> None:
        """A step of no time: somebody can never go on, or has started again."""
        for seq in step.failed:
            seq.phase = Phase.DONE
            outcome.ended.append(seq)

    def _commit_prefill(self, step: StepPlan, outcome: Outcome) -> None:
        """Prompts in part go back to the front of waiting; those complete make a token and join the batch."""
        done, self._prefilled = self._prefilled, []
        if self._hosted is not None:
            self._hosted.came_up()
        self.ledger.settle()
        for seq in reversed(done):
            if seq.computed < seq.length:
                self.ledger.publish_computed(seq)
                seq.phase = Phase.WAITING
                self._queue.put_first(seq)
        for seq in done:
            if seq.phase is Phase.PREFILL:
                self._end_prompt(seq, step.end_s, outcome)

    def _end_prompt(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        size = self.settings.block_size
        left = seq.outputs_limit - seq.outputs
        if left > 1:
            page = 1 if seq.computed % size == 0 else 0
            if not self.pool.take(page):
                self._join(seq, end_s)  # it makes its token with the next decode step
                return
            seq.owned += page
            seq.computed += 1
        if left > 0:
            if not seq.outputs:
                self._first_token(seq, end_s, outcome)
            elif seq.last_token_s is not None:
                self._log.gaps((seq.last_token_s,), end_s)
            seq.outputs += 1
            seq.last_token_s = end_s
        if left > 1 or seq.leg is not Leg.PREFILL:
            self.ledger.publish_computed(seq)
        if left > 1:
            self._join(seq, end_s)
        else:
            self._complete(seq, outcome)

    def _commit_decode(self, step: StepPlan, outcome: Outcome) -> None:
        end_s = step.end_s
        silent, self._silent = self._silent, []
        done = self.batch.pop_finished()
        for seq in silent:
            if seq.first_token_s is None:
                self._first_token(seq, end_s, outcome)
        if not done:
            self.ledger.settle(silent)
            return
        ledger, now = self.ledger, self.batch.step
        ends = {(now, 0, seq.order): seq for seq in done}
        pending = [*done, *silent, *ledger.young] if silent or ledger.young else done
        for stamp, seq in sorted([*((ledger.last_page(seq), seq) for seq in pending), *ends.items()], key=_by_stamp):
            if seq in ledger.ends:
                ledger.publish_made(seq)
            if seq.phase is Phase.DECODE and ends.get(stamp) is seq:
                seq.last_token_s = end_s
                del self.running[seq]
                self._complete(seq, outcome)
        ledger.grow_up()

    def _first_token(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        seq.first_token_s = end_s
        if seq.leg is not Leg.PREFILL:
            outcome.firsts.append(seq)

    def _complete(self, seq: Sequence, outcome: Outcome) -> None:
        if seq.leg is Leg.PREFILL:
            seq.phase = Phase.HELD
            outcome.held.append(seq)
            return
        self._give_back(seq)
        seq.phase = Phase.DONE
        outcome.ended.append(seq)

    # ------------------------------------------------------------ the batch

    def _join(self, seq: Sequence, at_s: float) -> None:
        """Into the decode batch; `at_s` is when it has made a token, if it has."""
        self._order += 1
        seq.order = self._order
        self.running[seq] = None
        if seq.first_token_s is None:
            self._silent.append(seq)
        else:
            if seq.last_token_s is None:
                seq.last_token_s = at_s
            self._log.joined(seq, seq.last_token_s, alone=not self.batch.size)
            if seq.published < seq.computed // self.settings.block_size:
                self._silent.append(seq)
        self.batch.join(seq)
        self.ledger.joined(seq)
        self._epoch.piece = None

    def _leave(self, seq: Sequence) -> None:
        """Out of the batch between steps, with the tokens made so far."""
        self.ledger.settle()
        if seq.first_token_s is not None:
            seq.last_token_s = self._log.left(seq)
        self.batch.leave(seq)
        self.batch.forget(seq)
        self.ledger.left(seq)
        if seq in self._silent:
            self._silent.remove(seq)
        del self.running[seq]
        self._epoch.piece = None

    # ------------------------------------------------------------ pages

    def _give_back(self, seq: Sequence) -> None:
        """Let go of all pages; those in the tree stay there until they are evicted."""
        self.ledger.release(seq)

    def audit(self) -> None:
        """Recount the pages; raises InvariantError where a count is off."""
        self.ledger.audit()


def _by_stamp(item: tuple[Stamp, Sequence]) -> Stamp:
    return item[0]
