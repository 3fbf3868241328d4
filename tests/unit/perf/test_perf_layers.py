"""Layers around a latency model, by hand: ranks, drafts, padding, pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.config import LatencyConfig
from twin.perf.build import build_latency
from twin.perf.fixed import FixedLatency
from twin.perf.layers import PaddedLatency, PipelinedLatency, RankLatency, VerifyLatency
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel, PrefillChunk

FIXED = FixedLatency(prefill_s=0.004, prefill_s_per_token=0.001, decode_s=0.010)
CURVED = PolynomialLatency(100_000)
WHOLE = PrefillChunk(8, 0, 0, True)
PART = PrefillChunk(8, 0, 0, False)


def roofline(**layout: int) -> LatencyModel:
    return build_latency(
        LatencyConfig(),
        engine="vllm",
        model="llama-3.1-70b",
        gpu="h100_sxm",
        weights="fp8",
        kv="bf16",
        pool_tokens=1,
        **{"tp": 4} | layout,
    )


# ---------------------------------------------------------------- padding


def test_a_batch_pays_for_the_next_captured_size() -> None:
    inner = roofline()
    padded = PaddedLatency(inner, (1, 2, 4, 8), 2.0)
    assert padded.decode_piece(8, 8000).g0 == inner.decode_piece(8, 8000).g0
    assert padded.decode_piece(5, 8000).g0 == inner.decode_piece(8, 8000).g0 > inner.decode_piece(5, 8000).g0
    assert padded.step_s((), 5, 8000, 0, 0) == inner.decode_piece(8, 8000).g0


def test_above_the_largest_captured_size_steps_are_eager() -> None:
    padded = PaddedLatency(FIXED, (1, 2, 4), 2.5)
    assert padded.decode_piece(4, 100).g0 == 0.010
    assert padded.decode_piece(5, 100).g0 == 0.025


def test_steps_with_prompts_are_not_padded() -> None:
    padded = PaddedLatency(roofline(), (256,), 2.0)
    assert padded.step_s((WHOLE,), 3, 300, 0, 0) == roofline().step_s((WHOLE,), 3, 300, 0, 0)


@given(st.integers(1, 40), st.integers(1, 60_000), st.integers(1, 400))
def test_a_padded_piece_is_what_asking_again_each_step_says(batch: int, ctx_tokens: int, step: int) -> None:
    """The context grows by the requests that are there, not by those that are padded."""
    padded = PaddedLatency(CURVED, (1, 16, 32), 1.5)
    piece = padded.decode_piece(batch, ctx_tokens)
    j = min(step, piece.steps - 1)
    again = padded.decode_piece(batch, ctx_tokens + j * batch).g0
    assert piece.g0 + piece.g1 * j + piece.g2 * j * j == pytest.approx(again, rel=1e-12)


# ---------------------------------------------------------------- pipeline


def test_with_enough_requests_a_pipeline_is_full() -> None:
    """Two stages, 16 requests: two microbatches of 8 take the time of one of them through both stages."""
    inner = roofline(tp=2, pp=2)
    piped = PipelinedLatency(inner, 2)
    assert piped.decode_piece(16, 16_000).g0 == inner.decode_piece(8, 8_000).g0


def test_one_request_leaves_the_other_stages_idle() -> None:
    inner = roofline(tp=2, pp=2)
    piped = PipelinedLatency(inner, 2)
    assert piped.decode_piece(1, 1_000).g0 == inner.decode_piece(1, 1_000).g0
    assert piped.step_s((WHOLE,), 0, 0, 0, 0) == inner.step_s((WHOLE,), 0, 0, 0, 0)


def test_a_prompt_in_chunks_takes_stages_plus_chunks_less_one_stage_times() -> None:
    """TTFT of c chunks = (PP + c - 1) stages: 3 chunks of 0.012 s through 4 stages."""
    piped = PipelinedLatency(FIXED, 4)
    ttft_s = 2 * piped.step_s((PART,), 0, 0, 0, 0) + piped.step_s((WHOLE,), 0, 0, 0, 0)
    assert ttft_s == pytest.approx((4 + 3 - 1) * 0.012 / 4)


def test_a_chunk_is_not_split_over_microbatches() -> None:
    piped = PipelinedLatency(FIXED, 4)
    long = PrefillChunk(100, 0, 0, True)
    assert piped.step_s((long, WHOLE), 6, 600, 0, 0) == pytest.approx(0.004 + 0.100)


@given(st.integers(1, 40), st.integers(40, 60_000), st.integers(1, 400), st.integers(2, 8))
def test_a_pipelined_piece_grows_with_its_microbatches(batch: int, ctx_tokens: int, step: int, stages: int) -> None:
    """Up to the tokens that a context does not divide by."""
    piped = PipelinedLatency(CURVED, stages)
    piece = piped.decode_piece(batch, ctx_tokens)
    j = min(step, piece.steps - 1)
    again = piped.decode_piece(batch, ctx_tokens + j * batch).g0
    assert piece.g0 + piece.g1 * j + piece.g2 * j * j == pytest.approx(again, rel=1e-4)


# ---------------------------------------------------------------- ranks and drafts


def test_a_rank_without_experts_is_priced_by_its_own_requests() -> None:
    """Two ranks of TP 2 with 4 requests each: what a TP 2 worker alone takes for 4."""
    rank, alone = RankLatency(roofline(tp=2, dp=2), 2), roofline(tp=2)
    assert rank.decode_piece(4, 4_000).g0 == pytest.approx(alone.decode_piece(4, 4_000).g0, rel=0.02)
    assert rank.step_s((WHOLE,), 0, 0, 0, 0) == pytest.approx(alone.step_s((WHOLE,), 0, 0, 0, 0), rel=0.02)


def test_verifying_drafts_costs_their_products_and_no_more_context() -> None:
    inner = roofline()
    verify = VerifyLatency(inner, 3)
    plain, more = inner.decode_piece(8, 80_000).g0, inner.decode_piece(32, 80_000).g0
    assert verify.decode_piece(8, 80_000).g0 == more > plain
    assert more < 1.5 * plain, "a memory-bound step hardly notices its drafts"


def test_layers_say_what_they_did() -> None:
    piped = PipelinedLatency(PaddedLatency(VerifyLatency(RankLatency(FIXED, 2), 3), (1, 2, 4), 2.0), 4)
    notes = " ".join(piped.provenance.notes)
    for word in ("2 ranks", "3 drafts", "3 captured sizes", "pipeline of 4"):
        assert word in notes
