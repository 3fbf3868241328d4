"""Routed ranks in simulated runs: a request runs where it was sent, leaping changes nothing, ranks that are not routed
are taken in turn as ever, and prompts that return find more than with ranks in turn."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from builders import router, router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import KEY_TOKENS, InTurn, Seen, engine_settings, simulate
from test_kvbm_world import LATENCY, returning, tight
from test_policies_guesses_world import families, hit_rate

from policies.cluster.controller import Policy
from policies.cluster.ids import RequestId
from twin.engine.ranks import RankedEngine
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.world import MockWorld, Observation


class Run:
    """A run of two workers, and which rank every request ran on."""

    def __init__(
        self, rows: list[Row], settings: EngineSettings, policy: Policy, *, apart: bool, key_tokens: int = KEY_TOKENS
    ) -> None:
        self.ran_on: dict[RequestId, int] = {}
        self.seen: Seen = simulate(
            rows,
            [(settings, LATENCY)] * 2,
            key_tokens=key_tokens,
            policies=[policy],
            observe=Observation(engine_events=True, ranks_apart=apart),
            before=self._watch,
            strict=True,
        )

    def _watch(self, world: MockWorld) -> None:
        for worker in world.workers.values():
            assert isinstance(worker.engine, RankedEngine)
            for at, rank in enumerate(worker.engine.ranks):
                rank.submit = self._noting(at, rank.submit)  # type: ignore[method-assign]

    def _noting(self, at: int, submit):  # type: ignore[no-untyped-def]
        def noted(seq: Sequence) -> str | None:
            self.ran_on[seq.request_id] = at
            return submit(seq)

        return noted

    @property
    def routed(self) -> dict[RequestId, int]:
        """The ranks that decisions name."""
        found = {}
        for row in self.seen.sinks.decisions:
            rank = re.match(r"rank (\d+): ", row[7])
            if rank is not None:
                found[row[2]] = int(rank[1])
        return found


def kv(options: dict, **changes: object) -> Policy:
    return router("kv", block_size=options["block_size"], index="engine", **changes)


@examples(150)
@given(returning(), tight(), st.integers(2, 3))
def test_a_request_runs_on_the_rank_that_it_was_sent_to(rows: list[Row], options: dict, ranks: int) -> None:
    settings = engine_settings(**options | {"prefix_caching": True}, ranks=ranks)
    leapt, stepped = (
        Run(rows, replace(settings, leap=leap), kv(options, route_ranks=True), apart=True) for leap in (True, False)
    )
    assert leapt.routed == leapt.ran_on
    assert leapt.routed.keys() == {row.request_id for row in rows}
    assert leapt.seen.sinks.requests == stepped.seen.sinks.requests
    assert leapt.seen.sinks.decisions == stepped.seen.sinks.decisions


@examples(100)
@given(returning(), tight())
def test_without_routed_ranks_both_indexes_decide_the_same_and_ranks_take_turns(rows: list[Row], options: dict) -> None:
    settings = engine_settings(**options | {"prefix_caching": True}, ranks=2)
    engine = Run(rows, settings, kv(options), apart=False)
    told = simulate(
        rows,
        [(settings, LATENCY)] * 2,
        key_tokens=KEY_TOKENS,
        policies=[router("kv", block_size=options["block_size"])],
    )
    assert engine.seen.sinks.decisions == told.sinks.decisions
    assert engine.seen.sinks.requests == told.sinks.requests
    assert not engine.routed


@pytest.mark.parametrize("ranks", [2, 4])
def test_prompts_that_return_find_more_where_ranks_are_chosen(ranks: int) -> None:
    settings = engine_settings(blocks=580 // ranks + 60, ranks=ranks)
    rates = [
        hit_rate(Run(families(300), settings, policy, apart=apart, key_tokens=16).seen)
        for policy, apart in (
            (router("kv", block_size=16, index="engine", route_ranks=True), True),
            (router("kv", block_size=16, index="engine"), False),
            (InTurn(), False),
        )
    ]
    shown = f"hit rate {rates[0]:.3f} with chosen ranks, {rates[1]:.3f} with ranks in turn, {rates[2]:.3f} blind"
    assert rates[0] > rates[1] + 0.1, shown
    assert router_settings("kv").route_ranks is False
