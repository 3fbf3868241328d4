"""KV over the workers' own network cards, which transfers share: who sends which heads to whom, rank by rank.

A transfer is as many flows as there are pairs of ranks; it is over when the slowest is. Where rank i sends to rank i
alone and all send alike, one flow stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.cluster.ids import WorkerId
from twin.mocker.clock import Clock
from twin.mocker.links import Network, Part, Transfer
from twin.perf.kv_layout import KvLayout
from twin.perf.links import RX, TX, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A worker as transfers see it: its name, its ranks and the bandwidth of each rank's card."""

    worker_id: WorkerId
    name: str
    group: str
    ranks: int
    nic_bytes_per_s: float

    def lane(self, rank: int, way: str) -> str:
        return f"nic:{self.name}:{rank}{way}"


class NicMover:
    """Moves KV between workers; `layouts` by (source group, destination group)."""

    def __init__(
        self,
        clock: Clock,
        endpoints: Sequence[Endpoint],
        layouts: dict[tuple[str, str], KvLayout],
        *,
        setup_s: float,
        bytes_per_token: int | None,
        network: Network | None = None,
    ) -> None:
        self._ends = {end.worker_id: end for end in endpoints}
        self._layouts = layouts
        self._setup_s = setup_s
        self._bytes_per_token = bytes_per_token
        self.network = network if network is not None else Network(clock, nic_links(endpoints))

    def move(
        self, source: WorkerId, dest: WorkerId, tokens: int, blocks: int, on_done: Callable[[], None]
    ) -> Transfer | None:
        if not tokens:
            on_done()
            return None
        a, b = self._ends[source], self._ends[dest]
        layout = self._layouts[a.group, b.group]
        scale = 1.0
        if self._bytes_per_token is not None:
            scale = self._bytes_per_token * tokens / layout.wire_bytes(tokens)
        pairs = layout.pairs[:1] if layout.even else layout.pairs
        parts = [
            Part(
                (a.lane(pair.prefill_rank, TX), b.lane(pair.decode_rank, RX)),
                round(layout.pair_bytes(pair, tokens) * scale),
                layout.descriptors(blocks),
            )
            for pair in pairs
        ]
        return self.network.start_all(parts, setup_s=self._setup_s, on_done=on_done)


def nic_links(endpoints: Sequence[Endpoint]) -> list[Link]:
    """A full-duplex card for each rank of each worker."""
    return [
        Link(name=f"nic:{end.name}:{rank}", bytes_per_s=end.nic_bytes_per_s, duplex=True)
        for end in endpoints
        for rank in range(end.ranks)
    ]
