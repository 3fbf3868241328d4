"""Tiers below workers with several ranks: leaping changes nothing, tokens are those of a run without tiers, each block
is looked up once, and nothing is left over. Host memory and all below it belongs to the worker, whichever rank asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import Blow, blows, perform
from test_kvbm_faults import tier_blows
from test_kvbm_kinds import KINDS as OTHERS
from test_kvbm_kinds import TIERS, Kind, sized
from test_kvbm_world import LATENCY, LINKS, nothing_is_left, returning, tight

from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.tierplan import TierPlan

MODES = st.sampled_from(["kv", "round-robin"])
KINDS = [Kind("vllm", lambda options: engine_settings(**options)), *OTHERS]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
RANKS = st.tuples(st.sampled_from([2, 3]), st.sampled_from([1, 1, 3]))


def ranked(kind: Kind, options: dict, ranks: tuple[int, int]) -> EngineSettings:
    return replace(sized(kind, options), ranks=ranks[0], prefill_interval=ranks[1])


def run(rows: list[Row], settings: EngineSettings, plans: Sequence[TierPlan] | None, *, leap: bool = True) -> Seen:
    settings = replace(settings, leap=leap, tiers=plans is not None)
    return simulate(
        rows,
        [(settings, LATENCY)] * 2,
        key_tokens=KEY_TOKENS,
        kv_events=True,
        tiers=plans,
        links=LINKS if plans is not None else (),
    )


@EACH
@examples(60)
@given(returning(), tight(), TIERS, RANKS, st.data())
def test_leaping_changes_nothing_and_tokens_are_the_same(
    kind: Kind, rows: list[Row], options: dict, plans: list[TierPlan], ranks: tuple[int, int], data: st.DataObject
) -> None:
    rows, settings = kind.rows(rows, data), ranked(kind, options, ranks)
    leapt, stepped = run(rows, settings, plans), run(rows, settings, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.watcher.held == stepped.watcher.held
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    figures = leapt.world.block_tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    assert len(leapt.ended) == len(rows)
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert figures["hits"]["lookups"] == sum(seq.prompt // settings.block_size for seq in admitted)
    nothing_is_left(leapt.world)
    plain = run(rows, settings, None)
    assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
        row: (status, request.made) for row, (request, status) in plain.ended.items()
    }


@EACH
@examples(60)
@given(
    returning(),
    tight(),
    TIERS,
    RANKS,
    blows(ties=True),
    tier_blows(),
    st.sampled_from(["kv", "round-robin"]),
    st.data(),
)
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    kind: Kind,
    rows: list[Row],
    options: dict,
    plans: list[TierPlan],
    ranks: tuple[int, int],
    program: list[Blow],
    more: list[Blow],
    mode: str,
    data: st.DataObject,
) -> None:
    rows, settings = kind.rows(rows, data), replace(ranked(kind, options, ranks), tiers=True)
    leapt, stepped = (
        perform(rows, program + more, replace(settings, leap=leap), LATENCY, mode, workers=2, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes
