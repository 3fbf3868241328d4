"""KV over the links of the run, which transfers share: who sends which heads to whom, rank by rank.

A transfer is as many flows as there are pairs of ranks; it is over when the slowest is. Where ranks share no link, and
in every hand-off of the run rank i sends to rank i alone and all send alike, one flow stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twin.mocker.handoff import Load
from twin.mocker.links import Network, Part, Transfer
from twin.perf.cargo import KV
from twin.perf.kv_layout import KvLayout
from twin.topology import Topology


class LinkMover:
    """Moves KV between workers; `layouts` by (source group, destination group). `each_rank`: links of single ranks may
    slow down, so that each has its own flow."""

    def __init__(
        self,
        network: Network,
        topology: Topology,
        layouts: Mapping[tuple[str, str], KvLayout],
        *,
        setup_s: float,
        bytes_per_token: int | None,
        each_rank: bool = False,
    ) -> None:
        self._topology = topology
        self._layouts = layouts
        self._setup_s = setup_s
        self._bytes_per_token = bytes_per_token
        self._one_stands_for_all = (
            not each_rank and topology.own_ranks and all(layout.even for layout in layouts.values())
        )
        self.network = network

    def move(self, load: Load, on_done: Callable[[], None]) -> Transfer | None:
        if not load.tokens:
            on_done()
            return None
        parts = self._parts(load)
        copies = len(self._layout(load).pairs) if self._one_stands_for_all else 1
        return self.network.start_all(parts, setup_s=self._setup_s, on_done=on_done, cargo=KV, copies=copies)

    def alone_s(self, load: Load) -> float:
        if not load.tokens:
            return 0.0
        estimate = self.network.estimate_s
        return max(
            estimate(part.links, part.bytes, setup_s=self._setup_s, descriptors=part.descriptors)
            for part in self._parts(load)
        )

    def _layout(self, load: Load) -> KvLayout:
        ends = self._topology.endpoints
        return self._layouts[ends[load.source].group, ends[load.dest].group]

    def _parts(self, load: Load) -> list[Part]:
        """The flows of a load: one for each pair of ranks."""
        source, dest, tokens = load.source, load.dest, load.tokens
        layout = self._layout(load)
        scale = load.share
        if self._bytes_per_token is not None:
            scale *= self._bytes_per_token * tokens / layout.wire_bytes(tokens)
        pairs = layout.pairs[:1] if self._one_stands_for_all else layout.pairs
        return [
            Part(
                self._topology.path(source, pair.prefill_rank, dest, pair.decode_rank),
                round(layout.pair_bytes(pair, tokens) * scale),
                layout.descriptors(load.blocks),
            )
            for pair in pairs
        ]
