"""A limit on the adapters of a batch: against an engine written step by step, with leaping and without, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_engine import Job, NaiveEngine, tokens_of
from simulate import engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS, engines, traces
from test_legs_programs import Program, carry_out, programs

from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.handoff import HandoffRules
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency

LATENCY = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)


@st.composite
def adapted(draw: st.DrawFn) -> list[Row]:
    """Rows that ask for one of three adapters, or for none."""
    return [row._replace(lora=draw(st.sampled_from([None, "", "a", "b", "c"]))) for row in draw(traces())]


def told(rows: list[Row], settings: EngineSettings) -> list[tuple[object, ...]]:
    seen = simulate(rows, [(settings, LATENCY)], key_tokens=KEY_TOKENS)
    return [seen.sinks.requests[row.row] for row in rows]


@examples(300)
@given(adapted(), engines(), st.integers(1, 3))
def test_who_is_passed_over_and_who_enters_agrees_with_the_naive_engine(
    rows: list[Row], options: dict, max_loras: int
) -> None:
    naive = NaiveEngine(
        LATENCY,
        block_size=options["block_size"],
        blocks=options["blocks"],
        max_num_seqs=options["max_num_seqs"],
        budget=options["max_num_batched_tokens"],
        caching=options["prefix_caching"],
        chunked=options["chunked_prefill"] and not options["exclusive_prefill"],
        exclusive=options["exclusive_prefill"],
        preemption=options["preemption"],
        max_loras=max_loras,
    )
    jobs = [
        Job(r.row, r.arrival_s or 0.0, tokens_of(r.keys or [], KEY_TOKENS, r.isl), r.osl, lora=r.lora) for r in rows
    ]
    naive.run(jobs)
    seen = simulate(rows, [(engine_settings(**options, max_loras=max_loras), LATENCY)], key_tokens=KEY_TOKENS)
    for job in naive.done:
        seq = seen.ended[job.row][0].sequence
        assert seq is not None
        assert (seq.outputs, seq.readmissions, seq.reused_tokens) == (job.outputs, job.readmissions, job.reused)
        ours, theirs = (seq.admit_s, seq.first_token_s, seq.last_token_s), (job.admit_s, job.first_s, job.last_s)
        assert ours == pytest.approx(theirs, abs=1e-12)


@examples(300)
@given(adapted(), engines(), st.integers(1, 3), st.integers(1, 2))
def test_leaping_changes_nothing_under_a_limit(rows: list[Row], options: dict, max_loras: int, ranks: int) -> None:
    settings = engine_settings(**options, max_loras=max_loras, ranks=ranks)
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    leapt, stepped = (
        simulate(rows, [(replace(settings, leap=leap), latency)] * 2, key_tokens=KEY_TOKENS) for leap in (True, False)
    )
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.events == stepped.events


@examples(100)
@given(adapted(), engines())
def test_a_limit_that_never_binds_changes_nothing(rows: list[Row], options: dict) -> None:
    assert told(rows, engine_settings(**options, max_loras=3)) == told(rows, engine_settings(**options))


@examples(150)
@given(programs(), st.data())
def test_leaping_changes_nothing_under_a_limit_on_decode_workers(program: Program, data: st.DataObject) -> None:
    rows = tuple(row._replace(lora=data.draw(st.sampled_from([None, "a", "b"]))) for row in program.rows)
    limited = replace(
        program,
        rows=rows,
        decode=replace(program.decode, max_loras=1),
        rules=replace(program.rules, one_at_a_time=False),
    )
    leapt, *_ = carry_out(limited, leap=True)
    stepped, *_ = carry_out(limited, leap=False)
    assert leapt.requests == stepped.requests
    assert {cells[6] for cells in leapt.requests.values()} <= {"completed", "rejected", "failed"}


def test_one_adapter_at_a_time_by_hand() -> None:
    """Ten tokens each cost 10 ms of prefill, then 2 decode steps of 10 ms. b waits for a to end; a second a and a plain
    request pass it, together with the first."""
    latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
    rows = [trace_row(n, 0.0, 10, 3, lora=lora) for n, lora in enumerate(["a", "b", "a", None, "b"])]
    seen = simulate(rows, [(engine_settings(max_loras=1), latency)])
    assert seen.ms("admit_s") == [0, 50, 0, 0, 50]
    assert seen.ms("last_token_s") == [50, 90, 50, 50, 90]


def test_a_newcomer_enters_though_everybody_who_waits_was_passed_over() -> None:
    """b waits for a to end (1.00 s); the a of 0.505 s enters at the end of the step that is running, 0.51 s."""
    latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
    rows = [trace_row(0, 0.0, 10, 100, lora="a"), trace_row(1, 0.0, 10, 3, lora="b")]
    rows.append(trace_row(2, 0.505, 10, 3, lora="a"))
    for leap in (True, False):
        seen = simulate(rows, [(engine_settings(max_loras=1, leap=leap), latency)])
        assert seen.ms("admit_s") == [0, 1010, 5]


@pytest.mark.parametrize(("max_loras", "admit_ms"), [(1, [15, 65, 15]), (2, [15, 15, 15])])
def test_a_prompt_that_came_from_elsewhere_waits_for_a_slot_too(max_loras: int, admit_ms: list[float]) -> None:
    """Three prompts computed at once arrive after 15 ms; a makes its five tokens by 65 ms, and b enters then."""
    engine = engine_settings(block_size=4, blocks=100, max_loras=max_loras)
    program = Program(
        rows=tuple(trace_row(n, 0.0, 10, 5, lora=lora) for n, lora in enumerate(["a", "b", "a"])),
        prefill=replace(engine, max_loras=None),
        decode=engine,
        workers=(3, 1),
        rules=HandoffRules(first_token="decode", lease_s=None, missing_only=False, one_at_a_time=False, block_size=4),
        router="round-robin",
        order="prefill_first",
        move_s=0.0,
        shared=False,
    )
    for leap in (True, False):
        _, ended, _ = carry_out(program, leap=leap)
        admitted = [ended[row][0].sequence for row in range(3)]
        assert [round((seq.admit_s or 0.0) * 1e3, 6) for seq in admitted if seq is not None] == admit_ms
