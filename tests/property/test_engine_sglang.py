"""SGLang in nodes, heaps and leaps does what SGLang written page by page and step by step does.

And driven at random (submits, steps cut short, cancels, hand-offs, tiny pools) it keeps its books.
"""

from __future__ import annotations

import test_engine_machines
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from naive_sglang import Job, NaiveSglang
from simulate import KEY_TOKENS, leap_or_not, sglang_settings, simulate, trace_row
from test_engine_against_naive import _agree, replace_arrival, traces

from twin.engine.settings import HostTierSettings
from twin.mocker.demand import Row
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel


@st.composite
def engines(draw: st.DrawFn) -> dict:
    return {
        "block_size": draw(st.sampled_from([1, 1, 2, 4, 5])),
        "blocks": draw(st.integers(8, 120)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 8])),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "schedule_policy": draw(st.sampled_from(["fifo", "lpm"])),
        "chunked_prefill_size": draw(st.sampled_from([5, 8, 16, 64, 4096])),
        "max_prefill_tokens": draw(st.sampled_from([16, 40, 4096])),
        "schedule_conservativeness": draw(st.sampled_from([0.02, 0.3, 1.0, 2.0])),
        "clip_max_new_tokens": draw(st.sampled_from([2, 8, 4096])),
        "prefill_decode_interval": draw(st.sampled_from([0, 0, 1, 3])),
        "recv_interval": draw(st.sampled_from([1, 1, 2, 3, 7, 20])),
    }


def naive_of(options: dict, latency: LatencyModel, **more: object) -> NaiveSglang:
    return NaiveSglang(
        latency,
        block_size=options["block_size"],
        blocks=options["blocks"],
        max_num_seqs=options["max_num_seqs"],
        policy=options["schedule_policy"],
        chunk=options["chunked_prefill_size"],
        max_prefill=options["max_prefill_tokens"],
        conservativeness=options["schedule_conservativeness"],
        clip=options["clip_max_new_tokens"],
        interval=options["prefill_decode_interval"],
        recv=options["recv_interval"],
        caching=options["prefix_caching"],
        **more,  # type: ignore[arg-type]
    )


def jobs_of(rows: list[Row]) -> list[Job]:
    return [Job(r.row, r.arrival_s or 0.0, _tokens(r), r.osl) for r in rows]


def _naive(rows: list[Row], options: dict, latency: LatencyModel) -> dict[int, Job]:
    engine = naive_of(options, latency)
    engine.run(jobs_of(rows))
    return {job.row: job for job in engine.done}


def _tokens(row: Row) -> list[tuple]:
    return [(key, j) for key in row.keys or [] for j in range(KEY_TOKENS)][: row.isl]


@given(traces(), engines())
def test_fixed_step_times_agree_to_the_instant_with_ties(rows: list[Row], options: dict) -> None:
    latency = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)
    naive = _naive(rows, options, latency)
    seen = simulate(rows, [(sglang_settings(**options), latency)], key_tokens=KEY_TOKENS)
    assert seen.ended.keys() == naive.keys()
    for row, (request, status) in seen.ended.items():
        _agree(naive[row], request, status, 1e-12)


@given(traces(), engines())
def test_context_dependent_step_times_agree(rows: list[Row], options: dict) -> None:
    rows = [replace_arrival(r, (r.arrival_s or 0.0) * 1.000123 + 1e-4 * r.row) for r in rows]
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    naive = _naive(rows, options, latency)
    seen = simulate(rows, [(sglang_settings(**options), latency)], key_tokens=KEY_TOKENS)
    for row, (request, status) in seen.ended.items():
        _agree(naive[row], request, status, 1e-6)


@given(traces(), engines(), st.booleans(), st.sampled_from([0.0, 0.004]))
def test_leaping_changes_no_timestamp(rows: list[Row], options: dict, events: bool, lag_s: float) -> None:
    """Nor what anybody can know of the caches when a request arrives."""
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    leap_or_not(rows, sglang_settings(**options), latency, events=events, lag_s=lag_s)


def test_more_than_128_waiting_are_not_sorted() -> None:
    """The longest prefix goes first only while the queue is short."""
    keys = [1, 2, 3, 4]
    options = {"max_num_seqs": 1, "blocks": 4000, "schedule_policy": "lpm"}
    for others, first in ((20, True), (140, False)):
        rows = [trace_row(0, 0.0, 24, 30, keys)]
        rows += [trace_row(n, 0.1, 24, 1, [100 * n + i for i in range(4)]) for n in range(1, others)]
        rows.append(trace_row(others, 0.1, 24, 1, keys))
        seen = simulate(rows, [(sglang_settings(**options), PolynomialLatency(4000))], key_tokens=KEY_TOKENS)
        admitted = {row: request.sequence.admit_s for row, (request, _) in seen.ended.items() if request.sequence}
        assert (admitted[others] < admitted[1]) is first  # type: ignore[operator]


class SglangMachine(test_engine_machines.EngineMachine):
    """The moves of the other engines' machine, on SGLang: plain, or with ranks, draft tokens and a host tier."""

    @initialize(
        size=st.sampled_from([1, 4]),
        policy=st.sampled_from(["fifo", "lpm"]),
        conservativeness=st.sampled_from([0.02, 1.0]),
        chunk=st.sampled_from([8, 4096]),
        interval=st.sampled_from([0, 2]),
        caching=st.sampled_from([True, True, False]),
        events=st.booleans(),
        ranks=st.sampled_from([1, 1, 2]),
        drafts=st.sampled_from([False, False, True]),
        host=st.sampled_from([None, None, "on_evict", "on_store"]),
        recv=st.sampled_from([1, 3, 10]),
    )
    def start(  # type: ignore[override]
        self,
        size: int,
        policy: str,
        conservativeness: float,
        chunk: int,
        interval: int,
        caching: bool,
        events: bool,
        ranks: int,
        drafts: bool,
        host: str | None,
        recv: int,
    ) -> None:
        blocks = test_engine_machines.BLOCKS if size > 1 else test_engine_machines.BLOCKS * 4
        tier = None
        if host is not None:
            caching = True
            tier = HostTierSettings(blocks=blocks, block_bytes=1000, load_bytes_per_s=1e6, trigger=host)
        settings = sglang_settings(
            block_size=size,
            blocks=blocks,
            max_num_seqs=3,
            schedule_policy=policy,
            schedule_conservativeness=conservativeness,
            chunked_prefill_size=chunk,
            clip_max_new_tokens=8,
            prefill_decode_interval=interval,
            prefix_caching=caching,
            ranks=ranks,
            speculation=test_engine_machines.SPECULATION if drafts else None,
            host=tier,
            recv_interval=recv if ranks == 1 else 1,
        )
        self.begin(settings, events=events and caching)


TestSglangMachine = SglangMachine.TestCase
TestSglangMachine.settings = examples(300, stateful_step_count=30)
