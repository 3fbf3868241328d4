"""Engines of other kinds, with their options, in clusters that lose workers and hand over: leaping changes nothing."""

from __future__ import annotations

from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import sglang_settings
from test_engine_against_naive import traces
from test_engine_sglang import engines as sglang_engines
from test_engine_trtllm_and_ranks import BALANCES, FIXED, POLICIES, WAITS, ranked, waiting
from test_faults_programs import Blow, _same, blows, engine_options
from test_legs_programs import Program, programs, same_hand_offs

from twin.engine.settings import EngineSettings, HostTierSettings, SglangSettings, Speculation
from twin.mocker.demand import Row
from twin.perf.polynomial import PolynomialLatency

SPECULATION = Speculation(accept_rates=(0.7, 0.5), seed=3)
TIERS = [
    HostTierSettings(blocks=20, block_bytes=1000, load_bytes_per_s=1e6, trigger=trigger)
    for trigger in ("on_evict", "on_store")
]
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


@given(traces(), engine_options(), blows(ties=True), st.none() | POLICIES, st.sampled_from([1, 3]), BALANCES)
def test_ranks_under_faults_with_ties(
    rows: list[Row], options: dict, program: list[Blow], policy: str | None, interval: int, balance: int
) -> None:
    if options["exclusive_prefill"]:
        interval = 1
    balance = balance if policy is not None else 0
    _same(rows, program, ranked(options, policy, 2, interval, balance), FIXED, "kv", 0.0)


@given(traces(), engine_options(), blows(ties=True), POLICIES, WAITS)
def test_prompts_that_wait_for_others_under_faults(
    rows: list[Row], options: dict, program: list[Blow], policy: str, wait: tuple[int, float]
) -> None:
    _same(rows, program, replace(ranked(options, policy, 1), **waiting(wait)), FIXED, "kv", 0.0)


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


@given(
    programs(),
    st.none() | POLICIES,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.none() | DRAFTS,
    WAITS,
    BALANCES,
)
def test_a_hand_off_between_engines_of_a_kind(
    program: Program,
    policy: str | None,
    sources: int,
    dests: int,
    drafts: Speculation | None,
    wait: tuple[int, float],
    balance: int,
) -> None:
    """Prefill and decode workers of one kind, each with one rank or two; decode workers with drafts or without."""

    def of_kind(settings: EngineSettings, ranks: int) -> EngineSettings:
        plain = ranked({name: getattr(settings, name) for name in SIZES}, policy, ranks)
        if policy is None:
            return plain
        return replace(plain, balance_wait=balance) if ranks > 1 else replace(plain, **waiting(wait))

    prefill, decode = of_kind(program.prefill, sources), of_kind(program.decode, dests)
    if drafts is not None:
        decode = replace(decode, exclusive_prefill=False, speculation=drafts)
    program = replace(program, prefill=prefill, decode=decode)
    same_hand_offs(program)


# ---------------------------------------------------------------- SGLang


OPTIONS = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([1, 2]),
        "speculation": st.sampled_from([None, SPECULATION]),
        "host": st.sampled_from([None, *TIERS]),
    }
)


def tiered(options: dict, more: dict) -> SglangSettings:
    if more["host"] is not None:
        more = more | {"prefix_caching": True}
    if more["ranks"] > 1:
        more = more | {"recv_interval": 1}  # refused with ranks
    return sglang_settings(**options | more)


@given(traces(), sglang_engines(), blows(ties=True), OPTIONS)
def test_sglang_with_options_under_faults(rows: list[Row], options: dict, program: list[Blow], more: dict) -> None:
    _same(rows, program, tiered(options, more), FIXED, "kv", 0.0)


@examples(100)
@given(programs(), sglang_engines(), sglang_engines(), OPTIONS, OPTIONS)
def test_a_hand_off_between_sglang_engines(
    program: Program, prefill: dict, decode: dict, prefill_more: dict, decode_more: dict
) -> None:
    size = {"block_size": program.rules.block_size}
    program = replace(
        program,
        prefill=tiered(prefill | size, prefill_more),
        decode=tiered(decode | size, decode_more),
    )
    same_hand_offs(program)
