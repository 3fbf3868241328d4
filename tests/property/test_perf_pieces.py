"""Leaping and stepping take the same time: in every model, pieces of pure decode steps agree with single steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.perf.coefficients import block_for
from twin.perf.fixed import FixedLatency
from twin.perf.grid import Grid
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.memory import Placement
from twin.perf.models import find_model
from twin.perf.pieces import steps_on_this_side
from twin.perf.polynomial import PolynomialCoefficients, PolynomialLatency
from twin.perf.protocol import LatencyModel
from twin.perf.roofline import RooflineLatency
from twin.perf.table import MeasuredTable, TableLatency, by_batch_and_mean, by_ctx_and_floored_mean

batches = st.integers(1, 300)
lengths = st.integers(1, 20_000)


def step_by_step(model: LatencyModel, batch: int, ctx_tokens: int, steps: int) -> list[float]:
    return [model.step_s([], batch, ctx_tokens + batch * j, 0, 0) for j in range(steps)]


def by_pieces(model: LatencyModel, batch: int, ctx_tokens: int, steps: int) -> tuple[list[float], float]:
    """(every step, their closed-form sum)"""
    seconds: list[float] = []
    total_s = 0.0
    while len(seconds) < steps:
        piece = model.decode_piece(batch, ctx_tokens + batch * len(seconds))
        assert piece.steps >= 1
        taken = min(piece.steps, steps - len(seconds))
        seconds += [piece.g0 + piece.g1 * j + piece.g2 * j * j for j in range(taken)]
        total_s += piece.sum_s(taken)
    return seconds, total_s


def check(model: LatencyModel, batch: int, ctx_tokens: int, steps: int) -> None:
    expected = step_by_step(model, batch, ctx_tokens, steps)
    seconds, total_s = by_pieces(model, batch, ctx_tokens, steps)
    assert seconds == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert total_s == pytest.approx(math.fsum(expected), rel=1e-9)


ROOFLINES = {
    "dense": ("llama-3.1-70b", "h100_sxm", {"tp": 4}),
    "experts": ("qwen3-235b-a22b", "h100_sxm", {"tp": 8, "ep": 8}),
    "windows": ("gpt-oss-120b", "h100_sxm", {}),
    "latent, data parallel": ("deepseek-v3", "h200_sxm", {"dp": 8, "ep": 8}),
    "sparse": ("glm-5", "b200_sxm", {"tp": 8}),
    "linear": ("qwen3.5-397b-a17b", "mi300x", {"tp": 8}),
    "pipeline": ("llama-3.1-405b", "h100_sxm", {"tp": 8, "pp": 2}),
}


@cache
def roofline(name: str) -> RooflineLatency:
    model, gpu, layout = ROOFLINES[name]
    placed = Placement(model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**layout), weights="fp8", kv="bf16")
    return RooflineLatency(placed, block_for("vllm", placed.gpu.family))


@given(name=st.sampled_from(sorted(ROOFLINES)), batch=batches, length=lengths, steps=st.integers(1, 300))
def test_roofline(name: str, batch: int, length: int, steps: int) -> None:
    check(roofline(name), batch, batch * length, steps)


@given(
    name=st.sampled_from(sorted(ROOFLINES)),
    batch=batches,
    length=lengths,
    steps=st.integers(1, 300),
    host=st.sampled_from([0.0, 1e-4, 0.01, 0.02, 0.2]),
)
def test_roofline_that_hides_the_host(name: str, batch: int, length: int, steps: int, host: float) -> None:
    """Wherever the device overtakes the host; no step is longer than with both in turn, nor shorter than either."""
    model, gpu, layout = ROOFLINES[name]
    placed = Placement(model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**layout), weights="fp8", kv="bf16")
    block = block_for("vllm", placed.gpu.family)
    block = replace(block, values=replace(block.values, h0_s=host))
    hidden, in_turn = RooflineLatency(placed, block, overlap=True), RooflineLatency(placed, block)
    check(hidden, batch, batch * length, steps)
    last = batch * (length + steps)
    parts = in_turn.parts([], batch, last, 0, 0)
    device_s = parts.total_s - parts.host_s
    assert hidden.decode_piece(batch, last).g0 == pytest.approx(max(device_s, parts.host_s), rel=1e-12)


@given(batch=batches, length=lengths, steps=st.integers(1, 300))
def test_fixed(batch: int, length: int, steps: int) -> None:
    model = FixedLatency(prefill_s=0.1, prefill_s_per_token=0.001, decode_s=0.01)
    check(model, batch, batch * length, steps)


coefficient = st.floats(-0.1, 0.1, allow_nan=False).map(lambda x: round(x, 6))


@given(
    pool_tokens=st.integers(1, 200_000),
    a=coefficient,
    b=coefficient,
    c=coefficient,
    floor=st.sampled_from([0.0, 0.001, 0.02]),
    batch=batches,
    length=st.integers(1, 2000),
    steps=st.integers(1, 400),
)
def test_polynomial_with_any_coefficients(
    pool_tokens: int, a: float, b: float, c: float, floor: float, batch: int, length: int, steps: int
) -> None:
    """Wherever the pool fills and wherever the floor begins or ends to bind."""
    coefficients = PolynomialCoefficients(
        decode_quadratic_s=a, decode_linear_s=b, decode_constant_s=c, decode_floor_s=floor
    )
    model = PolynomialLatency(pool_tokens, coefficients)
    expected = step_by_step(model, batch, batch * length, steps)
    seconds, total_s = by_pieces(model, batch, batch * length, steps)
    scale = max(abs(a), abs(b), abs(c), floor)
    assert seconds == pytest.approx(expected, rel=1e-9, abs=1e-12 * scale)
    assert total_s == pytest.approx(math.fsum(expected), rel=1e-9, abs=1e-12 * scale * steps)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[float, ...], tuple[float, ...], list[tuple[float, float, float]]]:
    xs = tuple(sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=4))))
    ys = tuple(sorted(draw(st.sets(st.integers(0, 1000), min_size=1, max_size=4))))
    seconds = st.floats(0.001, 0.1)
    return xs, ys, [(x, y, draw(seconds)) for x in xs for y in ys]


def table(points: list[tuple[float, float, float]], *, floored: bool) -> TableLatency:
    names = ("tokens in the KV pool", "mean context") if floored else ("batch", "mean context")
    grid = Grid.of("test", names, points, extrapolate=False)
    axes = by_ctx_and_floored_mean if floored else by_batch_and_mean
    measured = MeasuredTable(
        where="test", prefill=None, decode=grid, decode_axes=axes, notes=(), digest="", rows=len(points)
    )
    return TableLatency(measured, extrapolate=False)


@given(grid=grids(), data=st.data())
def test_table_over_batch_and_mean_context(
    grid: tuple[tuple[float, ...], tuple[float, ...], list[tuple[float, float, float]]], data: st.DataObject
) -> None:
    """From any place inside the points up to their last border, and not a step further."""
    xs, ys, points = grid
    batch = data.draw(st.integers(int(xs[0]), int(xs[-1])))
    length = data.draw(st.integers(int(ys[0]), int(ys[-1])))
    check(table(points, floored=False), batch, batch * length, int(ys[-1]) - length + 1)


@given(grid=grids(), data=st.data())
def test_table_over_pool_and_floored_mean(
    grid: tuple[tuple[float, ...], tuple[float, ...], list[tuple[float, float, float]]], data: st.DataObject
) -> None:
    xs, ys, points = grid
    points = [(1000 * x, y, s) for x, y, s in points]
    batch = data.draw(st.integers(1, 300))
    low, high = max(1000 * int(xs[0]), batch * int(ys[0])), min(1000 * int(xs[-1]), batch * (int(ys[-1]) + 1) - 1)
    if low <= high:
        ctx_tokens = data.draw(st.integers(low, high))
        check(table(points, floored=True), batch, ctx_tokens, min(300, (high - ctx_tokens) // batch + 1))


def seconds(limit_s: float) -> st.SearchStrategy[float]:
    """Up to `limit_s` either way, to the picosecond."""
    return st.floats(-limit_s, limit_s).map(lambda x: round(x, 12))


@given(g0=seconds(10), g1=seconds(1), g2=seconds(0.1))
def test_no_step_of_a_side_is_on_the_other(g0: float, g1: float, g2: float) -> None:
    steps = steps_on_this_side(g0, g1, g2)
    assert steps >= 1
    for j in {0, 1, steps // 3, steps // 2, steps - 1} - {-1}:
        value = g0 + g1 * j + g2 * j * j
        if j < steps and abs(value) > 1e-9 * (abs(g0) + abs(g1) * j + abs(g2) * j * j):
            assert g0 == 0.0 or (value > 0.0) == (g0 > 0.0)
