"""The fixed model: costs that add up by hand, with the golden figures of the per-pass engine."""

from __future__ import annotations

import pytest

from twin.perf.fixed import FixedLatency
from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.010)
PER_PASS = FixedLatency(prefill_s=0.030, prefill_s_per_token=0.0, decode_s=0.010)


def prompt(new: int, past: int = 0, recomputed: int = 0, *, ends: bool = True) -> PrefillChunk:
    return PrefillChunk(new, past, recomputed, ends)


def test_toy_prompt_costs_a_millisecond_per_token() -> None:
    assert TOY.step_s([prompt(300)], 0, 0, 0, 0) == pytest.approx(0.3)
    assert TOY.step_s([prompt(300), prompt(33, past=64)], 0, 0, 0, 0) == pytest.approx(0.333)


def test_decoding_beside_a_prompt_adds_one_decode() -> None:
    assert TOY.step_s([prompt(100)], 7, 900, 0, 0) == pytest.approx(0.110)


def test_prefill_is_charged_once_per_step_and_not_per_request() -> None:
    assert PER_PASS.step_s([prompt(100), prompt(100)], 0, 0, 0, 0) == 0.030


def test_a_decode_below_a_millisecond_keeps_its_cost() -> None:
    quick = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.0, decode_s=0.0005)
    assert quick.step_s([], 1, 9001, 0, 0) == 0.0005


def test_recomputed_outputs_cost_per_token_but_not_per_step() -> None:
    model = FixedLatency(prefill_s=0.030, prefill_s_per_token=0.001, decode_s=0.010)
    assert model.step_s([prompt(0, past=64, recomputed=5, ends=False)], 0, 0, 0, 0) == pytest.approx(0.005)


def test_a_request_that_comes_back_counts_as_decoding() -> None:
    assert PER_PASS.step_s([prompt(100, recomputed=20)], 0, 0, 1, 120) == pytest.approx(0.040)


def test_decode_steps_are_equal_for_ever() -> None:
    assert TOY.decode_piece(9, 12345) == DecodePiece(0.010, 0.0, 0.0, FOREVER_STEPS)
    assert TOY.decode_piece(9, 12345).sum_s(1000) == pytest.approx(10.0)
