"""Ways to serve, simulated: what they change, that best.toml replays to it, and how a study draws among many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate, shared_prompts, workload

from aiconfig.axes import axes_of
from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.deployment import write_deployment
from aiconfig.drawn import LARGEST_PLAYED, NOT_DRAWN, Drawn
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluate import Simulation, simulate
from aiconfig.finalists import Outcome, Turn
from aiconfig.load_point import Searched
from aiconfig.memory import Fit, fit
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.serving import USUAL_SERVING, Serving
from aiconfig.trace_workload import read_workload
from aiconfig.workload import Workload
from twin.replay import replay

GB = 10**9
TIERED = Serving(router="kv", host_kv_bytes=40 * GB)
LOAD = Load(users=16)


@pytest.fixture(scope="module")
def demand(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """More texts that come back than the device of a small GPU holds."""
    path = tmp_path_factory.mktemp("trace") / "shared.jsonl"
    shared_prompts(path, rows=240, prefixes=80)
    return read_workload(path, arrivals="closed").workload


def small(mode: str = "agg", serving: Serving = USUAL_SERVING) -> Candidate:
    """Two workers of each role; those that compute prompts have room for some twenty of the texts."""
    one = candidate("vllm", mode, replicas=2, weights="fp8")
    first = replace(one.pools[0], gpu="rtx_4090" if mode == "agg" else "l40s")
    return replace(one, pools=(first, *one.pools[1:]), serving=serving)


def played(one: Candidate, demand: Workload) -> Estimate:
    found = simulate(one, demand, LOAD)
    assert isinstance(found, Estimate), found
    return found


def test_the_simulation_tells_apart_what_the_closed_form_cannot(demand: Workload) -> None:
    plain, served = small(), small(serving=TIERED)
    closed = ClosedForm(demand)
    room = fit(plain, demand)
    assert isinstance(room, Fit)
    a, b = (closed.estimate(one, LOAD, room) for one in (plain, served))
    assert a is not None
    assert b is not None
    assert a.stats == b.stats
    before, after = played(plain, demand), played(served, demand)
    assert before.hit_share is not None
    assert after.hit_share is not None
    assert after.hit_share > before.hit_share + 0.05
    assert after.output_tokens_per_s > before.output_tokens_per_s


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@pytest.mark.parametrize(
    "serving", [TIERED, Serving(router="least-loaded", host_kv_bytes=20 * GB, disk_kv_bytes=60 * GB)]
)
def test_best_toml_replays_to_the_search_s_figures(
    mode: str, serving: Serving, demand: Workload, tmp_path: Path
) -> None:
    one = small(mode, serving)
    found = played(one, demand)
    made = write_deployment(tmp_path, one, demand, LOAD)
    assert made.config.no_effect == ()
    report = replay(made.config, config_file=made.path, out=tmp_path / "run", html=False).report
    latency = report.latency
    for metric, sample in {"ttft": latency.ttft_s, "tpot": latency.tpot_s, "e2e": latency.e2e_s}.items():
        for name in ("mean", "p50", "p95", "p99"):
            assert sample.statistic(name) == found.value(metric, name), (metric, name)
    assert report.throughput.output_tokens_per_s == found.output_tokens_per_s
    assert (report.kv_peak_share, report.hit_rate) == (found.kv_share, found.hit_share)


# ---------------------------------------------------------------- a study among many


REQUEST = SearchRequest(
    gpus=8, routers=("round-robin", "kv", "random"), host_kv=(0, *(2**n * GB for n in range(4, 9))), load=LOAD
)


def turns_of(finalists: int) -> list[Turn]:
    plain = [candidate(replicas=n + 1) for n in range(finalists)]
    return [
        Turn(request=REQUEST, candidate=replace(one, serving=serving), load=LOAD)
        for one in plain
        for serving in REQUEST.servings
    ]


class Spread:
    """Stands for simulations: two replicas that are routed by kv are the best. Keeps who was asked, in batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, turns: Sequence[Turn]) -> Sequence[Outcome]:
        self.batches.append([turn.candidate.name for turn in turns])
        return [self._outcome(turn) for turn in turns]

    def _outcome(self, turn: Turn) -> Outcome:
        serving, replicas = turn.candidate.serving, turn.candidate.pools[0].replicas
        if serving.router == "random":
            return Rejection(name=turn.candidate.name, reason="failed")
        rate = 100.0 + 50.0 * (serving.router == "kv") + serving.host_kv_bytes / GB / 64 - abs(replicas - 2)
        run = Estimate(
            candidate=turn.candidate, load=turn.load, level="simulated", stats={}, requests_per_s=1.0,
            output_tokens_per_s=rate, kv_share=0.1, bound="kv",
        )  # fmt: skip
        return Searched(best=run, runs=(run,))


def test_few_turns_are_all_played() -> None:
    turns, spread = turns_of(2), Spread()
    drawn = Drawn(spread, (), 0)
    outcomes = drawn(turns)
    assert spread.batches == [[turn.candidate.name for turn in turns]]
    assert len(outcomes) == 36
    assert drawn.line == ""


def test_of_many_turns_a_study_draws_the_promising_ones_and_the_first_way_is_always_played() -> None:
    pytest.importorskip("optuna", reason="a study needs optuna: pip install 'dynatwin[study]'")
    turns, spread = turns_of(6), Spread()
    drawn = Drawn(spread, (), 0)
    outcomes = drawn(turns)
    assert len(outcomes) == len(turns) == 108
    asked = [name for batch in spread.batches for name in batch]
    assert len(asked) == len(set(asked)) == LARGEST_PLAYED
    assert spread.batches[0] == [turn.candidate.name for turn in turns if turn.candidate.serving == USUAL_SERVING]
    skipped = [one for one in outcomes if isinstance(one, Rejection) and one.reason == "not_simulated"]
    assert len(skipped) == 108 - LARGEST_PLAYED
    assert {one.detail for one in skipped} == {NOT_DRAWN}
    assert drawn.line == "48 of 108 finalists with ways to serve were simulated, 42 of them drawn by TPE"
    later = [name for batch in spread.batches[-2:] for name in batch]
    assert sum("-via_random" in name for name in later) <= len(later) // 3, "what fails is drawn less and less"
    again = Spread()
    assert Drawn(again, (), 0)(turns) == outcomes
    assert again.batches == spread.batches


def test_a_way_to_serve_is_an_axis_only_where_there_are_several() -> None:
    axes = axes_of(candidate(), served=True)
    assert (axes["router"], axes["host_kv"], axes["disk_kv"]) == ("round-robin", 0, 0)
    assert "router" not in axes_of(candidate())


# ---------------------------------------------------------------- energy


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@pytest.mark.parametrize("users", [1, 8, 128])
def test_energy_in_closed_form_is_that_of_the_simulation(mode: str, users: int) -> None:
    """Within a fifth; of workers that do everything within a tenth."""
    demand, load = workload(isl=1000, osl=100, min_ratio=1.0, requests=max(80, 3 * users)), Load(users=users)
    one = candidate("vllm", mode)
    room, run = fit(one, demand), Simulation()(one, demand, load)
    assert isinstance(room, Fit)
    assert run is not None
    closed = ClosedForm(demand)
    estimate = closed.estimate(one, load, room)
    assert estimate is not None
    power_w = closed.power_w(one, estimate)
    assert power_w is not None
    assert run.energy_j is not None
    assert run.output_tokens is not None
    per_token_j = run.energy_j / run.output_tokens
    assert power_w / estimate.output_tokens_per_s == pytest.approx(per_token_j, rel=0.1 if mode == "agg" else 0.2)
