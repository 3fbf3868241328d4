"""Tiers below prefill and decode workers, in random programs of hand-offs with losses and cancellations: tokens are
those of a run without tiers, each prompt block is looked up once, nothing is used before it is there, nothing is left
over, and leaping changes nothing.

Where hand-offs cross the links between devices and host memory, they wait for each other there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_faults_programs import Blow, blows
from test_kvbm_faults import tier_blows
from test_kvbm_world import LINKS, nothing_is_left, returning, tiers, widened
from test_legs_programs import Below, Program, carry_out, programs

from twin.mocker.handoff import Load
from twin.mocker.links import Network, Part
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.perf.cargo import KV


@dataclass(frozen=True)
class HostMover:
    """Hand-offs leave over the host link of one worker and enter over that of the other."""

    network: Network

    def move(self, load: Load, on_done: Any) -> Any:
        parts = (self._part(load),)
        return self.network.start_all(parts, on_done=on_done, cargo=KV)

    def alone_s(self, load: Load) -> float:
        part = self._part(load)
        return self.network.estimate_s(part.links, part.bytes)

    @staticmethod
    def _part(load: Load) -> Part:
        lanes = (f"cpu:w{load.source}/tx", f"cpu:w{load.dest}/rx")
        return Part(lanes, max(round(load.tokens * load.share), 1) * 500)


@st.composite
def tiered_programs(draw: st.DrawFn) -> tuple[Program, Below]:
    """Hand-offs of prompts that come again, between workers with prefix caching and tiers."""
    program = draw(programs())
    size = program.rules.block_size
    rows = program.rows
    if draw(st.integers(0, 3)):
        rows = tuple(draw(returning()))
    longest = max(-(-(row.isl + row.osl) // size) for row in rows)
    program = replace(
        program,
        rows=rows,
        rules=replace(program.rules, one_at_a_time=False),
        prefill=replace(program.prefill, prefix_caching=True, tiers=True, blocks=longest + draw(st.integers(0, 6))),
        decode=replace(program.decode, prefix_caching=True, tiers=True, blocks=longest + draw(st.integers(0, 12))),
    )
    mover = draw(st.sampled_from([None, HostMover]))
    plans = draw(tiers(sum(program.workers)))
    if draw(st.booleans()):
        plans = widened(plans)
    return program, Below(plans, LINKS, mover)


def ran(
    case: tuple[Program, Below], blown: list[Blow] | None = None, *, leap: bool = True
) -> tuple[MemorySinks, dict, MockWorld]:
    program, below = case
    acts = [(blow.later_s(), blow.act) for blow in blown or ()]
    return carry_out(program, leap=leap, acts=acts, below=below)


def same(case: tuple[Program, Below], blown: list[Blow] | None = None) -> tuple[MemorySinks, dict, MockWorld]:
    leapt, a, world = ran(case, blown)
    stepped, b, other = ran(case, blown, leap=False)
    assert leapt.requests == stepped.requests
    assert leapt.decisions == stepped.decisions
    for row, (_, one) in a.items():
        _, two = b[row]
        if one is not None and two is not None:
            for stage in ("held_s", "reserved_s", "activated_s", "released_s"):
                assert getattr(one, stage) == getattr(two, stage)
    assert world.block_tiers is not None
    assert other.block_tiers is not None
    assert world.block_tiers.figures() == other.block_tiers.figures()
    return leapt, a, world


@examples(120)
@given(tiered_programs())
def test_leaping_changes_nothing_and_each_block_is_looked_up_once(case: tuple[Program, Below]) -> None:
    program, _ = case
    _, ended, world = same(case)
    assert sorted(ended) == [row.row for row in program.rows]
    nothing_is_left(world)
    assert world.block_tiers is not None
    hits = world.block_tiers.figures()["hits"]
    first = [request.admitted for request, _ in ended.values()]
    size = program.rules.block_size
    computed_again = sum(bool(handoff is not None and handoff.expired) for _, handoff in ended.values())
    asked = sum(seq.prompt // size for seq in first if seq is not None and seq.admit_s is not None)
    if not world.handoffs.leases_expired and not computed_again:  # type: ignore[union-attr]
        assert hits["lookups"] == asked
    for worker in world.workers.values():
        assert not worker.engine.pool.active
    for request, handoff in ended.values():
        seq = request.sequence
        if handoff is None or handoff.activated_s is None or seq is None:
            continue
        assert seq.admit_s is not None
        assert handoff.activated_s <= seq.admit_s, "decoded before its KV was there"
        assert seq.outputs == request.row.osl


@examples(120)
@given(tiered_programs())
def test_tiers_change_when_tokens_come_and_not_which(case: tuple[Program, Below]) -> None:
    program, _ = case
    plain = replace(program, prefill=replace(program.prefill, tiers=False), decode=replace(program.decode, tiers=False))
    _, tiered, _ = ran(case)
    _, without, _ = carry_out(plain, leap=True)
    assert {row: request.made for row, (request, _) in tiered.items()} == {
        row: request.made for row, (request, _) in without.items()
    }


@examples(120)
@given(tiered_programs(), blows(ties=True), tier_blows())
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    case: tuple[Program, Below], blown: list[Blow], more: list[Blow]
) -> None:
    _, _, world = same(case, [*blown, *more])
    for worker in world.workers.values():
        if not worker.down and not world.partitions.is_cut_off(worker.worker_id):
            assert not worker.engine._loads  # type: ignore[attr-defined]
