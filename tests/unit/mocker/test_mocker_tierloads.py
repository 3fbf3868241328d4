"""Blocks come up through host memory block by block: N8 and N9 over simulated links."""

from __future__ import annotations

import pytest

from policies.cluster.ids import Tier
from policies.kvbm.onboard import piped_bounce_s
from policies.kvbm.tiers import TierSpec
from twin.mocker.clock import Clock
from twin.mocker.links import Network, side_by_side
from twin.mocker.tierplan import LevelPlan
from twin.mocker.tierways import _hops
from twin.perf.links import FAIR, FIFO, Link

BLOCK = 8_388_608
LINKS = (
    Link(name="disk", bytes_per_s=10e9, discipline=FAIR, duplex=False),
    Link(name="host", bytes_per_s=32e9, discipline=FIFO, duplex=False),
)


@pytest.mark.parametrize(("blocks", "ms"), [(64, 53.949235), (1, 1.101005), (2, 1.939866)])
def test_n8_and_n9_piped(blocks: int, ms: float) -> None:
    spec = TierSpec(tier=Tier.G3_DISK, capacity_bytes=None, block_bytes=BLOCK, latency_s=0.0, bytes_per_s=10e9)
    level = LevelPlan(
        spec=spec,
        offload="presence",
        trigger="on_complete",
        eviction="lru",
        when_full="evict",
        down=(("disk",),),
        hops=((("disk",),), (("host",),)),
        piped=True,
    )
    hops = _hops(level, blocks * BLOCK)
    network = Network(Clock(), LINKS)

    def cross(at: int) -> None:
        if at < len(hops):
            network.start_all(side_by_side(*hops[at]), on_done=lambda: cross(at + 1))

    cross(0)
    network.clock.run_out()
    assert network.clock.now * 1e3 == pytest.approx(ms, abs=5e-6)
    assert network.clock.now == pytest.approx(piped_bounce_s(blocks, BLOCK, 10e9, 32e9), abs=5e-9)
    assert network.moved_bytes("disk") == pytest.approx(blocks * BLOCK)
    assert network.moved_bytes("host") == pytest.approx(blocks * BLOCK)
