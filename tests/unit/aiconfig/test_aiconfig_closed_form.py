"""The closed form against the twin itself, against Little's law, and at its ends: idle, full, overloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiconfig_builders import SHORT, agg, disagg, pool, room, simulated
from hypothesis import given
from hypothesis import strategies as st

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm, estimate
from aiconfig.curve import wait_s
from aiconfig.engines import tokens_per_step
from aiconfig.estimate import CLOSED_FORM, Estimate, Load
from aiconfig.evaluation import ClosedFormEvaluation
from aiconfig.layouts import ratios
from aiconfig.mixed import Demand
from aiconfig.sensitivity import variations
from aiconfig.split import PromptRank, SplitCurve
from aiconfig.steps import Steps
from aiconfig.workload import Workload
from twin.cluster import build_groups
from twin.config import Config, WorkerGroup

VARIED = Workload(isl=1024, osl=256, min_ratio=0.8)
RANDOM = Workload(isl=1024, osl=256, arrivals="poisson")
SMALL = Workload(isl=200, osl=40)


def means(candidate: Candidate, workload: Workload, load: Load) -> Estimate:
    found = estimate(candidate, workload, load, room(candidate, workload))
    assert found is not None
    return found


def seconds(found: Estimate, metric: str) -> float:
    value = found.value(metric, "mean")
    assert value is not None
    return value


# ---------------------------------------------------------------- against the twin


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_one_user_is_answered_as_in_the_twin(engine: str, tmp_path: Path) -> None:
    run = simulated(agg(engine=engine), SHORT, Load(users=1), tmp_path, requests=3)
    found = means(agg(engine=engine), SHORT, Load(users=1))
    assert seconds(found, "ttft") == pytest.approx(run.latency.ttft_s.mean, rel=1e-6)
    assert seconds(found, "tpot") == pytest.approx(run.latency.tpot_s.mean, rel=2e-3)  # context taken at its mean


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_many_equal_users_have_the_twins_rate(engine: str, tmp_path: Path) -> None:
    run = simulated(agg(engine=engine), SHORT, Load(users=32), tmp_path, requests=320)
    found = means(agg(engine=engine), SHORT, Load(users=32))
    assert found.requests_per_s == pytest.approx(run.throughput.requests_per_s, rel=0.03)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_random_arrivals_wait_as_in_the_twin(engine: str, tmp_path: Path) -> None:
    run = simulated(agg(engine=engine), RANDOM, Load(rps=6.0), tmp_path, requests=600)
    found = means(agg(engine=engine), RANDOM, Load(rps=6.0))
    assert seconds(found, "ttft") == pytest.approx(run.latency.ttft_s.mean, rel=0.06)
    assert seconds(found, "tpot") == pytest.approx(run.latency.tpot_s.mean, rel=0.06)


@pytest.mark.parametrize(
    ("candidate", "rel"),
    [
        (disagg(1, 1), 0.03),
        (disagg(2, 1, engine="trtllm"), 0.03),
        (agg(replicas=4), 0.05),
        (agg("qwen3-30b-a3b", dp=4, ep=4), 0.15),
        (agg(tp=2, pp=2), 0.15),
    ],
)
def test_decode_steps_of_larger_deployments(candidate: Candidate, rel: float, tmp_path: Path) -> None:
    run = simulated(candidate, VARIED, Load(users=32), tmp_path, requests=320)
    assert seconds(means(candidate, VARIED, Load(users=32)), "tpot") == pytest.approx(run.latency.tpot_s.mean, rel=rel)


def test_steps_are_the_twins_own() -> None:
    group = WorkerGroup(model="deepseek-v3", gpu="h200_sxm", tp=1, dp=8, ep=8, weights="fp8", count=1)
    built = build_groups(Config(workers=(group,)))[0].latency
    one = pool(gpu="h200_sxm", dp=8, ep=8, weights="fp8")
    steps = Steps("vllm", "deepseek-v3", one, 0, new_tokens=1000, past_tokens=0, ctx_tokens=1500.0)
    assert steps.decode_s(7) == built.decode_piece(7, 10_500).g0
    assert "8 ranks" in steps.provenance.notes[-1]


# ---------------------------------------------------------------- its own laws


@pytest.mark.parametrize("candidate", [agg(), agg(engine="sglang"), agg(engine="trtllm"), disagg(2, 1)])
@given(users=st.integers(1, 5000), ratio=st.sampled_from([0.5, 1.0]))
def test_users_are_rate_times_stay(candidate: Candidate, users: int, ratio: float) -> None:
    workload = Workload(isl=1024, osl=256, min_ratio=ratio)
    found = means(candidate, workload, Load(users=users))
    assert found.requests_per_s * seconds(found, "e2e") == pytest.approx(users, rel=1e-9)


@pytest.mark.parametrize("candidate", [agg(), agg(engine="sglang"), disagg(1, 2)])
@given(users=st.integers(1, 300))
def test_more_users_are_never_served_at_a_lower_rate(candidate: Candidate, users: int) -> None:
    closed, fitted = ClosedForm(VARIED), room(candidate, VARIED)
    few, more = (closed.point(candidate, Load(users=n), fitted) for n in (users, users + 1))
    assert few is not None
    assert more is not None
    assert more.rps >= few.rps * (1 - 1e-3)
    assert more.e2e_s >= few.e2e_s * (1 - 1e-3)


def test_replicas_multiply_rates_and_leave_times() -> None:
    one, four = means(agg(replicas=2), VARIED, Load(users=32)), means(agg(replicas=4), VARIED, Load(users=64))
    assert four.requests_per_s == pytest.approx(2 * one.requests_per_s)
    assert seconds(four, "ttft") == pytest.approx(seconds(one, "ttft"))


def test_users_beyond_the_kv_pool_wait() -> None:
    full = means(agg(), SHORT, Load(users=256))
    over = means(agg(), SHORT, Load(users=1000))
    assert over.requests_per_s == pytest.approx(full.requests_per_s, rel=1e-6)
    assert seconds(over, "ttft") > 20.0
    assert over.bound == "sequences"
    long = Workload(isl=16_000, osl=1000)
    assert means(agg(), long, Load(users=100)).bound == "kv"


def test_a_rate_that_is_not_served_has_no_estimate() -> None:
    fitted = room(agg(), RANDOM)
    closed = ClosedForm(RANDOM)
    most = closed.most(agg(), fitted).rps
    assert closed.estimate(agg(), Load(rps=most * 0.99), fitted) is not None
    assert closed.estimate(agg(), Load(rps=most * 1.01), fitted) is None


def test_the_slowest_of_prefill_and_decode_sets_the_rate() -> None:
    closed = ClosedForm(VARIED)

    def most(prefill: int, decode: int) -> tuple[float, str]:
        split = disagg(prefill, decode)
        fitted = room(split, VARIED)
        return closed.most(split, fitted).rps, closed.curve(split, fitted).limit

    assert [most(1, 1)[1], most(1, 2)[1]] == ["sequences", "prefill"]
    assert most(2, 1)[0] == pytest.approx(most(1, 1)[0], rel=1e-3)  # another prefill worker brings nothing
    assert most(1, 3)[0] == pytest.approx(most(1, 2)[0], rel=1e-3)  # nor does another decode worker
    assert most(2, 2)[0] == pytest.approx(2 * most(1, 1)[0], rel=1e-3)


def test_a_cached_prefix_saves_its_computation() -> None:
    shared = Workload(isl=4096, osl=64, prefix_tokens=3072)
    whole = Workload(isl=4096, osl=64)
    with_cache, without = (seconds(means(agg(), one, Load(users=1)), "ttft") for one in (shared, whole))
    assert with_cache < 0.6 * without


def test_drafts_that_hold_make_tokens_faster() -> None:
    plain = agg("deepseek-v3", gpu="h200_sxm", tp=8, weights="fp8")
    drafting = agg("deepseek-v3", gpu="h200_sxm", tp=8, weights="fp8", nextn=1)
    slow, fast = (seconds(means(one, SHORT, Load(users=1)), "tpot") for one in (plain, drafting))
    assert slow / 1.85 <= fast < slow


def test_one_token_has_no_gaps() -> None:
    found = means(agg(), Workload(isl=1024, osl=1), Load(users=4))
    assert found.value("tpot", "mean") is None
    assert found.value("tps_user", "mean") is None
    assert seconds(found, "ttft") > 0.0


def test_only_means_are_known() -> None:
    found = means(agg(), SMALL, Load(users=2))
    assert found.level == CLOSED_FORM
    assert {name for stats in found.stats.values() for name in stats} == {"mean"}


def test_formats_that_save_room_but_no_products_are_pointed_out() -> None:
    found = means(agg(gpu="a100_sxm_80", weights="fp8"), SHORT, Load(users=2))
    assert any("products are in BF16" in note for note in found.notes)


@pytest.mark.parametrize(
    ("candidate", "workload", "users", "bound"),
    [
        (agg("llama-3.1-70b", tp=4, engine="trtllm", weights="fp8"), Workload(isl=100, osl=1000), 1, "weights"),
        (agg(engine="trtllm"), Workload(isl=8000, osl=10), 8, "compute"),
        (agg(), Workload(isl=8000, osl=2000), 50, "kv"),
    ],
)
def test_what_binds(candidate: Candidate, workload: Workload, users: int, bound: str) -> None:
    assert means(candidate, workload, Load(users=users)).bound == bound


def test_the_wait_of_one_server_is_that_of_fixed_service() -> None:
    assert wait_s(1.0, 0.5, 1.0) == pytest.approx(0.5)  # M/D/1: load / (2 (1 - load))
    assert wait_s(1.0, 0.0, 1.0) == 0.0
    assert wait_s(1.0, 0.5, 4.0) < wait_s(1.0, 0.5, 1.0)


def test_a_step_that_holds_one_prompt_alone_is_priced() -> None:
    """Beside a single decode there would be no room for it."""
    demand = Workload(isl=512, osl=8)
    for engine, tokens in (("trtllm", 512), ("vllm", 1)):
        one = agg(engine=engine, max_num_batched_tokens=tokens, max_num_seqs=1 if engine == "vllm" else 256)
        found = ClosedForm(demand).estimate(one, Load(users=4), room(one, demand))
        assert found is not None
        assert found.requests_per_s > 0.0


def test_prompts_that_a_step_does_not_hold_whole_are_no_demand_that_it_can_take() -> None:
    """The answer asks what twice the prompts would do, of any best deployment."""
    one = agg(engine="trtllm")
    asked = variations(one, Workload(isl=6000, osl=16), Load(users=2), None, ClosedFormEvaluation())
    found = {variation.name: variation.estimate for variation in asked}
    assert found["prompts x2"] is None
    assert found["load x2"] is not None


# ---------------------------------------------------------------- worked numbers of the specification


class SteadySteps:
    """Steps of workers that compute 2.5 prompts a second, or end 6 answers a second."""

    new_tokens = 1000

    def prompts_s(self, prompts: float, _batch: int) -> float:
        return 0.4 * prompts

    def decode_between_s(self, _batch: float) -> float:
        return 1.0 / 60.0

    decode_s = decode_between_s


def test_the_ratio_of_prefill_to_decode_workers_of_the_specification() -> None:
    """R6: 2.5 requests/s on 2 GPUs against 6 on 4: 7P + 3D serve 17.5 on 26 GPUs, 5P + 2D 12 on 18; the curve ends
    half a percent before the prefill workers do."""

    def rps_per_gpu(prefill: int, decode: int) -> float:
        curve = SplitCurve(
            PromptRank(steps=SteadySteps(), budget=1000, ranks=prefill),  # type: ignore[arg-type]
            SteadySteps(),  # type: ignore[arg-type]
            Demand(osl=11.0, decode_steps=10.0, bunched=False, late=0.0),
            decode_ranks=decode,
            slots=1,
            slots_limit="kv",
            transfer_s=0.0,
            first_at_decode=False,
        )
        return curve.top.rps / (2 * prefill + 4 * decode)

    by_ratio = {pair: rps_per_gpu(*pair) for pair in ratios(26, 2, 4)}
    first, second, *_ = sorted(by_ratio, key=lambda pair: -by_ratio[pair])
    assert (first, second) == ((7, 3), (5, 2))
    assert by_ratio[7, 3] == pytest.approx(0.673, rel=6e-3)
    assert by_ratio[5, 2] == pytest.approx(0.667, rel=1e-3)


@pytest.mark.parametrize(
    ("rates", "drafts", "tokens"), [("0.8", 1, 1.8), ("0.8,0.8,0.8", 3, 2.952), ("0.6,0.6,0.6", 3, 2.176)]
)
def test_tokens_of_a_step_with_drafts(rates: str, drafts: int, tokens: float) -> None:
    assert tokens_per_step(drafts, rates) == pytest.approx(tokens, abs=1e-12)
