"""A leap is written as one row: what that row says of its steps is what they say themselves, computed one by one."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, sglang_settings, simulate, trace_row

from reports.columns import Columns
from reports.energy import use_s
from reports.record import STEP_COLUMNS
from reports.report import PowerMeta
from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.perf.polynomial import PolynomialLatency

LATENCY = PolynomialLatency(pool_tokens=3000)
ENGINES = {
    "vllm": engine_settings(block_size=4, blocks=200, max_num_batched_tokens=64),
    "sglang": sglang_settings(blocks=800, chunked_prefill_size=64, prefill_decode_interval=3),
    "sglang looks now and then": sglang_settings(blocks=800, chunked_prefill_size=64, recv_interval=10),
}
POWER = PowerMeta(
    tdp_w=700.0,
    token_multiply_s=1e-3,
    step_read_s=5e-4,
    ctx_token_read_s=5e-6,
    experts_read_s=1e-4,
    expert_missed=0.9,
)
"""One request multiplies longer than it reads up to 213 tokens of context: leaps pass from one to the other."""


@st.composite
def demand(draw: st.DrawFn) -> list[Row]:
    at_s, rows = 0.0, []
    for n in range(draw(st.integers(1, 12))):
        at_s += draw(st.integers(0, 400)) / 1e3
        rows.append(trace_row(n, at_s, draw(st.integers(1, 300)), draw(st.integers(1, 120))))
    return rows


def steps(rows: list[Row], engine: EngineSettings, *, leap: bool) -> list[dict]:
    """The rows of steps.parquet, without those of single gaps."""
    told = simulate(rows, [(replace(engine, leap=leap), LATENCY)]).sinks.steps
    return [row for row in (dict(zip(STEP_COLUMNS, one, strict=True)) for one in told) if row["kind"] != "gap"]


def one_by_one(told: list[dict]) -> list[tuple[int, int, int]]:
    """Decodes, context tokens and prompt tokens of every step."""
    return [
        (row["decodes"], row["ctx_tokens"] + j * row["decodes"], row["prefill_tokens"])
        for row in told
        for j in range(row["steps"])
    ]


def full_power_s(told: list[dict]) -> float:
    batch = pa.RecordBatch.from_pylist(told)
    columns = Columns(batch.num_rows, lambda name: [batch.column(name)])  # type: ignore[arg-type]
    return float(use_s(columns, columns.floats("steps") > 0, POWER).sum())


@pytest.mark.parametrize("engine", ENGINES)
@examples(150)
@given(demand())
def test_a_leap_says_what_its_steps_say(engine: str, rows: list[Row]) -> None:
    leapt, stepped = (steps(rows, ENGINES[engine], leap=leap) for leap in (True, False))
    assert one_by_one(leapt) == one_by_one(stepped)
    assert full_power_s(leapt) == pytest.approx(full_power_s(stepped), rel=1e-6)


def test_what_limits_a_step_changes_within_a_leap() -> None:
    """The law above is about something: the leap as a whole would be 1 % off."""
    told = steps([trace_row(0, 0.0, 150, 120)], ENGINES["vllm"], leap=True)
    whole = [row for row in told if row["kind"] == "leap"]
    assert len(whole) == 1
    first, last = whole[0]["ctx_tokens"], whole[0]["ctx_tokens"] + whole[0]["steps"] - 1
    read_s = [0.6 * (5e-4 + 1e-4 * (1 - 0.9) + 5e-6 * ctx_tokens) for ctx_tokens in (first, last)]
    assert read_s[0] < 1e-3 < read_s[1]
