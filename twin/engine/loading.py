"""Engines of the vLLM family that bring blocks up from below before they admit whoever wants them.

A request whose blocks come up waits beside the queue, without a place in the batch, while others may pass; then it is
first in line. Where blocks lie, how they come and which are worth it, subclasses and others say; which scheduler it is,
does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.engine.core import EngineParts
from twin.engine.plan import StepPlan
from twin.engine.pool import Hold, Match
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.vllm import VllmEngine


class HostLoad:
    """Blocks on their way up for one request. Whoever sees to them may set `on_dropped`: the request does not want them
    any more, and they must come no further."""

    __slots__ = ("blocks", "bytes", "holds", "on_dropped", "seq")

    def __init__(self, seq: Sequence, holds: list[Hold], blocks: int, bytes_: int) -> None:
        self.seq = seq
        self.holds = holds
        self.blocks = blocks
        self.bytes = bytes_
        self.on_dropped: Callable[[], None] | None = None


class LoadingEngine(VllmEngine):
    """`pending_loads` have begun now; whoever owns the clock takes them and calls `loaded` when they have come up.

    It stands in front of a scheduler in the order of bases: `class Mine(LoadingEngine, TrtllmEngine)`.
    """

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        self.pending_loads: list[HostLoad] = []
        self._loads: dict[Sequence, HostLoad] = {}
        self._listen()

    def _listen(self) -> None:
        """Hear of what leaves the device, or is complete there."""
        raise NotImplementedError

    def loaded(self, seq: Sequence) -> None:
        """The blocks of a load are on the device: the request is first in line."""
        raise NotImplementedError

    def _begin_loads(self) -> bool:
        """Take the heads of waiting whose prefix goes on below out of the queue, as long as they fit; whether there
        were any."""
        raise NotImplementedError

    def _unpin(self, load: HostLoad) -> None:
        """A load is over, or nobody wants it: its sources may go."""

    @property
    def idle(self) -> bool:
        return not self._loads and super().idle

    def plan(self, now_s: float) -> StepPlan | None:
        """Begin what loads can begin, then plan as ever."""
        if self.waiting and not self._blocked:
            self._begin_loads()
        return super().plan(now_s)

    def cancel(self, seq: Sequence) -> None:
        if seq.phase in (Phase.LOADING, Phase.LOADED):
            load = self._loads.pop(seq, None)
            if load is not None:
                self._unpin(load)
                if load.on_dropped is not None:
                    load.on_dropped()
            else:
                self.waiting.remove(seq)
            self.ledger.release(seq)
            seq.phase = Phase.DONE
            self._blocked = False
        else:
            super().cancel(seq)

    def _may_load(self, seq: Sequence) -> bool:
        """Whether blocks may come up for the head of waiting: not for more requests than there are free slots."""
        slots = self.settings.max_num_seqs - len(self.running)
        return seq.phase is Phase.WAITING and len(self._loads) < slots and not self._is_shut

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        """Nothing runs that could make room for the head of waiting: whoever has been loaded holds blocks already and
        goes first. Where several hold so much that none of them can go on, the last one gives its blocks back."""
        loaded = [seq for seq in self.waiting if seq.phase is Phase.LOADED]
        budget = self.settings.max_num_batched_tokens
        first = next((seq for seq in loaded if self._admissible(seq, budget) is not None), None)
        if first is not None:
            self.waiting.remove(first)
            self.waiting.appendleft(first)
        elif loaded and not self._loads:
            self._give_back(loaded[-1])
        else:
            return super()._plan_stuck(step)
        self._blocked = False
        return self._plan(step.start_s)

    def _give_back(self, seq: Sequence) -> None:
        """What was loaded for a request is cached like anything else; the request waits as if it had just come."""
        self.ledger.release(seq)
        seq.phase = Phase.WAITING
        if seq.admit_s is None:
            seq.host_blocks = 0

    def _admissible(self, seq: Sequence, left: int) -> Match | None:
        if seq.phase is not Phase.LOADED:
            return super()._admissible(seq, left)
        rest = seq.prompt + seq.outputs - seq.computed
        if self.ledger.needed(seq, rest) > self.pool.free + self.pool.inactive:
            return None
        if self._whole and rest > left:
            return None
        return Match((), seq.owned, 0)

    def _admit(self, seq: Sequence, match: Match, left: int, now_s: float) -> int:
        if seq.phase is not Phase.LOADED:
            return super()._admit(seq, match, left, now_s)
        self.waiting.popleft()
        self._start(seq, now_s, seq.computed)
        want = seq.prompt + seq.outputs - seq.computed
        return want if want < left else left
