"""The engine in runs, heaps and leaps does what the engine written block by block and step by step does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_engine import Job, NaiveEngine, tokens_of
from simulate import KEY_TOKENS, engine_settings, leap_or_not, simulate, trace_row

from twin.mocker.demand import Row
from twin.mocker.world import OpenRequest
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency


@st.composite
def traces(draw: st.DrawFn) -> list[Row]:
    """Up to a dozen rows with shared beginnings, many at the same instant."""
    rows = []
    at_ms = 0
    for n in range(draw(st.integers(1, 12))):
        at_ms += draw(st.sampled_from([0, 0, 5, 10, 10, 40, 55]))
        depth = draw(st.integers(0, 8))
        family = draw(st.integers(0, 2))
        keys = [family * 100 + i for i in range(depth)] + [1000 + 20 * n + i for i in range(draw(st.integers(1, 4)))]
        isl = draw(st.integers(1, len(keys) * KEY_TOKENS))
        rows.append(trace_row(n, at_ms / 1e3, isl, draw(st.integers(1, 25)), keys))
    return rows


@st.composite
def engines(draw: st.DrawFn) -> dict:
    chunked = draw(st.booleans())
    exclusive = draw(st.booleans())
    return {
        "block_size": draw(st.sampled_from([1, 2, 4, 5, 8])),
        "blocks": draw(st.integers(4, 40)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([3, 8, 16, 64, 4096])),
        "prefix_caching": draw(st.booleans()),
        "chunked_prefill": chunked,
        "exclusive_prefill": exclusive,
        "preemption": draw(st.sampled_from(["lifo", "fifo"])),
    }


def _naive(rows: list[Row], options: dict, latency) -> dict[int, Job]:
    engine = NaiveEngine(
        latency,
        block_size=options["block_size"],
        blocks=options["blocks"],
        max_num_seqs=options["max_num_seqs"],
        budget=options["max_num_batched_tokens"],
        caching=options["prefix_caching"],
        chunked=options["chunked_prefill"] and not options["exclusive_prefill"],
        exclusive=options["exclusive_prefill"],
        preemption=options["preemption"],
    )
    jobs = [Job(r.row, r.arrival_s or 0.0, tokens_of(r.keys or [], KEY_TOKENS, r.isl), r.osl) for r in rows]
    engine.run(jobs)
    return {job.row: job for job in engine.done}


def _agree(job: Job, request: OpenRequest, status: str, tolerance_s: float) -> None:
    seq = request.sequence
    assert seq is not None
    expected = "failed" if job.failed else "completed" if job.last_s is not None else "rejected"
    assert status == expected, seq
    if status == "rejected":
        return
    assert (seq.outputs, seq.reused_tokens, seq.readmissions) == (job.outputs, job.reused, job.readmissions), seq
    assert (seq.cached_tokens or 0) == job.first_reuse
    for ours, theirs in ((seq.admit_s, job.admit_s), (seq.first_token_s, job.first_s), (seq.last_token_s, job.last_s)):
        if theirs is None:
            assert ours is None
        else:
            assert ours == pytest.approx(theirs, abs=tolerance_s), (seq, job.row)


@given(traces(), engines())
def test_fixed_step_times_agree_to_the_instant_with_ties(rows: list[Row], options: dict) -> None:
    latency = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)
    naive = _naive(rows, options, latency)
    seen = simulate(rows, [(engine_settings(**options), latency)], key_tokens=KEY_TOKENS)
    assert seen.ended.keys() == naive.keys()
    for row, (request, status) in seen.ended.items():
        _agree(naive[row], request, status, 1e-12)


@given(traces(), engines())
def test_context_dependent_step_times_agree(rows: list[Row], options: dict) -> None:
    rows = [replace_arrival(r, (r.arrival_s or 0.0) * 1.000123 + 1e-4 * r.row) for r in rows]
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    naive = _naive(rows, options, latency)
    seen = simulate(rows, [(engine_settings(**options), latency)], key_tokens=KEY_TOKENS)
    for row, (request, status) in seen.ended.items():
        _agree(naive[row], request, status, 1e-6)


@given(traces(), engines(), st.booleans(), st.sampled_from([0.0, 0.004]))
def test_leaping_changes_no_timestamp(rows: list[Row], options: dict, events: bool, lag_s: float) -> None:
    """Nor what anybody can know of the caches when a request arrives."""
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    leap_or_not(rows, engine_settings(**options), latency, events=events, lag_s=lag_s)


def replace_arrival(row: Row, arrival_s: float) -> Row:
    return row._replace(arrival_s=arrival_s)
