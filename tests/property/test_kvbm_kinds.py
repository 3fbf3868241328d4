"""Tiers below engines of every kind, alone, under faults and across hand-offs, in random programs.

Whatever the scheduler: tokens are those of a run without tiers, each full block of a prompt is looked up once, blocks
add up, nothing is left over, and leaping changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, sglang_settings, simulate
from test_engine_against_naive import KEY_TOKENS
from test_engine_trtllm_and_ranks import trtllm_settings
from test_faults_programs import Blow, blows, perform
from test_kvbm_faults import tier_blows
from test_kvbm_legs import same, tiered_programs
from test_kvbm_world import LATENCY, LINKS, nothing_is_left, returning, tiers, tight, widened
from test_legs_programs import Below, Program, carry_out

from policies.cluster.ids import Tier
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.tiers import TierSpec
from twin.engine.settings import EngineSettings, Speculation
from twin.mocker.demand import Row, _of_adapter
from twin.mocker.handoff import HandoffRules
from twin.mocker.tierplan import LevelPlan, TierPlan

TIERS = st.one_of(tiers(), tiers().map(widened))
DEMANDS = st.tuples(returning(), tight())
DRAFTS = Speculation(accept_rates=(0.7, 0.5), seed=3)


@dataclass(frozen=True)
class Kind:
    """How to make settings of one kind of engine from sizes. `adapted`: its rows ask for adapters."""

    name: str
    make: Callable[[dict], EngineSettings]
    adapted: bool = False

    def of(self, settings: EngineSettings) -> EngineSettings:
        """The same sizes in this kind."""
        return self.make({name: getattr(settings, name) for name in SIZES})

    def rows(self, rows: list[Row] | tuple[Row, ...], data: st.DataObject) -> list[Row]:
        if not self.adapted:
            return list(rows)
        loras = [data.draw(st.sampled_from([None, "a", "b"])) for _ in rows]
        return [
            row._replace(lora=lora, keys=_of_adapter(row.keys, lora)) for row, lora in zip(rows, loras, strict=True)
        ]


SIZES = (
    "block_size",
    "blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunked_prefill",
    "exclusive_prefill",
    "preemption",
)


def drafts(options: dict) -> EngineSettings:
    return engine_settings(**options | {"exclusive_prefill": False}, speculation=DRAFTS)


def one_adapter(options: dict) -> EngineSettings:
    return engine_settings(**options, max_loras=1)


def trtllm(policy: str, **more: object) -> Callable[[dict], EngineSettings]:
    return lambda options: trtllm_settings(options, policy, **more)


def sglang(**more: object) -> Callable[[dict], EngineSettings]:
    """A pool of the same size has room for every prompt and a token more, or the request is refused."""
    return lambda options: sglang_settings(
        **{name: options[name] for name in ("block_size", "blocks", "max_num_seqs")}, **more
    )


KINDS = [
    Kind("drafts", drafts),
    Kind("one adapter", one_adapter, adapted=True),
    Kind("guaranteed_no_evict", trtllm("guaranteed_no_evict")),
    Kind("max_utilization", trtllm("max_utilization")),
    Kind("trtllm with drafts", trtllm("guaranteed_no_evict", speculation=DRAFTS)),
    Kind("sglang fifo", sglang(schedule_policy="fifo")),
    Kind("sglang lpm", sglang(schedule_policy="lpm", schedule_conservativeness=0.3)),
    Kind("sglang in chunks", sglang(chunked_prefill_size=16, max_prefill_tokens=40, clip_max_new_tokens=2)),
    Kind("sglang with drafts", sglang(speculation=DRAFTS, prefill_decode_interval=1)),
]
WAITING = [
    Kind("trtllm gathers prompts", trtllm("guaranteed_no_evict", batch_wait_iters=5, batch_wait_ratio=0.9)),
    Kind("sglang looks now and then", sglang(schedule_policy="lpm", recv_interval=7)),
]
"""Prompts wait while others decode; refused with ranks."""
EACH = pytest.mark.parametrize("kind", [*KINDS, *WAITING], ids=lambda kind: kind.name)


def run(rows: list[Row], settings: EngineSettings, plans: list[TierPlan] | None, *, leap: bool = True) -> Seen:
    settings = replace(settings, leap=leap, tiers=plans is not None)
    links: Any = LINKS if plans is not None else ()
    return simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS, kv_events=True, tiers=plans, links=links)


def sized(kind: Kind, options: dict) -> EngineSettings:
    return kind.make({name: value for name, value in options.items() if name in SIZES})


@EACH
@examples(40)
@given(DEMANDS, TIERS, st.data())
def test_leaping_changes_nothing_and_every_request_ends(
    kind: Kind, demand: tuple[list[Row], dict], plans: list[TierPlan], data: st.DataObject
) -> None:
    rows, settings = kind.rows(demand[0], data), sized(kind, demand[1])
    leapt, stepped = run(rows, settings, plans), run(rows, settings, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.watcher.held == stepped.watcher.held
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    assert leapt.world.block_tiers.figures() == stepped.world.block_tiers.figures()
    assert len(leapt.ended) == len(rows)
    hits = leapt.world.block_tiers.figures()["hits"]
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert hits["lookups"] == sum(seq.prompt // settings.block_size for seq in admitted)
    for worker in leapt.world.workers.values():
        worker.engine.audit()
    nothing_is_left(leapt.world)


@EACH
@examples(40)
@given(DEMANDS, TIERS, st.data())
def test_tiers_change_when_tokens_come_and_not_which(
    kind: Kind, demand: tuple[list[Row], dict], plans: list[TierPlan], data: st.DataObject
) -> None:
    rows, settings = kind.rows(demand[0], data), sized(kind, demand[1])
    tiered, plain = run(rows, settings, plans), run(rows, settings, None)
    for what in (lambda request, status: status, lambda request, _: request.made):
        assert {row: what(*end) for row, end in tiered.ended.items()} == {
            row: what(*end) for row, end in plain.ended.items()
        }


@EACH
@examples(40)
@given(returning(), tight(), TIERS, blows(ties=True), tier_blows(), st.sampled_from(["kv", "round-robin"]), st.data())
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    kind: Kind,
    rows: list[Row],
    options: dict,
    plans: list[TierPlan],
    program: list[Blow],
    more: list[Blow],
    mode: str,
    data: st.DataObject,
) -> None:
    rows, settings = kind.rows(rows, data), replace(sized(kind, options), tiers=True)
    leapt, stepped = (
        perform(rows, program + more, replace(settings, leap=leap), LATENCY, mode, workers=2, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes


@EACH
@examples(40)
@given(tiered_programs(), blows(ties=True), tier_blows(), st.booleans(), st.data())
def test_hand_offs(
    kind: Kind,
    case: tuple[Program, Below],
    blown: list[Blow],
    more: list[Blow],
    calm: bool,
    data: st.DataObject,
) -> None:
    """Prefill and decode workers of one kind; in calm, tokens are those of a run without tiers."""
    program, below = case
    prefill, decode = (replace(kind.of(side), tiers=True) for side in (program.prefill, program.decode))
    program = replace(program, rows=tuple(kind.rows(program.rows, data)), prefill=prefill, decode=decode)
    if not calm:
        same((program, below), [*blown, *more])
        return
    _, tiered, world = same((program, below))
    nothing_is_left(world)
    _, plain, _ = carry_out(
        replace(program, prefill=replace(prefill, tiers=False), decode=replace(decode, tiers=False)), leap=True
    )
    assert {row: request.made for row, (request, _) in tiered.items()} == {
        row: request.made for row, (request, _) in plain.items()
    }


def test_who_hears_first_of_prompts_that_come_does_not_depend_on_leaps() -> None:
    """A prompt comes to w1 at the instant at which one of its decode steps ends, and one of w0 with the same blocks
    is over: both would store them in what they share, and w0 plans its next step first. Found in random programs."""
    prompts = [
        (18, 1, [200, 201, 202]),
        (8, 1, [300, 301]),
        (16, 1, [0, 1, 2]),
        (24, 3, [300, 301, 302, 1007]),
        (8, 3, [200, 201]),
        (33, 1, [300, 301, 302, 303, 304, 1010]),
    ]
    rows = tuple(
        Row(n, str(n), 0.0, isl, osl, keys, None, None, None, 0, None) for n, (isl, osl, keys) in enumerate(prompts)
    )
    make = sglang(schedule_policy="lpm", schedule_conservativeness=0.3)
    prefill, decode = (
        replace(make({"block_size": 2, "blocks": blocks, "max_num_seqs": 8}), tiers=True) for blocks in (21, 33)
    )
    store = TierSpec(
        tier=Tier.G4_REMOTE,
        capacity_bytes=400_000,
        block_bytes=1000,
        latency_s=0.0005,
        bytes_per_s=1e6,
        is_shared=True,
    )
    plans = [
        TierPlan(
            levels=(
                LevelPlan(
                    spec=store,
                    offload="presence",
                    trigger="on_complete",
                    eviction="fifo",
                    when_full="evict",
                    down=(("remote",),),
                    hops=((("remote", f"cpu:w{worker}/rx"),),),
                    shared_key="remote",
                ),
            ),
            rule=Rule(),
            batches=BatchRules(max_blocks=2, min_blocks=2, flush_s=0.0),
            min_lfu_count=1,
            decay_s=0.1,
        )
        for worker in range(3)
    ]
    program = Program(
        rows=rows,
        prefill=prefill,
        decode=decode,
        workers=(1, 2),
        rules=HandoffRules(first_token="decode", lease_s=None, missing_only=False, one_at_a_time=False, block_size=2),
        router="least-loaded",
        order="prefill_first",
        move_s=0.0,
        shared=False,
    )
    same((program, Below(plans, LINKS, None)))
