"""From the configuration to a run with prefill and decode workers: how KV is handed over, and who places the legs.

Nothing here runs: it turns `[disaggregation]` and the worker groups into the plan that the simulated world carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.errors import CapabilityError, ConfigError
from twin.cluster import PEER, Group
from twin.config import Config
from twin.mocker.clock import Clock
from twin.mocker.handoff import HandoffPlan, HandoffRules, Handoffs, Mover, PrivateMover
from twin.mocker.links import Network
from twin.perf.decode_only import DecodeOnlyLatency
from twin.perf.kv_layout import kv_cache, plan_layout
from twin.perf.models import find_model
from twin.topology import Topology, build_topology

GB = 1e9


def legs_of(config: Config, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Prefill groups and decode groups."""
    return (
        [group for group in groups if group.config.role == "prefill"],
        [group for group in groups if group.config.role == "decode"],
    )


def priced_for_legs(config: Config, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups with what compat changes about the steps of decode workers."""
    if config.compat != PEER:
        return groups
    return tuple(_decode_only(group) if group.config.role == "decode" else group for group in groups)


def _decode_only(group: Group) -> Group:
    latency = DecodeOnlyLatency(group.latency)
    return replace(group, latency=latency, workers=tuple(replace(spec, latency=latency) for spec in group.workers))


def handoff_plan(
    config: Config, groups: Sequence[Group], links: tuple[Topology, Network] | None = None
) -> HandoffPlan | None:
    """How KV goes from prefill to decode workers; None when every worker does both. `links` are those of the run, where
    more than hand-offs crosses them."""
    if not config.is_disaggregated:
        return None
    table = config.disaggregation
    prefill, decode = legs_of(config, groups)
    for source in prefill:
        for dest in decode:
            _check_pair(source, dest)
    peer = config.compat == PEER
    return HandoffPlan(
        rules=HandoffRules(
            first_token=table.first_token,
            lease_s=None if peer else table.lease_s,
            missing_only=table.transfer == "missing",
            one_at_a_time=peer,
            block_size=decode[0].settings.block_size,
            overlap_layers=find_model(decode[0].config.model).layers if table.overlap else None,
        ),
        mover=lambda clock: _mover(config, prefill, decode, clock, links),
        decode_kv_events=table.conditional != "off",
    )


def _check_pair(source: Group, dest: Group) -> None:
    a, b = source.config, dest.config
    if a.engine.kind != b.engine.kind:
        raise CapabilityError(
            f"{a.name} runs {a.engine.kind} and {b.name} {b.engine.kind}: no engine reads another one's KV yet"
        )
    if source.settings.block_size != dest.settings.block_size:
        raise ConfigError(
            f"{a.name} has KV blocks of {source.settings.block_size} tokens, {b.name} of {dest.settings.block_size}: "
            "a hand-off needs the same on both sides; set workers.engine.block_size"
        )
    if (a.model, a.kv) != (b.model, b.kv):
        raise ConfigError(
            f"{a.name} serves {a.model} with {a.kv} KV and {b.name} {b.model} with {b.kv}: KV cannot be handed over"
        )


def _mover(
    config: Config,
    prefill: Sequence[Group],
    decode: Sequence[Group],
    clock: Clock,
    links: tuple[Topology, Network] | None,
) -> Mover:
    """A private link for each transfer where a bandwidth is given, else the links of the run, which all share."""
    table = config.disaggregation
    if config.compat == PEER or table.bandwidth_gb_per_s is not None:
        bandwidth = None if table.bandwidth_gb_per_s is None else table.bandwidth_gb_per_s * GB
        return PrivateMover(
            clock,
            bytes_per_token=_bytes_per_token(config, prefill[0]),
            bandwidth_bytes_per_s=bandwidth,
            setup_s=table.setup_s,
        )
    from twin.mocker.movers import LinkMover

    layouts = {
        (source.config.name, dest.config.name): plan_layout(
            kv_cache(find_model(source.config.model), source.config.kv), source.config.tp, dest.config.tp
        )
        for source in prefill
        for dest in decode
    }
    topology, network = links or _links_of(config, (*prefill, *decode), clock)
    return LinkMover(
        network,
        topology,
        layouts,
        setup_s=table.setup_s,
        bytes_per_token=table.kv_bytes_per_token,
        each_rank=_links_may_slow(config),
    )


def _links_may_slow(config: Config) -> bool:
    """Whether a scenario of this run slows links, or takes them down."""
    if config.faults.path is None:
        return False
    from twin.scenario.reading import read_scenario

    return any(fault.link is not None for fault in read_scenario(config.faults.path).faults)


def _links_of(config: Config, groups: Sequence[Group], clock: Clock) -> tuple[Topology, Network]:
    topology = build_topology(config, groups)
    assert topology is not None  # every group has a way for its KV
    return topology, Network(clock, topology.links)


def _bytes_per_token(config: Config, group: Group) -> int:
    given = config.disaggregation.kv_bytes_per_token
    if given is not None:
        return given
    cache = kv_cache(find_model(group.config.model), group.config.kv)
    layout = plan_layout(cache, group.config.tp, group.config.tp)
    return -(-layout.wire_bytes(1_000_000) // 1_000_000)


def lease_warnings(config: Config, groups: Sequence[Group], handoffs: Handoffs) -> list[str]:
    """Leases of KV that are too short for what they are to outlast: the wait for room, and the transfer."""
    lease_s = handoffs.rules.lease_s
    if lease_s is None:
        return []
    warnings = []
    prefill, decode = legs_of(config, groups)
    alone_s = max(
        handoffs.alone_s(source.workers[0].worker_id, dest.workers[0].worker_id, _longest_prompt_tokens(dest))
        for source in prefill
        for dest in decode
    )
    if alone_s > lease_s:
        warnings.append(
            f"disaggregation.lease_s = {lease_s:g} is shorter than the transfer of the longest prompt, {alone_s:.3g} s "
            "alone on its links: let it be longer than that and the longest wait for room together"
        )
    if handoffs.leases_expired:
        warnings.append(
            f"leases that ended before anybody had fetched the KV, or said so (disaggregation.lease_s = {lease_s:g}): "
            f"{handoffs.leases_expired:,}; what was not fetched was computed again"
        )
    return warnings


def _longest_prompt_tokens(group: Group) -> int:
    limit = group.settings.max_model_len
    longest = group.settings.longest_prompt_tokens
    return longest if limit is None else min(limit, longest)
