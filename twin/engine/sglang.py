"""The SGLang scheduler: prompts first and alone, a radix cache, admission against a reserve, retraction.

A step is prompt work or decoding, never both. Who waits is let in while what running requests may still need, weighed
with a ratio that falls from step to step, leaves room; when that proves too bold, requests are retracted and computed
again. As with the vLLM engine, decode steps are leapt while nothing can change, and leaping changes no result. A look
at the cache that lets nobody in leaves no trace. Rules and their evidence: docs/engines/sglang.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policies.cluster.ids import Leg
from policies.errors import EngineError, InvariantError
from twin.engine.batch import DecodeBatch
from twin.engine.epoch import Epoch
from twin.engine.leaping import Leaping
from twin.engine.plan import Outcome, StepPlan
from twin.engine.radix import Node, Pieces, RadixCache, Stamp
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.steplog import Row, StepLog
from twin.engine.ticks import instant
from twin.perf.protocol import LatencyModel, PrefillChunk

FIRST_RATIO = 0.7
"""Share of the outputs still to come that is kept free at first, times the conservativeness (SGLang's default)."""
LOWEST_SHARE = 0.14
"""The ratio falls to this share of the first one ..."""
DECAY_STEPS = 600
"""... in so many steps."""
RETRACT_AHEAD_TOKENS = 20
"""After a retraction, the ratio leaves every survivor room for so many tokens."""
LPM_LIMIT = 128
"""With more waiting than this, they are not sorted."""
SHORT_HIT_TOKENS = 32
"""Prompts with at most this much in the cache are compared with each other: of equals, the first goes ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(EngineSettings):
    """`schedule_policy` is "fifo" or "lpm" (longest cached prefix first). A prefill step computes at most
    `chunked_prefill_size` tokens and lets in at most `max_prefill_tokens`; after one, `prefill_decode_interval` decode
    steps let nobody in. Of a request's outputs still to come, `clip_max_new_tokens` count for admission.
    `free_recompute`: on a decode worker, computing again after a retraction takes no time (the reference's rule).
    """

    schedule_policy: str
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_conservativeness: float
    clip_max_new_tokens: int
    prefill_decode_interval: int
    free_recompute: bool = False


class SglangEngine(Leaping):
    """One SGLang replica, driven like `VllmEngine`: `submit`, then `plan(now)`, wait, `commit(plan)`, and again."""

    def __init__(
        self,
        settings: SglangSettings,
        latency: LatencyModel,
        *,
        worker_id: int = 0,
        record: Callable[[Row], None] | None = None,
        kv_events: bool = False,
        leap_past_evictions: bool = True,
    ) -> None:
        self.settings = settings
        self.latency = latency
        self.worker_id = worker_id
        self.pool: RadixCache = RadixCache(settings.blocks, events=kv_events)
        self.batch = DecodeBatch(settings.block_size, newest_has_slot=True)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.activated: list[Sequence] = []
        self.preemptions = 0
        self._leap_past_evictions = leap_past_evictions
        self._log = StepLog(worker_id, record)
        self._epoch = Epoch()
        self._ends: dict[Sequence, Node] = {}  # where the pages of a sequence that are in the tree end; locked
        self._prefilled: list[Sequence] = []  # computed in the planned step
        self._silent: list[Sequence] = []  # members without a token yet
        self._young: list[Sequence] = []  # members that have no page of their own in the tree yet
        self._first = FIRST_RATIO * settings.schedule_conservativeness
        self._lowest = self._first * LOWEST_SHARE
        self._base = self._first
        self._decays = 0
        self._shut = 0  # decode steps that let nobody in
        self._certain = 0  # decode steps for which whoever waits surely stays out; 0: no such bound
        self._sorted: tuple[int, int] | None = None  # cache version and queue changes at the last sort
        self._changes = 0
        self._holds_back = False
        self._order = 0
        self._tick = 0

    # ------------------------------------------------------------ requests in and out

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request; returns the reason when it can never run here (it is then not queued)."""
        settings = self.settings
        room_tokens = settings.blocks * settings.block_size
        if self._whole(seq.prompt + 1) > room_tokens and not settings.abort_when_stuck:
            return f"prompt of {seq.prompt} tokens leaves no room for an output: the pool holds {room_tokens} tokens"
        if settings.max_model_len is not None:
            if seq.prompt >= settings.max_model_len:
                return f"prompt of {seq.prompt} tokens reaches max_model_len {settings.max_model_len}"
            seq.outputs_limit = min(seq.outputs_limit, settings.max_model_len - seq.prompt)
        self.waiting.append(seq)
        self._changes += 1
        return None

    def cancel(self, seq: Sequence) -> None:
        """Forget a request, whatever its state, and free its pages. Between steps only."""
        if seq.phase is Phase.DONE:
            return
        if seq.phase is Phase.DECODE:
            self._leave(seq)
        elif seq.phase is Phase.WAITING:
            self.waiting.remove(seq)
            self._changes += 1
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
        return not self.running and not self.waiting and not self.activated

    @property
    def head_is_blocked(self) -> bool:
        """Whether whoever waits cannot enter before the batch changes, so that a newcomer behind changes nothing."""
        return self.settings.schedule_policy == "fifo" and len(self.waiting) > 1

    def load(self, step: StepPlan | None, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached pages at `at_s`, within the planned `step`. Touches nothing."""
        pool = self.pool
        taken = freed = 0
        if step is not None and not step.mixed and not step.literal:
            steps = 1
            if step.steps > 1:
                steps = self._epoch.steps_to(at_s, step.start_s, step.end_s, step.steps)
            taken = self.batch.crossings(steps)
            freed = max(0, taken - pool.free)
        running = len(self.running) + len(self._prefilled)
        return running, len(self.waiting) + len(self.activated), pool.active + taken, pool.inactive - freed

    # ------------------------------------------------------------ hand-off

    def release(self, seq: Sequence) -> None:
        """Source side: a held prompt has been fetched, or given up; only now others can find its last pages."""
        self._settle_young()
        self._publish(seq, seq.computed // self.settings.block_size, self._stamp())
        self._give_back(seq)
        seq.phase = Phase.DONE

    def reserve(self, seq: Sequence) -> bool:
        """Destination side: room for a whole prompt beside what is cached of it, retracting nobody."""
        if len(self.running) >= self.settings.max_num_seqs:
            return False
        self._settle_young()
        node, cached = self.pool.root, 0
        if self.settings.prefix_caching:
            node, cached = self.pool.match(seq.path.pieces, seq.path.blocks, self._stamp())
        pages = -(-seq.prompt // self.settings.block_size)
        self.pool.lock(node)
        if not self.pool.take(pages - cached):
            self.pool.unlock(node)
            return False
        self._ends[seq] = node
        seq.owned, seq.published = pages, cached
        seq.phase = Phase.RESERVED
        return True

    def activate(self, seq: Sequence) -> bool:
        """Destination side: the prompt is here; it runs with the next step, in the order of arrival.

        Returns whether pages that are in the cache by now came back.
        """
        self._settle_young()
        seq.computed = seq.prompt
        free = self.pool.free
        self._publish(seq, seq.prompt // self.settings.block_size, self._stamp())
        seq.phase = Phase.ACTIVATED
        self.activated.append(seq)
        return self.pool.free > free

    def hold_back(self, hold: bool) -> None:
        """Whether retracted requests must stay out while others wait for room (a rule of the reference)."""
        self._holds_back = hold

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
        step = StepPlan(now_s)
        self._certain = 0
        if self.activated:
            self._take_in_activated(now_s)
        if self.waiting and not self._holds_back and not (self._shut and self.batch.size):
            self._admit_all(step)
            if step.mixed:
                return step
        if self.batch.size:
            return self._plan_decode(step)
        return self._plan_stuck(step) if self.waiting and not self._holds_back else None

    def _take_in_activated(self, now_s: float) -> None:
        """Prompts that came from elsewhere go straight to the batch, as far as there are slots."""
        while self.activated and len(self.running) < self.settings.max_num_seqs:
            seq = self.activated.pop(0)
            self._admitted(seq, now_s, seq.published * self.settings.block_size)
            self._join(seq, now_s)

    # ------------------------------------------------------------ admission

    def _admit_all(self, step: StepPlan) -> None:
        """Let in who may enter; with anybody, the step is theirs alone."""
        settings, pool = self.settings, self.pool
        size = settings.block_size
        if settings.schedule_policy == "lpm" and len(self.waiting) <= LPM_LIMIT:
            self._sort()
        waiting = self.waiting
        slots = settings.max_num_seqs - len(self.running)
        if slots <= 0:
            return
        left_tokens = self._outputs_left()
        total = pool.room * size - left_tokens * self._ratio()
        budget, room = settings.max_prefill_tokens, settings.chunked_prefill_size
        chunks: list[PrefillChunk] = []
        while waiting and room > 0 and slots > 0:
            seq = waiting[0]
            length = seq.prompt + seq.outputs
            start = seq.computed if seq in self._ends else self._cached(seq, length - 1) * size
            ext = length - start
            take = ext if self._whole(ext) <= room else room // size * size
            charge = self._whole(take)
            reserve = min(seq.outputs_limit - seq.outputs, settings.clip_max_new_tokens) if take == ext else 0
            if not take or charge + reserve >= total or charge > budget or charge > room:
                if not self._prefilled and take:
                    self._keep_out(seq, charge + reserve - total, left_tokens, length, ext)
                break
            if not self._enter(seq, length, charge // size, step.start_s):
                break
            waiting.popleft()
            self._changes += 1
            slots -= 1
            total -= charge + reserve
            budget -= charge
            room -= charge
            seq.computed = start + take
            self._prefilled.append(seq)
            if not (settings.free_recompute and seq.leg is Leg.DECODE):
                chunks.append(PrefillChunk(take, start, 0, start < seq.prompt <= start + take))
        if self._prefilled:
            self._begin_prefill(step, chunks)

    def _begin_prefill(self, step: StepPlan, chunks: list[PrefillChunk]) -> None:
        step.mixed = step.exclusive = True
        step.chunks = len(chunks)
        step.prefill_tokens = sum(chunk.new_tokens for chunk in chunks)
        took_s = self.latency.step_s(chunks, 0, 0, 0, 0) if chunks else 0.0
        step.end_s = instant(step.start_s + took_s)
        self._shut = self.settings.prefill_decode_interval
        self._epoch.piece = None

    def _enter(self, seq: Sequence, length: int, pages: int, now_s: float) -> bool:
        """Lock what is cached and take `pages` beside it; False where they cannot be had."""
        pool = self.pool
        if seq in self._ends:
            if not pool.take(pages):
                return False
        else:
            self._settle_young()
            node, cached = pool.root, 0
            if self.settings.prefix_caching:
                limit = (length - 1) // self.settings.block_size
                node, cached = pool.match(self._pieces(seq, limit), limit, self._stamp())
            pool.lock(node)
            if not pool.take(pages):
                pool.unlock(node)
                return False
            self._ends[seq] = node
            seq.owned = seq.published = cached
            self._admitted(seq, now_s, cached * self.settings.block_size)
        seq.owned += pages
        seq.phase = Phase.PREFILL
        return True

    def _admitted(self, seq: Sequence, now_s: float, cached_tokens: int) -> None:
        if seq.admit_s is None:
            seq.admit_s = now_s
            seq.cached_tokens = cached_tokens
        else:
            seq.readmissions += 1
        if cached_tokens > seq.reused_tokens:
            seq.reused_tokens = cached_tokens

    def _keep_out(self, seq: Sequence, short: float, left_tokens: int, length: int, ext: int) -> None:
        """Bound the decode steps for which the head of waiting, `short` of tokens now, surely stays out.

        In a step the weighed outputs shrink by at most `rise`: each member makes a token, and the ratio falls. What the
        members take works against it. An eviction can shorten the head's cached prefix, so that it no longer ends
        within the step and needs no reserve: then the bound ends before anything is evicted.
        """
        settings, batch = self.settings, self.batch
        size = settings.block_size
        slack = short - 1e-6
        rise = (self._first - self._lowest) / DECAY_STEPS * left_tokens + self._ratio() * batch.size
        certain = int(slack / rise) if rise > 0.0 and slack > 0.0 else 0
        slack -= batch.size * (size - 1)
        if slack > 0.0:
            rise -= batch.size
            certain = max(certain, int(slack / rise) if rise > 0.0 else 1 << 40)
        fits = self._whole(length) <= settings.chunked_prefill_size
        if seq not in self._ends and not fits and self._whole(ext) <= settings.chunked_prefill_size:
            certain = min(certain, batch.steps_within(certain + 1, self.pool.free) - 1)
        self._certain = max(certain, 0) + 1

    def _sort(self) -> None:
        """Longest cached prefix first; of those with hardly any, one of each beginning goes before its likes."""
        now = (self.pool.version, self._changes)
        if self._sorted == now:
            return
        self._sorted = now
        if len(self.waiting) < 2:
            return
        size = self.settings.block_size
        pages = SHORT_HIT_TOKENS // size
        seen: set[tuple[tuple[int, int], ...]] = set()
        ranked: list[tuple[bool, int, Sequence]] = []
        for seq in self.waiting:
            length = seq.prompt + seq.outputs
            cached = self._cached(seq, length) * size
            again = False
            if cached <= SHORT_HIT_TOKENS <= length:
                beginning = _beginning(self._pieces(seq, length // size), pages)
                again = beginning in seen
                seen.add(beginning)
            ranked.append((again, -cached, seq))
        ranked.sort(key=lambda r: r[:2])
        self.waiting = deque(seq for _, _, seq in ranked)

    def _outputs_left(self) -> int:
        """Tokens that running requests still make, as far as they count for admission."""
        clip, batch = self.settings.clip_max_new_tokens, self.batch
        left = 0
        for seq in self.running:
            own = seq.outputs_limit + seq.prompt - batch.length(seq)
            left += own if own < clip else clip
        return left

    def _ratio(self) -> float:
        """The share of outputs still to come that admission keeps free."""
        fallen = self._base - self._decays * (self._first - self._lowest) / DECAY_STEPS
        return max(fallen, min(self._lowest, self._base))

    # ------------------------------------------------------------ decode

    def _plan_decode(self, step: StepPlan) -> StepPlan | None:
        """Decode steps: as many as are certain, or one when leaping is off or somebody had to be retracted."""
        batch = self.batch
        if batch.crossings(1) > self.pool.room and not self._retract(step):
            return self._plan_outgrown(step)
        epoch = self._epoch
        piece = epoch.piece
        if piece is None or epoch.done >= piece.steps:
            epoch.begin(self.latency.decode_piece(batch.size, batch.ctx_tokens), step.start_s)
        self._stretch(step)
        return step

    def _stretch(self, step: StepPlan) -> None:
        """Make a decode plan as long as is certain, or one step when leaping is off."""
        batch, pool, epoch, piece = self.batch, self.pool, self._epoch, self._epoch.piece
        steps = 1
        step.decodes = batch.size
        step.evict_s = None
        if self.settings.leap and piece is not None and not step.preempted and not self._silent:
            steps = min(batch.next_finish(), piece.steps - epoch.done)
            if self.waiting:
                steps = self._steps_shut_out(steps)
            steps = batch.steps_within(steps, pool.room)
            if pool.events and steps > 1:
                until = 1 if pool.removed else batch.steps_within(steps, pool.free) + 1
                if until < steps:
                    if self._leap_past_evictions:
                        step.evict_s = epoch.end_s(until)
                    else:
                        steps = until
        step.steps = steps
        step.end_s = epoch.end_s(steps)

    def _steps_shut_out(self, steps: int) -> int:
        """For how many of `steps` decode steps nobody who waits can enter, nor their order change."""
        settings = self.settings
        if self._holds_back:
            return steps
        if self._shut:
            return min(steps, self._shut)
        if settings.schedule_policy == "lpm" and len(self.waiting) <= LPM_LIMIT:
            steps = max(1, self.batch.steps_within(steps, self.pool.free))
        if len(self.running) < settings.max_num_seqs:
            steps = min(steps, max(self._certain, 1))
        return steps

    def _retract(self, step: StepPlan) -> bool:
        """Send back those with the fewest tokens made until the others can grow; False where one alone cannot."""
        batch, pool = self.batch, self.pool
        while batch.crossings(1) > pool.room and batch.size > 1:
            victim = min(self.running, key=lambda seq: batch.length(seq) - seq.prompt)
            self._leave(victim)
            self._give_back(victim)
            victim.phase = Phase.WAITING
            self.waiting.append(victim)
            self._changes += 1
            step.preempted += 1
            self.preemptions += 1
        if batch.crossings(1) > pool.room:
            return False
        made = sum(batch.length(seq) - seq.prompt for seq in self.running)
        most = sum(seq.outputs_limit for seq in self.running)
        self._base = min(1.0, (made + RETRACT_AHEAD_TOKENS * batch.size) / (most + 1))
        self._decays = 0
        return True

    def _plan_outgrown(self, step: StepPlan) -> StepPlan:
        """The last one that runs cannot make its next token: others let go, or it waits for that, or it ends."""
        step.literal = True
        if self._restart_begun(self.waiting, step):
            return step
        seq = next(iter(self.running))
        self._leave(seq)
        self._give_back(seq)
        step.preempted += 1
        room_tokens = self.settings.blocks * self.settings.block_size
        if self._whole(seq.length + 1) > room_tokens:
            self._fail(seq, step, f"{seq.length} tokens and one more exceed the KV pool of {room_tokens} tokens")
        else:
            seq.phase = Phase.WAITING
            self.waiting.append(seq)
            self._changes += 1
            self.preemptions += 1
        return step

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        """Nothing runs and the head of waiting cannot enter. Waiting longer helps if somebody else holds pages."""
        self._base, self._decays = min(self._base, self._lowest), 0  # steps without work lower the ratio too
        others = [seq for seq in self.waiting if seq in self._ends]
        if len(self._ends) > len(others) or self.activated:
            return None  # held or reserved for a hand-off: what becomes of it changes that
        seq = self.waiting[0]
        step.literal = True
        if self._restart_begun(others, step, but=seq):
            return step
        self.waiting.popleft()
        self._changes += 1
        settings = self.settings
        reserve = min(seq.outputs_limit - seq.outputs, settings.clip_max_new_tokens)
        self._give_back(seq)
        room_tokens = settings.blocks * settings.block_size
        first = min(self._whole(seq.length), settings.chunked_prefill_size)
        if first > settings.max_prefill_tokens:
            why = f"a chunk of {first} tokens exceeds max_prefill_tokens {settings.max_prefill_tokens}"
        else:
            why = f"{seq.length} tokens and a reserve of {reserve} outputs exceed the KV pool of {room_tokens} tokens"
        self._fail(seq, step, why)
        return step

    def _restart_begun(self, queue: Iterable[Sequence], step: StepPlan, but: Sequence | None = None) -> int:
        """Prompts computed in part hold pages that somebody needs to go on: they start again, all `but` one."""
        begun = [seq for seq in queue if seq in self._ends and seq is not but]
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
        if not step.preempted:
            self._decays += steps
        self._shut = max(0, self._shut - steps)

    # ------------------------------------------------------------ commit

    def commit(self, step: StepPlan) -> Outcome:
        """The planned step is over: hand out its tokens, let the finished go, take the entering into the batch."""
        outcome = Outcome()
        if step.literal:
            self._log.literal(step, self.batch, self.pool, (len(self.running), step.waiting))
            for seq in step.failed:
                seq.phase = Phase.DONE
                outcome.ended.append(seq)
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

    def _commit_prefill(self, step: StepPlan, outcome: Outcome) -> None:
        """Prompts in part go back to the front of waiting; those complete make a token and join the batch."""
        done, self._prefilled = self._prefilled, []
        self._settle_young()
        for seq in reversed(done):
            if seq.computed < seq.length:
                self._publish(seq, seq.computed // self.settings.block_size, self._stamp())
                seq.phase = Phase.WAITING
                self.waiting.appendleft(seq)
                self._changes += 1
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
            self._publish(seq, seq.computed // size, self._stamp())
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
            self._settle_young(silent)
            return
        now = self.batch.step
        ends = {(now, 0, seq.order): seq for seq in done}
        pending = [*done, *silent, *self._young] if silent or self._young else done
        for stamp, seq in sorted([*((self._last_page(seq), seq) for seq in pending), *ends.items()], key=_by_stamp):
            if seq in self._ends:
                self._publish_made(seq)
            if seq.phase is Phase.DECODE and ends.get(stamp) is seq:
                seq.last_token_s = end_s
                del self.running[seq]
                self._complete(seq, outcome)
        self._grow_up()

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
        size = self.settings.block_size
        if seq.first_token_s is None:
            self._silent.append(seq)
        else:
            if seq.last_token_s is None:
                seq.last_token_s = at_s
            self._log.joined(seq, seq.last_token_s, alone=not self.batch.size)
            if seq.published < seq.computed // size:
                self._silent.append(seq)
        self.batch.join(seq)
        if size > 1 and seq.published <= seq.prompt // size:
            self._young.append(seq)
        self._epoch.piece = None

    def _leave(self, seq: Sequence) -> None:
        """Out of the batch between steps, with the tokens made so far."""
        self._settle_young()
        if seq.first_token_s is not None:
            seq.last_token_s = self._log.left(seq)
        self.batch.leave(seq)
        self.batch.forget(seq)
        self._publish_made(seq)
        if seq in self._silent:
            self._silent.remove(seq)
        if seq in self._young:
            self._young.remove(seq)
        del self.running[seq]
        self._epoch.piece = None

    # ------------------------------------------------------------ pages

    def _whole(self, tokens: int) -> int:
        """Tokens in whole pages."""
        size = self.settings.block_size
        return -(-tokens // size) * size

    def _stamp(self) -> Stamp:
        """Now, behind everything that was touched before."""
        self._tick += 1
        return self.batch.step, 1, self._tick

    def _length(self, seq: Sequence) -> int:
        return self.batch.length(seq) if seq.phase is Phase.DECODE else seq.prompt + seq.outputs

    def _last_page(self, seq: Sequence) -> Stamp:
        """When a member of the batch last completed a page."""
        return self.batch.step - self._length(seq) % self.settings.block_size, 0, seq.order

    def _pieces(self, seq: Sequence, pages: int) -> Pieces:
        """The content of the first `pages` pages of the known tokens, made ones included (and more, where known)."""
        path = seq.path
        if pages <= path.blocks:
            return path.pieces
        if path.pieces and path.pieces[-1][0] is seq.own:
            return (*path.pieces[:-1], (seq.own, pages))
        return (*path.pieces, (seq.own, pages))

    def _cached(self, seq: Sequence, tokens: int) -> int:
        """Pages of the first `tokens` tokens that are in the tree. Leaves no trace."""
        if not self.settings.prefix_caching:
            return 0
        pages = tokens // self.settings.block_size
        return self.pool.peek(self._pieces(seq, pages), pages)

    def _publish(self, seq: Sequence, pages: int, stamp: Stamp) -> None:
        """The first `pages` pages are complete: they go into the tree, and those that are there already come back."""
        if pages <= seq.published or not self.settings.prefix_caching:
            return
        added = self.pool.publish(self._ends[seq], self._pieces(seq, pages), seq.published, pages, stamp)
        self._ends[seq] = added.node
        self.pool.free += added.known
        seq.published = pages

    def _publish_made(self, seq: Sequence) -> None:
        """What a member has completed in the batch; before its first step there, that is nothing."""
        if self.batch.step > seq.join_step:
            length = self._length(seq)
            self._publish(seq, length // self.settings.block_size, self._last_page(seq))

    def _settle_young(self, silent: list[Sequence] | None = None) -> None:
        """Publish what decode steps have completed where that shapes the tree.

        The first own page of a member stays in one node with its prompt's last ones if nobody else uses those. Further
        ones only make that node longer, so they may wait until the member leaves.
        """
        if not self._young and not silent:
            return
        for seq in sorted([*self._young, *(silent or ())], key=self._last_page):
            self._publish_made(seq)
        self._grow_up()

    def _grow_up(self) -> None:
        """Members with a page of their own in the tree, and those who have left, are no longer young."""
        if self._young:
            size = self.settings.block_size
            decodes = Phase.DECODE
            self._young = [s for s in self._young if s.phase is decodes and s.published <= s.prompt // size]

    def _give_back(self, seq: Sequence) -> None:
        """Let go of all pages; those in the tree stay there until they are evicted."""
        node = self._ends.pop(seq, None)
        if node is None:
            return
        self.pool.free += seq.owned - seq.published
        self.pool.unlock(node)
        seq.owned = seq.published = seq.computed = 0

    def audit(self) -> None:
        """Recount the pages; raises InvariantError where a count is off."""
        pool = self.pool
        pool.audit()
        size = self.settings.block_size
        own = sum(
            (-(-self._length(s) // size) if s.phase is Phase.DECODE else s.owned) - s.published for s in self._ends
        )
        if own != pool.private:
            raise InvariantError(f"radix cache: {pool.private} pages outside the tree are taken, requests have {own}")


def _by_stamp(item: tuple[Stamp, Sequence]) -> Stamp:
    return item[0]


def _beginning(pieces: Pieces, pages: int) -> tuple[tuple[int, int], ...]:
    """The content of the first `pages` pages, as something to compare."""
    runs = []
    for branch, end in pieces:
        runs.append((branch.uid, min(end, pages)))
        if end >= pages:
            break
    return tuple(runs)
