"""Workers that read host memory of each other: leaping changes nothing, tokens are the same as without, each block is
counted once, and nothing is left over: whatever schedules requests, with ranks, across hand-offs, and when workers and
tiers break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import FIXED, Blow, blows, perform
from test_kvbm_faults import tier_blows
from test_kvbm_kinds import KINDS, Kind, sized
from test_kvbm_legs import same, tiered_programs
from test_kvbm_prefetch import ENGINES, mostly
from test_kvbm_world import (
    BLOCK_BYTES,
    DEMANDS,
    LATENCY,
    LINKS,
    nothing_is_left,
    returning,
    run,
    tiers,
    tight,
    widened,
)
from test_legs_programs import Below, Program, carry_out

from policies.cluster.ids import Tier
from policies.kvbm.tiers import TierSpec
from twin.mocker.demand import Row
from twin.mocker.tierplan import PeerPlan, TierPlan
from twin.mocker.world import MockWorld


@st.composite
def wandering(draw: st.DrawFn, among: tuple[int, ...] = (2, 4, 5)) -> list[Row]:
    """Prompts of a few families, one soon after the other: where workers take them in turn, and are not as many as
    families, each family comes to all of them."""
    families = draw(st.sampled_from(among))
    rows, at_ms = [], 0
    for n in range(draw(st.integers(8, 18))):
        at_ms += draw(st.sampled_from([20, 60, 150]))
        keys = [100 * (n % families) + i for i in range(draw(st.integers(3, 5)))]
        rows.append(trace_row(n, at_ms / 1e3, len(keys) * KEY_TOKENS, draw(st.integers(1, 4)), keys))
    return rows


def eager(workers: int = 3) -> st.SearchStrategy[list[TierPlan]]:
    """Host memory that takes all it is offered and is read by everybody at once, and perhaps something below it."""

    def ready(plans: list[TierPlan]) -> list[TierPlan]:
        spec = TierSpec(
            tier=Tier.G2_HOST, capacity_bytes=None, block_bytes=BLOCK_BYTES, latency_s=0.0005, bytes_per_s=1e6
        )
        return [
            replace(
                plan,
                batches=replace(plan.batches, flush_s=0.0),
                registry=None if plan.registry is None else replace(plan.registry, lookup_s=0.001, negative_s=0.0),
                levels=tuple(
                    replace(level, spec=replace(level.spec, latency_s=0.0005)) if at == 0 else level
                    for at, level in enumerate(plan.levels)
                ),
                peers=PeerPlan(
                    spec=spec,
                    layout="a",
                    out=((f"disk:w{n}",),),
                    into=((f"disk:w{n}",),),
                    up=((f"cpu:w{n}/rx",),),
                ),
            )
            for n, plan in enumerate(widened(plans))
        ]

    return tiers(workers).filter(_has_host).map(ready)


def _has_host(plans: list[TierPlan]) -> bool:
    return plans[0].levels[0].spec.tier is Tier.G2_HOST


@st.composite
def reading(draw: st.DrawFn, workers: int = 3) -> list[TierPlan]:
    """Workers with host memory, some of them with another layout; reads cross the wires of both."""
    plans = draw(tiers(workers=workers).filter(_has_host))
    if draw(st.booleans()):
        plans = widened(plans)
    latency_s = draw(st.sampled_from([0.0, 0.004, 0.05]))
    spec = TierSpec(
        tier=Tier.G2_HOST, capacity_bytes=None, block_bytes=BLOCK_BYTES, latency_s=latency_s, bytes_per_s=1e6
    )
    return [
        replace(
            plan,
            peers=PeerPlan(
                spec=spec,
                layout=draw(st.sampled_from(["a", "a", "b"])),
                out=((f"disk:w{n}",),),
                into=((f"disk:w{n}",),),
                up=((f"cpu:w{n}/rx",),),
            ),
        )
        for n, plan in enumerate(plans)
    ]


@examples(100)
@given(
    returning(), tight(), reading(), blows(ties=True), tier_blows(), st.sampled_from(["kv", "round-robin"])
)  # fmt: skip
def test_reading_from_peers_that_are_lost_or_cannot_be_reached(
    rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow], mode: str
) -> None:
    engine = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    leapt, stepped = (
        perform(rows, program + more, replace(engine, leap=leap), FIXED, mode, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes


@examples(100)
@given(DEMANDS, reading())
def test_reading_from_peers(demand: tuple[list[Row], dict], plans: list[TierPlan]) -> None:
    rows, options = demand
    leapt = run(rows, options, plans, leap=True)
    stepped = run(rows, options, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    block_tiers = leapt.world.block_tiers
    assert block_tiers is not None
    assert stepped.world.block_tiers is not None
    figures = block_tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    alone = run(rows, options, [replace(plan, peers=None) for plan in plans], leap=True)
    assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
        row: (status, request.made) for row, (request, status) in alone.ended.items()
    }
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert figures["hits"]["lookups"] == sum(seq.prompt // options["block_size"] for seq in admitted)
    nothing_is_left(leapt.world)
    block_tiers.audit()
    held = sum(
        hi - lo for lane in block_tiers.lanes.values() for _, lo, hi in lane.manager.levels[0].body.store.findable()
    )
    assert len(block_tiers.peers.memory) == held, "on record is what is there"


def read(world: MockWorld) -> int:
    """Blocks that came from peers."""
    assert world.block_tiers is not None
    return int(world.block_tiers.figures()["peers"]["loaded"])


EVERY = [Kind("vllm", lambda options: engine_settings(**options)), *KINDS]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_much_is_read_whatever_schedules(kind: Kind, ranks: int) -> None:
    blocks: list[int] = []

    @examples(15)
    @given(wandering(), ENGINES, eager(), st.data())
    def check(rows: list[Row], options: dict, plans: list[TierPlan], data: st.DataObject) -> None:
        rows, settings = kind.rows(rows, data), replace(sized(kind, options), ranks=ranks, tiers=True)

        def ran(plans: list[TierPlan], leap: bool) -> Seen:
            engines = [(replace(settings, leap=leap), LATENCY)] * 3
            return simulate(rows, engines, key_tokens=KEY_TOKENS, kv_events=True, tiers=plans, links=LINKS)

        leapt, stepped = ran(plans, True), ran(plans, False)
        assert leapt.sinks.requests == stepped.sinks.requests
        assert leapt.watcher.notes == stepped.watcher.notes
        assert leapt.world.block_tiers is not None
        assert stepped.world.block_tiers is not None
        assert leapt.world.block_tiers.figures() == stepped.world.block_tiers.figures()
        alone = ran([replace(plan, peers=None) for plan in plans], True)
        assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
            row: (status, request.made) for row, (request, status) in alone.ended.items()
        }
        nothing_is_left(leapt.world)
        blocks.append(read(leapt.world))

    check()
    mostly(blocks, 0.6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [EVERY[0], EVERY[3], EVERY[6], EVERY[8]], ids=lambda kind: kind.name)
def test_much_is_read_while_workers_and_tiers_break(kind: Kind, ranks: int) -> None:
    blocks: list[int] = []

    @examples(12)
    @given(wandering(), ENGINES, eager(), blows(ties=True), tier_blows(), st.data())
    def check(
        rows: list[Row],
        options: dict,
        plans: list[TierPlan],
        program: list[Blow],
        more: list[Blow],
        data: st.DataObject,
    ) -> None:
        rows, settings = kind.rows(rows, data), replace(sized(kind, options), ranks=ranks, tiers=True)
        worlds: list[MockWorld] = []
        leapt, stepped = (
            perform(
                rows,
                [*program, *more],
                replace(settings, leap=leap),
                LATENCY,
                "round-robin",
                tiers=plans,
                links=LINKS,
                before=lambda world, _: worlds.append(world),
            )
            for leap in (True, False)
        )
        assert leapt[0].requests == stepped[0].requests
        assert leapt[0].decisions == stepped[0].decisions
        assert leapt[1].events == stepped[1].events
        blocks.append(read(worlds[0]))

    check()
    mostly(blocks, 0.4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [EVERY[0], EVERY[3], EVERY[6]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("calm", [True, False])
def test_prefill_and_decode_workers_read_from_each_other(kind: Kind, ranks: int, calm: bool) -> None:
    blocks: list[int] = []

    @examples(12)
    @given(tiered_programs(), wandering((3, 5)), eager(4), blows(ties=True), tier_blows(), st.data())
    def check(
        case: tuple[Program, Below],
        rows: list[Row],
        plans: list[TierPlan],
        blown: list[Blow],
        more: list[Blow],
        data: st.DataObject,
    ) -> None:
        program, below = case
        size = program.rules.block_size
        longest = max(-(-(row.isl + row.osl) // size) for row in rows)
        prefill, decode = (
            replace(kind.of(replace(side, blocks=longest + 4, max_num_batched_tokens=4096)), tiers=True, ranks=ranks)
            for side in (program.prefill, program.decode)
        )
        program = replace(
            program,
            rows=tuple(kind.rows(rows, data)),
            prefill=prefill,
            decode=decode,
            workers=(2, 2),
            router="round-robin",
        )
        _, tiered, world = same((program, replace(below, plans=plans)), None if calm else [*blown, *more])
        blocks.append(read(world))
        if calm:
            nothing_is_left(world)
            without = replace(below, plans=[replace(plan, peers=None) for plan in plans])
            _, plain, _ = carry_out(program, leap=True, below=without)
            assert {row: request.made for row, (request, _) in tiered.items()} == {
                row: request.made for row, (request, _) in plain.items()
            }

    check()
    mostly(blocks, 0.5 if calm else 0.3)
