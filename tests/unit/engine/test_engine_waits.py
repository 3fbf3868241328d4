"""Prompts that wait while others decode: until the scheduler looks, until there are more of them, until every rank has
one. By hand; that leaps do not change any of it is in tests/property."""

from __future__ import annotations

import pytest
from simulate import Seen, engine_settings, sglang_settings, simulate, trace_row

from twin.engine.settings import EngineSettings
from twin.engine.trtllm import TrtllmSettings
from twin.perf.fixed import FixedLatency

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.010)


def trtllm(**more: object) -> TrtllmSettings:
    base = engine_settings(max_num_batched_tokens=100)
    own = {name: getattr(base, name) for name in base.__dataclass_fields__} | {"capacity_policy": "guaranteed_no_evict"}
    return TrtllmSettings(**(own | more))  # type: ignore[arg-type]


def run(settings: EngineSettings, *arrivals: tuple[float, int, int]) -> Seen:
    """Requests by (arrival in ms, prompt, outputs)."""
    rows = [trace_row(n, ms / 1e3, isl, osl) for n, (ms, isl, osl) in enumerate(arrivals)]
    return simulate(rows, [(settings, TOY)])


def admitted_ms(seen: Seen) -> list[float]:
    """When each was let in, on the clock of the run."""
    seqs = [request.sequence for _, (request, _) in sorted(seen.ended.items())]
    return [round(1e3 * seq.admit_s, 6) for seq in seqs if seq is not None and seq.admit_s is not None]


# ---------------------------------------------------------------- sglang: how often it looks


@pytest.mark.parametrize(
    ("interval", "came_ms", "in_ms"), [(1, 15, 20), (10, 15, 110), (10, 105, 110), (10, 115, 210), (3, 15, 40)]
)
def test_who_comes_while_others_decode_is_seen_at_the_next_look(interval: int, came_ms: float, in_ms: float) -> None:
    """The first prompt ends at 10 ms, and behind it sglang looks; then every `interval` decode steps of 10 ms."""
    seen = run(sglang_settings(recv_interval=interval), (0, 10, 60), (came_ms, 10, 2))
    assert admitted_ms(seen) == [0.0, in_ms]


def test_behind_a_prompt_and_when_idle_it_looks_at_once() -> None:
    """The second comes during the first one's prompt; the third finds nobody."""
    seen = run(sglang_settings(recv_interval=1000), (0, 10, 2), (5, 10, 2), (500, 10, 2))
    assert admitted_ms(seen) == [0.0, 10.0, 500.0]


def test_a_request_that_nobody_has_seen_is_no_work_of_the_scheduler_but_waits() -> None:
    """It counts as waiting in the record, and can leave."""
    seen = run(sglang_settings(recv_interval=30), (0, 10, 60), (15, 10, 2))
    waiting = {row[10] for row in seen.sinks.steps if row[2] >= 0.020 and row[2] < 0.300}
    assert waiting == {1}


@pytest.mark.parametrize("leap", [True, False])
def test_a_leap_behind_a_blocked_queue_does_not_go_past_a_look(leap: bool) -> None:
    """The second and third are in sight and do not fit beside the first one's outputs; the fourth comes in the middle,
    is seen within seven steps, and enters with them when the first has ended."""
    pool = sglang_settings(blocks=100, recv_interval=7, leap=leap)
    seen = run(pool, (0, 40, 40), (1, 90, 5), (1, 1, 1), (200, 1, 1))
    assert admitted_ms(seen) == [0.0, 430.0, 430.0, 430.0]


# ---------------------------------------------------------------- trtllm: more prompts for one step


def test_prompts_wait_for_more_of_them_while_others_decode() -> None:
    """It comes in the step from 10 ms; the five steps that begin at 20 ms and later leave it out."""
    seen = run(trtllm(batch_wait_iters=5, batch_wait_ratio=1.0), (0, 10, 60), (15, 10, 2))
    assert admitted_ms(seen) == [0.0, 70.0]


def test_enough_tokens_end_the_wait() -> None:
    """One token for who decodes, 10 and 39 of prompts: half of the budget of 100."""
    waits = trtllm(batch_wait_iters=50, batch_wait_ratio=0.5)
    assert admitted_ms(run(waits, (0, 10, 60), (15, 10, 2), (45, 39, 2))) == [0.0, 50.0, 50.0]
    assert admitted_ms(run(waits, (0, 10, 60), (15, 10, 2), (45, 38, 2))) == [0.0, 520.0, 520.0]


def test_who_comes_later_has_no_wait_of_its_own() -> None:
    seen = run(trtllm(batch_wait_iters=5, batch_wait_ratio=1.0), (0, 10, 60), (15, 10, 2), (65, 10, 2))
    assert admitted_ms(seen) == [0.0, 70.0, 70.0]


def test_nobody_waits_for_prompts_when_nobody_decodes() -> None:
    seen = run(trtllm(batch_wait_iters=50, batch_wait_ratio=1.0), (0, 10, 1), (5, 10, 2), (500, 10, 2))
    assert admitted_ms(seen) == [0.0, 10.0, 500.0]


def test_who_did_not_fit_into_the_step_waits_again() -> None:
    """Three prompts are more than a step has room for, so nobody waits at 20 ms; of a budget of 100, 98 and a decode
    fit. From the end of that step, at 128 ms, the third waits for its own five steps."""
    waits = trtllm(batch_wait_iters=5, batch_wait_ratio=1.0, chunked_prefill=False)
    assert admitted_ms(run(waits, (0, 10, 60), (15, 60, 2), (16, 38, 2), (17, 30, 2))) == [0.0, 20.0, 20.0, 178.0]


# ---------------------------------------------------------------- trtllm: ranks


def test_ranks_wait_for_each_others_prompts() -> None:
    """Both ranks decode from 10 ms. A third request comes alone and waits for the group's fifth step; with a fourth,
    which goes to the other rank, both start at once."""
    ranks = trtllm(ranks=2, balance_wait=5)
    assert admitted_ms(run(ranks, (0, 10, 60), (0, 10, 60), (15, 10, 2))) == [0.0, 0.0, 50.0]
    assert admitted_ms(run(ranks, (0, 10, 60), (0, 10, 60), (15, 10, 2), (25, 10, 2))) == [0.0, 0.0, 30.0, 30.0]


@pytest.mark.parametrize("leap", [True, False])
def test_steps_of_a_leap_count_when_somebody_comes_just_as_one_ends(leap: bool) -> None:
    """A step ends at 20 ms, and it is the first of the five."""
    ranks = trtllm(ranks=2, balance_wait=5, leap=leap)
    assert admitted_ms(run(ranks, (0, 10, 60), (0, 10, 60), (20, 10, 2))) == [0.0, 0.0, 50.0]


def test_a_rank_without_decodes_ends_the_wait() -> None:
    seen = run(trtllm(ranks=2, balance_wait=50), (0, 10, 60), (15, 10, 2), (45, 10, 2))
    assert admitted_ms(seen) == [0.0, 20.0, 50.0]
