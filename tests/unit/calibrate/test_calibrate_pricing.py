"""The vectorised roofline is the roofline, step for step; its slopes are slopes; shapes keep the means of a loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from closed_loop import roofline, row, simulated

from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement
from twin.calibrate.pricing import COSTS, Pricing, cost_row
from twin.calibrate.protocol import BALANCE_STEPS
from twin.calibrate.schedules import schedule
from twin.calibrate.shapes import ShapeLog, Shapes, window_of
from twin.calibrate.unit_time import Asked
from twin.perf.coefficients import Coefficients, named_block
from twin.perf.costs import step_costs
from twin.perf.protocol import PrefillChunk

KNOWN = Coefficients(
    e_bw=0.8, e_gemm=0.6, e_moe_bw=0.7, e_moe=0.2, e_kv=0.6, e_attn=0.4, alpha_s=5e-6, e_link=0.5, t_launch_s=40e-6,
    t_moe_s=30e-6, h0_s=4e-4, h_seq_s=2e-5, h_prefill_s=5e-3, t_half_tokens=50.0, t_half_expert_tokens=2.0,
    m_decode=1.1, m_prefill=0.9, expert_imbalance=2.0, client_s=0.03, client_s_per_token=4e-6,
)  # fmt: skip
ROWS = [
    row(),
    row(model="llama-3.1-70b", tp=4),
    row(model="deepseek-v3", gpu="b200_sxm", tp=8, ep=8),
    row(model="deepseek-v3", gpu="b200_sxm", dp=8, ep=8),
    row(model="gpt-oss-120b", gpu="h200_sxm", tp=2, weights="mxfp4"),
    row(model="glm-5", gpu="b200_sxm", tp=8),
    row(model="qwen3.5-397b-a17b", gpu="b200_sxm", tp=8),
]


def random_steps(rng: np.random.Generator, count: int) -> list[Asked]:
    steps = []
    for _ in range(count):
        batch = int(rng.integers(0, 200))
        chunks = tuple(
            PrefillChunk(int(rng.integers(1, 3000)), int(rng.integers(0, 9000)), 0, bool(rng.integers(0, 2)))
            for _ in range(rng.integers(0 if batch else 1, 4))
        )
        steps.append(Asked(chunks, batch, batch * int(rng.integers(1, 9000)), 0, 0))
    return steps


def shapes_of(one: Measurement, steps: list[Asked]) -> Shapes:
    """One shape for each step, without putting alike ones together."""
    log = ShapeLog(dp=one.placed.layout.dp, window_tokens=window_of(one.placed.model))
    for asked in steps:
        if asked.chunks:
            log.add_step(asked, asked.batch)
        else:
            log.add_decodes(asked.batch, asked.ctx_tokens, 1)
    work = log.work()
    weight = np.ones(len(work))
    return Shapes(work=work, ttft=weight, tpot=weight, prompt_tokens=1.0)


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.name)
def test_seconds_are_those_of_the_roofline(one: Measurement, seed: int) -> None:
    steps = random_steps(np.random.default_rng(seed), 40)
    model = roofline(one, KNOWN)
    wanted = [
        model.step_s(*asked) if asked.chunks else model.decode_piece(asked.batch, asked.ctx_tokens).g0
        for asked in steps
    ]
    pricing = Pricing([shapes_of(one, steps)], [0])
    seconds = pricing.seconds(np.array([cost_row(step_costs(one.placed, KNOWN))]))
    assert seconds == pytest.approx(wanted, rel=1e-9)


def test_a_leap_costs_what_its_steps_cost() -> None:
    for one in ROWS:
        log = ShapeLog(dp=one.placed.layout.dp, window_tokens=window_of(one.placed.model))
        log.add_decodes(16, 16 * 100, 300)
        work = log.work()
        table = np.array([cost_row(step_costs(one.placed, KNOWN))])
        mean = Pricing([Shapes(work=work, ttft=np.ones(1), tpot=np.ones(1), prompt_tokens=1.0)], [0])
        model = roofline(one, KNOWN)
        steps = [model.decode_piece(16, 16 * (100 + j)).g0 for j in range(300)]
        assert mean.seconds(table)[0] == pytest.approx(sum(steps) / 300, rel=1e-9), one.name


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.name)
def test_slopes_are_what_a_small_change_does(one: Measurement, seed: int) -> None:
    pricing = Pricing([shapes_of(one, random_steps(np.random.default_rng(seed), 25))], [0])
    table = np.array([cost_row(step_costs(one.placed, KNOWN))])
    slopes = pricing.slopes(table)
    for at, name in enumerate(COSTS):
        if name == "experts.missed" or not table[0, at]:
            continue
        high, low = table.copy(), table.copy()
        high[0, at] *= 1 + 1e-4
        low[0, at] *= 1 - 1e-4
        change = (pricing.means(high).ttft - pricing.means(low).ttft) / (2e-4 * table[0, at])
        assert slopes.ttft[0, at] == pytest.approx(change[0], rel=1e-5), name


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("gpt-oss-120b", 4)])
def test_means_of_a_loop_follow_from_its_step_shapes(engine: str, model: str, tp: int, seed: int) -> None:
    one = row(model=model, tp=tp, engine=engine, weights="bf16" if tp == 1 else "mxfp4", users=12, isl=700, osl=60)
    coefficients = named_block("vllm-hopper").values
    ttft, tpot = simulated(one, roofline(one, coefficients), seed)
    design = Design([one], [schedule(one, seed)])
    means = design.pricing.means(design.table([coefficients]))
    assert means.ttft[0] == pytest.approx(ttft, rel=0.01)
    assert means.tpot[0] == pytest.approx(tpot, rel=0.01)


def test_the_schedule_of_a_loop_does_not_depend_on_step_times(seed: int) -> None:
    one = row(users=8, isl=512, osl=40)
    design = Design([one], [schedule(one, seed)])
    for factor in (0.01, 1.0, 100.0):
        known = replace(KNOWN, t_launch_s=KNOWN.t_launch_s * factor, e_bw=KNOWN.e_bw / factor)
        means = design.pricing.means(design.table([known]))
        assert (means.ttft[0], means.tpot[0]) == pytest.approx(simulated(one, roofline(one, known), seed), rel=0.01)


def test_an_engine_that_looks_rarely_makes_newcomers_wait(seed: int) -> None:
    prompt, rare = (schedule(row(engine="sglang", poll_steps=poll, users=4, osl=200), seed) for poll in (1, 30))
    assert prompt.ttft.sum() == pytest.approx(1.0)  # in steps
    assert 11 < rare.ttft.sum() < 19  # half of 30 on average, and the step itself


def test_ranks_of_tensorrt_llm_wait_for_each_others_prompts(seed: int) -> None:
    ranks = {"model": "gpt-oss-120b", "weights": "mxfp4", "dp": 2, "ep": 2, "osl": 200}
    balanced, many, vllm = (
        schedule(row(engine=engine, users=users, **ranks), seed)
        for engine, users in (("trtllm", 4), ("trtllm", 40), ("vllm", 4))
    )
    assert vllm.ttft.sum() == pytest.approx(1.0)  # in steps
    assert 5 < balanced.ttft.sum() < BALANCE_STEPS
    assert many.ttft.sum() < balanced.ttft.sum()  # a second prompt is sooner there
