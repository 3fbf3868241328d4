"""An engine with a host tier: leaping changes nothing, blocks are conserved, and a tier never makes an answer wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, leap_or_not, simulate, trace_row
from test_engine_against_naive import engines, traces

from twin.engine.offload import OffloadEngine
from twin.engine.settings import HostTierSettings
from twin.mocker.demand import Row
from twin.perf.fixed import FixedLatency


@given(
    traces(),
    engines(),
    st.integers(1, 30),
    st.sampled_from([1e-6, 4e-4, 5e-3]),
    st.sampled_from(["on_evict", "on_store"]),
    st.booleans(),
)
def test_leaping_changes_nothing_and_every_request_ends(
    rows: list[Row], options: dict, blocks: int, load_s: float, trigger: str, events: bool
) -> None:
    tier = HostTierSettings(blocks=blocks, block_bytes=1000, load_bytes_per_s=1000 / load_s, trigger=trigger)
    settings = engine_settings(**options | {"prefix_caching": True}, host=tier)
    latency = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)
    leapt = leap_or_not(rows, settings, latency, events=events)
    assert len(leapt.ended) == len(rows)
    for worker in leapt.world.workers.values():
        assert isinstance(worker.engine, OffloadEngine)
        worker.engine.host.audit()
        assert not worker.engine._loads, "a load was begun and never taken up"


def test_a_load_is_waited_for_beside_the_queue_and_others_pass() -> None:
    tier = HostTierSettings(blocks=8, block_bytes=1000, load_bytes_per_s=1000.0, trigger="on_evict")
    settings = engine_settings(block_size=16, blocks=6, host=tier)
    latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
    rows = [
        trace_row(0, 0.0, 66, 1, [1, 2, 3, 4, 5]),
        trace_row(1, 1.0, 66, 1, [11, 12, 13, 14, 15]),
        trace_row(2, 2.0, 66, 1, [1, 2, 3, 4, 5]),
        trace_row(3, 2.0, 8, 1, [21]),
    ]
    seen = simulate(rows, [(settings, latency)], key_tokens=16)
    waited = seen.ended[2][0].sequence
    passed = seen.ended[3][0].sequence
    assert waited is not None
    assert passed is not None
    assert waited.host_blocks > 0
    assert waited.admit_s == 2.0 + waited.host_blocks * 1.0, "a second a block"
    assert passed.admit_s == 2.0


def test_whoever_has_been_loaded_goes_first_when_nobody_else_can() -> None:
    """The request that runs is preempted for want of a block while one is loaded behind it: the head needs what that
    one holds, and nothing runs that could give way."""
    tier = HostTierSettings(blocks=4, block_bytes=100, load_bytes_per_s=1e6, trigger="on_evict")
    settings = engine_settings(block_size=1, blocks=66, max_num_seqs=1, max_num_batched_tokens=3, host=tier)
    latency = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)

    def row(number: int, isl: int, osl: int, family: int) -> Row:
        return trace_row(number, 0.0, isl, osl, [family, *range(1, 9)])

    rows = [row(0, 30, 1, 0), row(1, 30, 10, 100), row(2, 30, 1, 100), row(3, 30, 1, 0), row(4, 53, 12, 0)]
    seen = simulate(rows, [(settings, latency)], key_tokens=6)
    assert [status for _, (_, status) in sorted(seen.ended.items())] == ["completed"] * 5
    preempted, loaded = seen.ended[4][0].sequence, seen.ended[3][0].sequence
    assert preempted is not None
    assert loaded is not None
    assert preempted.readmissions == 1
    assert loaded.host_blocks > 0
    assert loaded.last_token_s < preempted.last_token_s  # type: ignore[operator]
