"""The ways up to the device of one simulated worker: which lanes the bytes of a leg cross, hop by hop, and how long
that takes when nothing else moves.

It moves nothing. A lane counts with the bandwidth that it has now, so a link that is down takes for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.orders import Leg
from twin.mocker.links import Network, side_by_side
from twin.mocker.tierplan import Lanes, LevelPlan, joined

if TYPE_CHECKING:
    from twin.mocker.tierpeers import TierPeers


class Hop(NamedTuple):
    """Bytes that cross these lanes, by rank, all at once."""

    lanes: Lanes
    bytes: int


class Ways:
    """Of one worker, or of one `rank` of several: `levels` are its tiers, `peers` knows the way from other workers."""

    __slots__ = ("_levels", "_network", "_peers", "_rank", "_ranks", "_worker_id")

    def __init__(
        self,
        network: Network,
        levels: Mapping[Tier, LevelPlan],
        peers: TierPeers,
        worker_id: WorkerId,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._network = network
        self._levels = levels
        self._peers = peers
        self._worker_id = worker_id

    def of(self, leg: Leg) -> tuple[list[Hop], float]:
        """What a leg crosses, hop after hop, and the seconds before its first byte."""
        if leg.owner is not None:
            lanes, setup_s = self._peers.way(self._worker_id, leg.owner, rank=self._rank, ranks=self._ranks)
            return [Hop(lanes, leg.bytes)], setup_s
        level = self._levels[leg.tier]
        return _hops(level, leg.bytes), level.spec.latency_s

    def alone_s(self, legs: Sequence[Leg]) -> float:
        """How long these legs take side by side: as the longest one alone, and no less than a lane needs for what all
        of them send over it."""
        longest_s = 0.0
        busy_s: dict[str, float] = {}
        for leg in _merged(legs):
            hops, took_s = self.of(leg)
            for lanes, bytes_ in hops:
                hop_s = 0.0
                for part in side_by_side(lanes, bytes_):
                    for lane in part.links:
                        lane_s = self._lane_s(lane, part.bytes)
                        busy_s[lane] = busy_s.get(lane, 0.0) + lane_s
                        hop_s = max(hop_s, lane_s)
                took_s += hop_s
            longest_s = max(longest_s, took_s)
        return max(longest_s, max(busy_s.values(), default=0.0))

    def _lane_s(self, lane: str, bytes_: int) -> float:
        bytes_per_s = self._network.bytes_per_s(lane)
        return bytes_ / bytes_per_s if bytes_per_s else math.inf


def _merged(legs: Sequence[Leg]) -> list[Leg]:
    """One leg for all that comes from the same place."""
    found: dict[tuple[Tier, WorkerId | None], Leg] = {}
    for leg in legs:
        known = found.get((leg.tier, leg.owner))
        if known is not None:
            leg = leg._replace(blocks=known.blocks + leg.blocks, bytes=known.bytes + leg.bytes)
        found[leg.tier, leg.owner] = leg
    return list(found.values())


def _hops(level: LevelPlan, bytes_: int) -> list[Hop]:
    """What a leg crosses, one after another, and with how many bytes. Block by block through host memory: the first
    block is alone on the first hop and the last one on the second, between them both carry, at the slower one's pace.
    """
    if not level.piped or len(level.hops) != 2:
        return [Hop(lanes, bytes_) for lanes in level.hops]
    first, second = level.hops
    one = min(level.spec.block_bytes, bytes_)
    middle = [Hop(joined(first, second), bytes_ - one)] if bytes_ > one else []
    return [Hop(first, one), *middle, Hop(second, one)]
