"""A vLLM engine with a host tier below its pool: what the host holds beyond the device's hit is loaded, then used.

A request whose prefix goes on in the host waits beside the queue while its blocks come up (others may pass); then it is
first in line. Nothing is loaded that would not fit. Which engine this is does not change how steps are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.engine.core import EngineParts
from twin.engine.host import HostTier
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


class OffloadEngine(VllmEngine):
    """`pending_loads` have begun now; whoever owns the clock takes them and calls `loaded` when they have come up."""

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        self.pending_loads: list[HostLoad] = []
        self._loads: dict[Sequence, HostLoad] = {}
        self._listen()

    def _listen(self) -> None:
        """Hear of what leaves the device, or is complete there."""
        tier = self.settings.host
        assert tier is not None
        self.host = HostTier.of(tier)
        if tier.trigger == "on_evict":
            self.pool.on_evict = self.host.put
        else:
            self.pool.on_publish = self.host.put

    @property
    def loaded_blocks(self) -> int:
        return self.host.loaded_blocks

    @property
    def idle(self) -> bool:
        return not self._loads and super().idle

    def plan(self, now_s: float) -> StepPlan | None:
        """Begin what loads can begin, then plan as ever."""
        if self.waiting and not self._blocked:
            self._begin_loads()
        return super().plan(now_s)

    def loaded(self, seq: Sequence) -> None:
        """The blocks of a load are on the device: the request is first in line."""
        load = self._loads.pop(seq, None)
        if load is None:
            return  # cancelled meanwhile
        self._unpin(load)
        self.ledger.came_up(seq, load.blocks)
        seq.phase = Phase.LOADED
        self.waiting.appendleft(seq)
        self._blocked = False

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

    def audit(self) -> None:
        super().audit()
        self.host.audit()

    def _unpin(self, load: HostLoad) -> None:
        self.host.unpin(load.holds)

    def _begin_loads(self) -> bool:
        """Take the heads of waiting whose prefix goes on in the host out of the queue, as long as they fit; whether
        there were any."""
        begun = False
        waiting, bs = self.waiting, self.settings.block_size
        slots = self.settings.max_num_seqs - len(self.running)
        while waiting and waiting[0].phase is Phase.WAITING and len(self._loads) < slots:
            seq = waiting[0]
            match = self.ledger.prefix(seq)
            limit = (seq.prompt + seq.outputs - 1) // bs
            more = self.host.match(seq.pieces(bs), limit, match.blocks)
            blocks = more.blocks - match.blocks
            if not more.parts or not self.ledger.fits(seq, match):
                break
            begun = True
            holds = self.host.pin(more)
            waiting.popleft()
            self.ledger.start(seq, match)
            self.pool.take(blocks)
            seq.owned += blocks
            seq.phase = Phase.LOADING
            if seq.admit_s is None:
                seq.host_blocks = blocks
            load = self._loads[seq] = HostLoad(seq, holds, blocks, blocks * self.host.block_bytes)
            self.host.loaded_blocks += blocks
            self.pending_loads.append(load)
        return begun

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
