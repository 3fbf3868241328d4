"""The TensorRT-LLM scheduler: the running-first core of the vLLM one, with other rules of who may enter.

Guaranteed no evict admits a request only if it can grow to its end beside everybody else, so nobody is ever preempted.
Max utilisation admits what fits now and preempts the newest when blocks run out. A prompt that is cached to its last
block computes nothing. Rules and their evidence: docs/engines/trtllm.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.errors import InvariantError
from policies.frozen import frozen
from twin.engine.core import EngineParts
from twin.engine.ledger import Ledger
from twin.engine.plan import Outcome, StepPlan
from twin.engine.pool import NO_MATCH, BlockPool, Match
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.vllm import VllmEngine


@frozen
class TrtllmSettings(EngineSettings):
    """`capacity_policy` is "guaranteed_no_evict" or "max_utilization". While requests decode, prompts wait for
    `batch_wait_iters` steps, or until the tokens of all that wait, and one for everybody who decodes, are
    `batch_wait_ratio` of a step's budget.
    """

    capacity_policy: str
    batch_wait_iters: int = 0
    batch_wait_ratio: float = 0.0

    @property
    def longest_prompt_tokens(self) -> int:
        """One token less than the pool: a prompt must leave room for an output."""
        return self.blocks * self.block_size - 1


class TrtllmEngine(VllmEngine):
    """One TensorRT-LLM replica; see `VllmEngine` for how it is driven."""

    def __init__(self, settings: TrtllmSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        guaranteed = settings.capacity_policy == "guaranteed_no_evict"
        kind: type[FullHitLedger] = NoEvictLedger if guaranteed else FullHitLedger
        self.ledger = self._promises = kind(self.pool, settings.block_size, caching=settings.prefix_caching)
        self._door: Door | None = None
        if settings.batch_wait_iters and settings.batch_wait_ratio:
            full_tokens = settings.batch_wait_ratio * settings.max_num_batched_tokens
            self._door = Door(settings.batch_wait_iters, full_tokens)
            self._is_watchful = True

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request, its outputs cut to what the pool can hold; a prompt that leaves room for none is refused."""
        refusal = self._cut_to_pool(seq)
        return super().submit(seq) if refusal is None else refusal

    def reserve(self, seq: Sequence) -> bool:
        return self._cut_to_pool(seq) is None and super().reserve(seq)

    def _cut_to_pool(self, seq: Sequence) -> str | None:
        room_tokens = self.settings.blocks * self.settings.block_size
        if seq.prompt > self.settings.longest_prompt_tokens:
            return f"prompt of {seq.prompt} tokens leaves no room for an output: the pool holds {room_tokens} tokens"
        seq.outputs_limit = min(seq.outputs_limit, room_tokens - seq.prompt)
        return None

    # ------------------------------------------------------------ waiting for more prompts

    @property
    def head_is_blocked(self) -> bool:
        return super().head_is_blocked and not (self._door is not None and self._is_shut)

    def plan(self, now_s: float) -> StepPlan | None:
        if self._door is not None:
            self.shut(self._door.is_shut(self.waiting, self._decoding()))
        return super().plan(now_s)

    def _decoding(self) -> int:
        """How many of those who run have made tokens."""
        if self._literally or not self.batch.size:
            return sum(1 for seq in self.running if seq.outputs)
        partial = self._partial
        return self.batch.size + (partial is not None and partial.outputs > 0)

    def _undisturbed(self, step: StepPlan, steps: int) -> int:
        """Nobody enters while the door is shut; the step at which it opens is another plan's."""
        return min(steps, self._door.left) if self._door is not None and self._is_shut else steps

    def _start(self, seq: Sequence, now_s: float, hit_tokens: int) -> None:
        if self._door is not None and seq.phase is not Phase.ACTIVATED:
            self._door.steps = 0
        super()._start(seq, now_s, hit_tokens)

    def _advance(self, step: StepPlan) -> None:
        self._waited(step.steps)
        super()._advance(step)

    def commit(self, step: StepPlan) -> Outcome:
        if step.mixed or step.literal:
            self._waited(1)
        return super().commit(step)

    def _waited(self, steps: int) -> None:
        """So many steps are over that began with the door shut."""
        if self._door is not None and self._is_shut:
            self._door.steps += steps

    # ------------------------------------------------------------ promises

    def _complete(self, seq: Sequence, end_s: float, outcome: Outcome) -> None:
        super()._complete(seq, end_s, outcome)
        if seq.phase is Phase.HELD:
            self._promises.grown(seq)

    def audit(self) -> None:
        """Recount blocks, and what is promised beyond them."""
        super().audit()
        self._promises.audit(self._owned, planned=self.batch.crossings(1))

    def _owned(self, seq: Sequence) -> int:
        """Blocks of a sequence; those of a decoding one follow from its length."""
        if seq.phase is not Phase.DECODE:
            return seq.owned
        return -(-(self.batch.length(seq) - 1) // self.settings.block_size)


class Door:
    """Prompts gather before it while others decode: until they are enough for a step, or for `most_steps` steps.

    `steps` are over that began with it shut, since somebody entered.
    """

    __slots__ = ("_full_tokens", "_most_steps", "steps")

    def __init__(self, most_steps: int, full_tokens: float) -> None:
        self._most_steps = most_steps
        self._full_tokens = full_tokens
        self.steps = 0

    @property
    def left(self) -> int:
        """For how many steps more it stays shut if nobody comes."""
        return self._most_steps - self.steps

    def is_shut(self, waiting: Iterable[Sequence], decoding: int) -> bool:
        """Whether those who wait must stay out of the step that begins, beside `decoding` requests."""
        if not decoding or self.left <= 0:
            return False
        tokens, anybody = decoding, False
        for seq in waiting:
            anybody = True
            tokens += seq.prompt + seq.outputs
            if tokens >= self._full_tokens:
                return False
        return anybody


class FullHitLedger(Ledger):
    """A ledger whose look-up may find all known tokens, the last one too."""

    __slots__ = ()

    def prefix(self, seq: Sequence) -> Match:
        limit = (seq.prompt + seq.outputs) // self.block_size
        if not self.caching or limit <= 0:
            return NO_MATCH
        return self.pool.match(seq.pieces(self.block_size), limit)

    def usable(self, seq: Sequence) -> int:
        return (seq.prompt + seq.outputs) // self.block_size

    def grown(self, seq: Sequence) -> None:
        """A sequence keeps its blocks and will take no more."""

    def audit(self, owned: Callable[[Sequence], int], planned: int) -> None:
        """Recount what is promised beyond what sequences have `owned`; raises InvariantError where it is off.

        A step under way may have taken its `planned` blocks for the decode batch already.
        """


class NoEvictLedger(FullHitLedger):
    """Keeps blocks back for everybody who has entered: `committed` are those owned, and those still to be taken.

    A block taken by somebody who has entered was promised before, so the total moves only when somebody enters or
    leaves.
    """

    __slots__ = ("_finish", "committed")

    def __init__(self, pool: BlockPool, block_size: int, *, caching: bool) -> None:
        super().__init__(pool, block_size, caching=caching)
        self.committed = 0
        self._finish: dict[Sequence, int] = {}

    def fits(self, seq: Sequence, match: Match) -> bool:
        """Whether a request can grow to its end; blocks that somebody owns already are counted there."""
        more = self._blocks_at_end(seq) - (match.blocks - match.inactive)
        return more <= self.pool.capacity - self.committed

    def start(self, seq: Sequence, match: Match) -> int:
        finish = self._finish[seq] = self._blocks_at_end(seq)
        self.committed += finish - (match.blocks - match.inactive)
        return super().start(seq, match)

    def reserve(self, seq: Sequence) -> bool:
        """Take fresh blocks for a whole prompt that will come from elsewhere; nothing cached is reused."""
        if not self.fits(seq, NO_MATCH):
            return False
        self.start(seq, NO_MATCH)
        seq.owned = -(-seq.prompt // self.block_size)
        self.pool.take(seq.owned)
        return True

    def release(self, seq: Sequence) -> None:
        active, owned = self.pool.active, seq.owned
        super().release(seq)
        finish = self._finish.pop(seq, None)
        if finish is not None:
            self.committed -= active - self.pool.active + finish - owned

    def grown(self, seq: Sequence) -> None:
        self.committed -= self._finish[seq] - seq.owned
        self._finish[seq] = seq.owned

    def audit(self, owned: Callable[[Sequence], int], planned: int) -> None:
        active, capacity = self.pool.active, self.pool.capacity
        promised = sum(finish - owned(seq) for seq, finish in self._finish.items())
        over = active + promised - self.committed
        if not 0 <= over <= planned or not active <= self.committed <= capacity:
            raise InvariantError(
                f"pool: {self.committed} of {capacity} blocks committed, but {active} are owned and {promised} promised"
            )

    def _blocks_at_end(self, seq: Sequence) -> int:
        return -(-(seq.prompt + seq.outputs_limit) // self.block_size)
