"""TensorRT-LLM, ranks and speculation in clusters that lose workers and hand prompts over: leaping changes nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_engine_against_naive import traces
from test_engine_trtllm_and_ranks import FIXED, POLICIES, ranked
from test_faults_programs import Blow, _same, blows, engine_options
from test_legs_programs import Program, carry_out, programs

from twin.engine.settings import EngineSettings, Speculation
from twin.mocker.demand import Row
from twin.perf.polynomial import PolynomialLatency

SPECULATION = Speculation(accept_rates=(0.7, 0.5), seed=3)
DRAFTS = st.sampled_from([SPECULATION, replace(SPECULATION, in_prefill=True)])
SIZES = (
    "block_size",
    "blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefix_caching",
    "chunked_prefill",
    "exclusive_prefill",
    "preemption",
)


@given(traces(), engine_options(), blows(ties=True), st.none() | POLICIES, st.sampled_from([1, 3]))
def test_ranks_under_faults_with_ties(
    rows: list[Row], options: dict, program: list[Blow], policy: str | None, interval: int
) -> None:
    if options["exclusive_prefill"]:
        interval = 1
    _same(rows, program, ranked(options, policy, 2, interval), FIXED, "kv", 0.0)


@given(traces(), engine_options(), blows(ties=False), st.none() | POLICIES)
def test_ranks_under_faults_where_context_costs(
    rows: list[Row], options: dict, program: list[Blow], policy: str | None
) -> None:
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    _same(rows, program, ranked(options, policy, 2), latency, "round-robin", 0.0)


@given(traces(), engine_options(), blows(ties=True), st.none() | POLICIES, st.sampled_from([1, 2]), DRAFTS)
def test_drafts_under_faults(
    rows: list[Row], options: dict, program: list[Blow], policy: str | None, ranks: int, drafts: Speculation
) -> None:
    plain = ranked(options | {"exclusive_prefill": False}, policy, ranks)
    _same(rows, program, replace(plain, speculation=drafts), FIXED, "kv", 0.0)


@given(programs(), st.none() | POLICIES, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.none() | DRAFTS)
def test_a_hand_off_between_engines_of_a_kind(
    program: Program, policy: str | None, sources: int, dests: int, drafts: Speculation | None
) -> None:
    """Prefill and decode workers of one kind, each with one rank or two; decode workers with drafts or without."""

    def of_kind(settings: EngineSettings, ranks: int) -> EngineSettings:
        return ranked({name: getattr(settings, name) for name in SIZES}, policy, ranks)

    prefill, decode = of_kind(program.prefill, sources), of_kind(program.decode, dests)
    if drafts is not None:
        decode = replace(decode, exclusive_prefill=False, speculation=drafts)
    program = replace(program, prefill=prefill, decode=decode)
    leapt, one = carry_out(program, leap=True)
    stepped, other = carry_out(program, leap=False)
    assert leapt.requests == stepped.requests
    assert leapt.decisions == stepped.decisions
    for row, request in one.items():
        a, b = request.handoff, other[row].handoff
        if a is not None and b is not None:
            assert (a.held_s, a.reserved_s, a.activated_s, a.released_s) == (
                b.held_s,
                b.reserved_s,
                b.activated_s,
                b.released_s,
            )
