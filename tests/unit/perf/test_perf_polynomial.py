"""The polynomial model against the worked examples of the peer's rule and against the peer's own output.

The examples' figures are printed with nine decimals of a millisecond, the peer rounds each part to a nanosecond; both
are well inside the 1e-6 that parity allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from twin.perf.polynomial import DEFAULT_COEFFICIENTS, PolynomialCoefficients, PolynomialLatency
from twin.perf.protocol import FOREVER_STEPS, PrefillChunk

POOL_TOKENS = 1_048_576
MODEL = PolynomialLatency(POOL_TOKENS)
PARITY = 1e-6


def prefill_ms(model: PolynomialLatency, chunks: Iterable[tuple[int, int]]) -> float:
    return 1e3 * model.step_s([PrefillChunk(new, past, 0, True) for new, past in chunks], 0, 0, 0, 0)


def decode_ms(model: PolynomialLatency, batch: int, ctx_tokens: int, steps: int = 1) -> float:
    """The sum of the next decode steps, in closed form piece by piece."""
    total_s = 0.0
    while steps:
        piece = model.decode_piece(batch, ctx_tokens)
        taken = min(steps, piece.steps)
        total_s += piece.sum_s(taken)
        steps -= taken
        ctx_tokens += batch * taken
    return 1e3 * total_s


def single_steps_ms(model: PolynomialLatency, batch: int, ctx_tokens: int, steps: int) -> float:
    return 1e3 * sum(model.step_s([], batch, ctx_tokens + j * batch, 0, 0) for j in range(steps))


def about(value_ms: float) -> object:
    return pytest.approx(value_ms, rel=PARITY)


def test_a_lone_request() -> None:
    assert prefill_ms(MODEL, [(1024, 0)]) == about(32.490712)
    assert decode_ms(MODEL, 1, 1025, 63) == about(365.045076)


def test_a_small_pool_that_fills() -> None:
    small = PolynomialLatency(20 * 64)
    assert prefill_ms(small, [(600, 0)]) + decode_ms(small, 1, 601, 199) == about(5503.587120)


def test_a_second_request_arrives_during_a_leap() -> None:
    first_token_ms = prefill_ms(MODEL, [(1024, 0)])
    assert first_token_ms + decode_ms(MODEL, 1, 1025, 11) == about(96.214024)
    admitted_ms = first_token_ms + decode_ms(MODEL, 1, 1025, 12)
    assert admitted_ms == about(102.007361)
    mixed_ms = 1e3 * MODEL.step_s([PrefillChunk(1024, 0, 0, True)], 1, 1037, 0, 0)
    assert admitted_ms + mixed_ms - 100.0 == about(40.291461)
    first_ends_ms = admitted_ms + mixed_ms + decode_ms(MODEL, 2, 1038 + 1025, 50)
    assert first_ends_ms == about(432.725479)
    assert first_ends_ms + decode_ms(MODEL, 1, 1025 + 50, 13) - 100.0 == about(408.068964)


def test_context_beyond_the_pool_costs_as_much_as_a_full_pool() -> None:
    small = PolynomialLatency(1280)
    piece = small.decode_piece(4, 900)
    assert piece.steps == 95
    assert small.decode_piece(4, 900 + 95 * 4) == (pytest.approx(0.03401), 0.0, 0.0, FOREVER_STEPS)
    assert decode_ms(small, 4, 900, 200) == about(6692.970578)
    assert decode_ms(small, 4, 900, 200) == pytest.approx(single_steps_ms(small, 4, 900, 200), rel=1e-14)


def test_means_are_floored_separately() -> None:
    assert prefill_ms(MODEL, [(1000, 0), (1001, 0)]) == prefill_ms(MODEL, [(2000, 0)]) == about(48.552296)


def test_a_hit_changes_the_floor_of_the_means() -> None:
    # isl 1000 and 1001 (mean 1000), prefix 65 and 0 (mean 32): 2 * (1000 - 32) = 1936 tokens; 935 + 1001 would do too.
    assert prefill_ms(MODEL, [(935, 65), (1001, 0)]) == prefill_ms(MODEL, [(1936, 0)])
    # isl 1001 and 1002 (mean 1001), prefix 64 and 0 (mean 32): 2 * (1001 - 32) = 1938, although 1939 are computed.
    assert prefill_ms(MODEL, [(937, 64), (1002, 0)]) == prefill_ms(MODEL, [(1938, 0)])


def test_earlier_chunks_cost_nothing_again() -> None:
    assert prefill_ms(MODEL, [(8192, 0)]) + prefill_ms(MODEL, [(808, 8192)]) == about(198.181413)


def test_recomputed_outputs_are_free_in_prefill_and_the_request_decodes_with_its_whole_length() -> None:
    resumed = MODEL.step_s([PrefillChunk(100, 0, 28, True)], 0, 0, 1, 128)
    assert 1e3 * resumed == about(prefill_ms(MODEL, [(100, 0)]) + decode_ms(MODEL, 1, 128))
    assert MODEL.step_s([PrefillChunk(0, 100, 28, False)], 0, 0, 0, 0) == 0.0


def test_a_full_hit_pays_decoding_only() -> None:
    assert 1e3 * PolynomialLatency(16384 * 32).step_s([], 1, 128, 0, 0) == about(5.753185)


def test_the_floor_holds_where_the_parabola_dips_below_it() -> None:
    # 10 ms - 40 u + 40 u^2: below 1 ms for u between 0.342 and 0.658.
    dips = PolynomialLatency(
        1000,
        PolynomialCoefficients(decode_quadratic_s=0.04, decode_linear_s=-0.04, decode_constant_s=0.010),
    )
    assert 1e3 * dips.step_s([], 1, 500, 0, 0) == 1.0
    assert 1e3 * dips.step_s([], 1, 300, 0, 0) == pytest.approx(1.6)
    assert decode_ms(dips, 3, 1, 600) == pytest.approx(single_steps_ms(dips, 3, 1, 600), rel=1e-12)


def test_the_provenance_names_the_peer_and_what_is_unphysical() -> None:
    line = MODEL.provenance.line()
    assert line.startswith("polynomial · default coefficients, pool 1,048,576 tokens · engine Dynamo 1.6.1 mocker")
    assert any("ignores the context before it" in note for note in MODEL.provenance.notes)
    changed = PolynomialLatency(64, PolynomialCoefficients(decode_floor_s=0.0))
    assert "given coefficients" in changed.provenance.source
    assert DEFAULT_COEFFICIENTS.decode_floor_s == 0.001


def golden(shared: Path, name: str) -> Sequence[dict[str, float]]:
    cases = json.loads((shared / "parity" / "goldens.json").read_text())["trace"]
    return next(case["requests"] for case in cases if case["case"] == name)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("case", "isl", "osl", "pool_tokens", "chunks"),
    [
        ("first_token", 1000, 3, POOL_TOKENS, [(1000, 0)]),
        ("chunked_9000", 9000, 3, POOL_TOKENS, [(8192, 0), (808, 8192)]),
        ("near_full_pool", 600, 200, 20 * 64, [(600, 0)]),
    ],
)
def test_the_peer_ran_one_request(
    shared: Path, case: str, isl: int, osl: int, pool_tokens: int, chunks: list[tuple[int, int]]
) -> None:
    (request,) = golden(shared, case)
    model = PolynomialLatency(pool_tokens)
    first_ms = sum(prefill_ms(model, [chunk]) for chunk in chunks)
    assert first_ms == about(request["first_token_ms"])
    assert decode_ms(model, 1, isl + 1) == about(request["ttst_ms"])
    assert first_ms + decode_ms(model, 1, isl + 1, osl - 1) == about(request["last_token_ms"])


@pytest.mark.shared
def test_the_peer_ran_two_requests_at_once(shared: Path) -> None:
    requests = golden(shared, "mean_floor")
    first_ms = prefill_ms(MODEL, [(1000, 0), (1001, 0)])
    for request in requests:
        assert first_ms == about(request["first_token_ms"])
        assert first_ms + decode_ms(MODEL, 2, 1001 + 1002, 2) == about(request["last_token_ms"])


@pytest.mark.shared
def test_the_peer_ran_a_mixed_step(shared: Path) -> None:
    first, second = golden(shared, "mixed_pass")
    mixed_ms = 1e3 * MODEL.step_s([PrefillChunk(500, 0, 0, True)], 1, 1002, 0, 0)
    assert second["first_admit_ms"] + mixed_ms == about(second["first_token_ms"])
    assert second["last_token_ms"] + decode_ms(MODEL, 1, 1003, 17) == about(first["last_token_ms"])
