"""A vLLM engine with a host tier below its pool: what the host holds beyond the device's hit is loaded, then used.

Nothing is loaded that would not fit. Which engine this is does not change how steps are scheduled.
"""

from __future__ import annotations

from twin.engine.host import HostTier
from twin.engine.loading import HostLoad, LoadingEngine
from twin.engine.sequence import Phase, Sequence


class OffloadEngine(LoadingEngine):
    """Blocks go down as `settings.host` says, at no cost; see `LoadingEngine` for how loads are seen to."""

    def _listen(self) -> None:
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

    def loaded(self, seq: Sequence) -> None:
        load = self._loads.pop(seq, None)
        if load is None:
            return  # cancelled meanwhile
        self._unpin(load)
        self.ledger.came_up(seq, load.blocks)
        seq.phase = Phase.LOADED
        self.waiting.appendleft(seq)
        self._blocked = False

    def audit(self) -> None:
        super().audit()
        self.host.audit()

    def _unpin(self, load: HostLoad) -> None:
        self.host.unpin(load.holds)

    def _begin_loads(self) -> bool:
        begun = False
        waiting, bs = self.waiting, self.settings.block_size
        while waiting and self._may_load(waiting[0]):
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
