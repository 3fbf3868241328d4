"""Links that slow down or carry nothing, and KV tiers that vanish, fill up or hand out damaged blocks.

They change what links and tiers carry; who waits for that, or does without, is not decided here.
"""

from __future__ import annotations

from policies.cluster.ids import Tier
from policies.errors import ConfigError
from twin.mocker.faults.stage import Entry, Stage
from twin.mocker.links import ALL_LINKS, Network
from twin.scenario.model import ANY, Fault, Occurrence
from twin.scenario.times import chosen

TCP_SHARE = 1 / 350
"""Of what RDMA carries, when transfers fall back to TCP: vendors say 200 to 500 times slower."""


def slow(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """A link, or all of them, carries less, or nothing."""
    network, link = stage.network, fault.link or ALL_LINKS
    assert network is not None
    entry.target = link
    factor = {"link_down": 0.0, "tcp_fallback": TCP_SHARE}.get(fault.kind, fault.factor)
    network.slow(link, factor)
    stage.until(occurrence, entry, lambda: network.slow(link, 1.0))
    return None


def break_tier(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """A tier of one worker, or of all of them, vanishes, takes no writes, or hands out damaged blocks."""
    tiers, tier = stage.world.block_tiers, Tier(fault.tier)
    assert tiers is not None
    lanes = {stage.names[worker_id]: lane for worker_id, lane in tiers.up.items() if lane.has(tier)}
    name = chosen(occurrence, list(lanes)) if fault.worker == ANY and lanes else fault.worker
    entry.target = tier.value if name is None else f"{tier.value} of {name}"
    hit = [lane for known, lane in lanes.items() if name in (None, known)]
    if not hit:
        return f"no worker{'' if name is None else f' {name}'} that is up has a tier {tier.value}"
    for lane in hit:
        lane.break_tier(tier, fault.kind, fault.rate)

    def mend() -> None:
        for lane in hit:
            lane.mend_tier(tier, fault.kind)

    stage.until(occurrence, entry, mend)
    return None


def check_link(network: Network, link: str, where: str) -> None:
    """Refuse a link that is not there before anything runs."""
    try:
        network.lanes_of(link)
    except ConfigError as why:
        raise ConfigError(f"{where}: {why}") from None


def links_down(stage: Stage) -> tuple[str, ...]:
    """The links that are down now, by the names that the scenario gives them."""
    down = stage.network.down if stage.network is not None else ()
    named = [fault.link for fault in stage.scenario.faults if fault.kind == "link_down" and fault.link]
    found = {next((link for link in named if name == link or name.startswith(f"{link}:")), name): None for name in down}
    return tuple(found)
