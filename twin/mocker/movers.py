"""KV over the links of the run, which transfers share: who sends which heads to whom, rank by rank.

A transfer is as many flows as there are pairs of ranks; it is over when the slowest is. Where ranks share no link, and
in every hand-off of the run rank i sends to rank i alone and all send alike, one flow stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.cluster.ids import WorkerId
from twin.mocker.clock import Clock
from twin.mocker.links import Network, Part, Transfer
from twin.perf.kv_layout import KvLayout
from twin.topology import Topology


class LinkMover:
    """Moves KV between workers; `layouts` by (source group, destination group)."""

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        layouts: Mapping[tuple[str, str], KvLayout],
        *,
        setup_s: float,
        bytes_per_token: int | None,
    ) -> None:
        self._topology = topology
        self._layouts = layouts
        self._setup_s = setup_s
        self._bytes_per_token = bytes_per_token
        self._one_stands_for_all = topology.own_ranks and all(layout.even for layout in layouts.values())
        self.network = Network(clock, topology.links)

    def move(
        self, source: WorkerId, dest: WorkerId, tokens: int, blocks: int, on_done: Callable[[], None]
    ) -> Transfer | None:
        if not tokens:
            on_done()
            return None
        ends = self._topology.endpoints
        layout = self._layouts[ends[source].group, ends[dest].group]
        scale = 1.0
        if self._bytes_per_token is not None:
            scale = self._bytes_per_token * tokens / layout.wire_bytes(tokens)
        pairs = layout.pairs[:1] if self._one_stands_for_all else layout.pairs
        parts = [
            Part(
                self._topology.path(source, pair.prefill_rank, dest, pair.decode_rank),
                round(layout.pair_bytes(pair, tokens) * scale),
                layout.descriptors(blocks),
            )
            for pair in pairs
        ]
        return self.network.start_all(parts, setup_s=self._setup_s, on_done=on_done)
