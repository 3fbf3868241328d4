"""Links that slow down or carry nothing, and KV tiers that vanish, fill up or hand out damaged blocks.

They change what links and tiers carry; who waits for that, or does without, is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.cluster.ids import Tier
from policies.errors import ConfigError
from twin.mocker.faults.stage import Entry, Stage
from twin.mocker.links import ALL_LINKS, Network, Use
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
    before = network.use()

    def note() -> None:
        """Which lane was the fullest while this lasted."""
        if entry.fullest_link is not None:
            return
        now = network.use()
        shares = {lane: _share(before[lane], now[lane]) for lane in network.lanes_of(link)}
        entry.fullest_link = max(shares, key=lambda lane: shares[lane])
        entry.fullest_share = shares[entry.fullest_link]

    def over() -> None:
        note()
        network.slow(link, 1.0)

    network.slow(link, factor)
    stage.at_end.append(note)
    stage.until(occurrence, entry, over)
    return None


def _share(before: Use, now: Use) -> float:
    """Of what a lane could carry since, how much it did; a lane that is down carries nothing."""
    offered_bytes = now.offered_bytes - before.offered_bytes
    return (now.moved_bytes - before.moved_bytes) / offered_bytes if offered_bytes > 0.0 else 0.0


def told(entries: Iterable[Entry]) -> list[str]:
    """Which link was the fullest while links were slow, one line for each fault that says so."""
    return [
        f"{entry.fault}: {entry.kind} of {entry.target}: the fullest link while it lasted was {entry.fullest_link}, at "
        f"{entry.fullest_share:.1%} of what it could carry then"
        for entry in entries
        if entry.fullest_link is not None and entry.fullest_share
    ]


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
