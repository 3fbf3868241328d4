"""The linear model: each thing that a step computes has its price, and they add up by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from policies.errors import ConfigError
from twin.perf.build import build_latency
from twin.perf.linear import LinearCoefficients, LinearLatency
from twin.perf.protocol import FOREVER_STEPS, LatencyModel, PrefillChunk

PRICES = LinearCoefficients(
    step_s=1.0,
    prefill_s_per_token=0.01,
    prefill_s_per_pair=1e-5,
    prefill_s_per_prompt=0.5,
    decode_s_per_request=0.1,
    decode_s_per_ctx_token=1e-4,
)


def prompt(new: int, past: int = 0, recomputed: int = 0) -> PrefillChunk:
    return PrefillChunk(new, past, recomputed, True)


def model(**keys: object) -> LatencyModel:
    settings = SimpleNamespace(model="linear", params=keys)
    return build_latency(
        settings, engine="vllm", model="llama-3.1-8b", gpu="h100_sxm", weights="bf16", kv="bf16", pool_tokens=1000
    )


@pytest.mark.parametrize(
    ("chunks", "batch", "ctx", "resumed", "resumed_ctx", "seconds"),
    [
        ([prompt(100)], 0, 0, 0, 0, 1 + 1.0 + 1e-5 * 100 * 50 + 0.5),
        ([prompt(100, past=300)], 0, 0, 0, 0, 1 + 1.0 + 1e-5 * 100 * 350 + 0.5),
        ([prompt(100), prompt(20)], 0, 0, 0, 0, 1 + 1.2 + 1e-5 * (5000 + 200) + 1.0),
        ([prompt(100)], 3, 900, 0, 0, 1 + 1.0 + 0.05 + 0.5 + 0.3 + 0.09),
        ([prompt(0)], 2, 10, 0, 0, 1 + 0.2 + 0.001),
        ([prompt(10, recomputed=10)], 0, 0, 1, 20, 1 + 0.2 + 1e-5 * 20 * 10 + 0.5 + 0.1 + 0.002),
    ],
)
def test_a_step_costs_what_its_parts_cost(
    chunks: list[PrefillChunk], batch: int, ctx: int, resumed: int, resumed_ctx: int, seconds: float
) -> None:
    assert LinearLatency(PRICES).step_s(chunks, batch, ctx, resumed, resumed_ctx) == pytest.approx(seconds)


def test_decode_steps_grow_with_their_context_and_sum_to_single_ones() -> None:
    latency = LinearLatency(PRICES)
    piece = latency.decode_piece(4, 1000)
    assert piece.steps == FOREVER_STEPS
    single = [latency.step_s([], 4, 1000 + 4 * step, 0, 0) for step in range(50)]
    assert piece.sum_s(50) == pytest.approx(sum(single))


def test_a_given_model_says_that_it_is_an_assumption_and_a_fitted_one_what_it_rests_on() -> None:
    given = model(step_s=0.01).provenance
    assert given.line() == "linear · given coefficients · error band none: an assumption, not a measurement"
    fitted = model(
        step_s=0.01, source="fitted to a", engine_version="vllm 1", error_band="10%",
        measured_batch=4.0, measured_prompt_tokens=100.0, measured_context_tokens=150.0,
    ).provenance  # fmt: skip
    assert fitted.line() == "linear · fitted to a · engine vllm 1 · error band 10%"
    assert fitted.reach is not None
    assert fitted.reach.beyond_load(batch=5, prompt_tokens=100, context_tokens=150) == ["batch of 5: measured up to 4"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "every coefficient is 0; give at least one of step_s, "),
        ({"step_s": -1.0}, "step_s"),
        ({"stepp_s": 1.0}, "step_s"),
        ({"step_s": 1.0, "measured_batch": 4.0}, "measured_prompt_tokens is missing"),
    ],
)
def test_bad_keys_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        model(**keys)
