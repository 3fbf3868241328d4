"""Speculative decoding in SGLang: a decode step verifies draft tokens and may emit several tokens of a request at once.

A prompt's step emits one token and makes the first drafts, so every decode step has some to verify. Slots for the
largest burst are there before a step begins; what did not hold goes back at its end and never reaches the tree. Steps
are never leapt, since nobody knows how far a burst goes. Rules: docs/engines/options.md.
"""

from __future__ import annotations

from policies.errors import InvariantError
from twin.engine.core import EngineParts
from twin.engine.drafts import Drafts
from twin.engine.plan import Outcome, StepPlan
from twin.engine.sequence import Sequence
from twin.engine.settings import SglangSettings
from twin.engine.sglang import SglangEngine
from twin.engine.ticks import instant


class SpeculativeSglangEngine(SglangEngine):
    """An SGLang replica with speculative decoding; `settings.speculation` must be set.

    Where the next burst of everybody does not fit, the newest is retracted: SGLang can only cut a batch with drafts
    from its end. The last one that runs verifies as many drafts as there is room for.
    """

    def __init__(self, settings: SglangSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        assert settings.speculation is not None
        slots = settings.blocks * settings.block_size - 1  # the newest token has one too
        self._drafts = Drafts(settings.speculation, slots)
        self._ahead: dict[Sequence, int] = {}  # drafts that the planned step verifies
        self._taken = 0  # pages for them and for the token that is certain

    # ------------------------------------------------------------ plan

    def _plan_decode(self, step: StepPlan) -> StepPlan:
        growth = self._growth()
        if growth > self.pool.room:
            if not self._retract(step):
                return self._plan_outgrown(step)
            growth = self._growth()
        self._ahead = {seq: self._drafts_of(seq) for seq in self.running}
        self._taken = growth
        if not self.pool.take(growth):
            raise InvariantError(f"radix cache: {growth} pages for bursts, {self.pool.room} of them there")
        batch = self.batch
        step.literal = True
        step.decodes = batch.size
        step.end_s = instant(step.start_s + self.latency.decode_piece(batch.size, batch.ctx_tokens).g0)
        return step

    def _growth(self) -> int:
        return sum(self._pages(seq, 1 + self._drafts_of(seq)) for seq in self.running)

    def _victim(self) -> Sequence:
        return next(reversed(self.running))

    def _drafts_of(self, seq: Sequence) -> int:
        """Drafts of a request that the next step verifies."""
        drafts = self._drafts.ahead(seq, 0)
        if len(self.running) == 1:
            size = self.settings.block_size
            slots = (-(-seq.length // size) + self.pool.room) * size - seq.length - 1
            drafts = max(0, min(drafts, slots))
        return drafts

    def _pages(self, seq: Sequence, more: int) -> int:
        """Fresh pages that `more` tokens take."""
        size, length = self.settings.block_size, seq.length
        return -(-(length + more) // size) - -(-length // size)

    # ------------------------------------------------------------ commit

    def _commit_literal(self, step: StepPlan, outcome: Outcome) -> None:
        if step.decodes:
            self._commit_bursts(step, outcome)
        super()._commit_literal(step, outcome)

    def _commit_bursts(self, step: StepPlan, outcome: Outcome) -> None:
        """Everybody emits: a token that is certain, and the drafts that hold one after the other."""
        end_s, batch, size = step.end_s, self.batch, self.settings.block_size
        members = list(self.running)
        since_s = [self._log.last_token_s(seq) for seq in members if seq.first_token_s is not None]
        batch.dissolve(members)
        batch.advance(1)
        self._silent.clear()
        self.pool.free += self._taken
        self._taken = 0
        for seq in members:
            if seq.first_token_s is None:
                self._first_token(seq, end_s, outcome)
            made = self._drafts.burst(seq, self._ahead[seq])
            since_s += [end_s] * (made - 1)
            self.pool.free -= self._pages(seq, made)
            seq.outputs += made
            seq.computed = seq.length
            seq.owned = -(-seq.computed // size)
            seq.last_token_s = end_s
            self.ledger.publish(seq, seq.computed // size, (batch.step, 0, seq.order))
            if seq.outputs < seq.outputs_limit:
                batch.join(seq)
            else:
                del self.running[seq]
                self._complete(seq, outcome)
        self.ledger.grow_up()
        self._log.emitted(end_s)
        self._log.gaps(since_s, end_s)
        self._without_prompts(step, 1)

    def _end_prompt(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        before = seq.outputs
        super()._end_prompt(seq, end_s, outcome)
        if before < seq.outputs < seq.outputs_limit:
            self._drafts.emitted(seq)

    def audit(self) -> None:
        self.ledger.audit(self._taken)

    def _give_back(self, seq: Sequence) -> None:
        self._drafts.forget(seq)
        super()._give_back(seq)
