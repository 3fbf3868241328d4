"""A whole search with simulation: the same answer in one process and in several, and figures that can be replayed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate, workload

from aiconfig.deployment import write_deployment
from aiconfig.estimate import SIMULATED, Estimate, Load
from aiconfig.evaluate import Simulation, setting_of, simulate
from aiconfig.finalists import Turn
from aiconfig.load_point import Searched
from aiconfig.outcome import SearchResult
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.search import search
from aiconfig.spread import in_processes, simulated_turn
from policies.errors import CapabilityError, ConfigError
from reports.sla import parse_sla
from twin.replay import replay

REQUEST = SearchRequest(
    gpus=4,
    engines=("vllm", "sglang"),
    workload=workload(isl=500, osl=40, min_ratio=1.0, requests=None),
    sla=parse_sla("p95:ttft<400ms, p95:tpot<20ms"),
    weights=("bf16",),
    kv=("bf16",),
    max_num_batched_tokens=(8192,),
    top=2,
)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(REQUEST, Simulation(setting_of(REQUEST)))


def test_the_best_was_simulated_and_keeps_its_limits(found: SearchResult) -> None:
    assert found.best is not None
    assert found.best.estimate.level == SIMULATED
    ttft_s, tpot_s = found.best.estimate.value("ttft", "p95"), found.best.estimate.value("tpot", "p95")
    assert ttft_s is not None
    assert tpot_s is not None
    assert ttft_s <= 0.4
    assert tpot_s <= 0.02
    assert found.best.estimate.bound != "unknown"
    assert found.best.runs > 1, "the load point was searched by simulation"


def test_replaying_the_best_gives_its_figures(found: SearchResult, tmp_path: Path) -> None:
    best = found.best
    assert best is not None
    made = write_deployment(tmp_path, best.candidate, REQUEST.workload, best.load, setting_of(REQUEST))
    report = replay(made.config, config_file=made.path, out=tmp_path / "run", html=False).report
    assert report.latency.ttft_s.p95 == best.estimate.value("ttft", "p95")
    assert report.throughput.output_tokens_per_s == best.estimate.output_tokens_per_s
    assert report.sla is not None
    assert report.sla.verdict == "met"


def test_two_processes_give_the_answer_of_one(found: SearchResult) -> None:
    told: list[tuple[int, int]] = []
    spread = in_processes(2, lambda over, all_: told.append((over, all_)))
    assert search(REQUEST, Simulation(setting_of(REQUEST)), spread=spread) == found
    assert told == [(n, told[-1][1]) for n in range(1, len(told) + 1)]
    assert len(told) >= 4


def test_estimates_and_turns_travel(found: SearchResult) -> None:
    assert found.best is not None
    assert pickle.loads(pickle.dumps(found.best.estimate)) == found.best.estimate
    turn = Turn(request=REQUEST, candidate=found.best.candidate, load=found.best.load)
    assert pickle.loads(pickle.dumps(turn)) == turn


def test_what_refuses_costs_its_own_candidate_alone() -> None:
    request = replace(REQUEST, sla=None, load=Load(users=2))
    bad, good = (
        Turn(request=request, candidate=candidate(model=name), load=Load(users=2))
        for name in ("llama-3.1-405b", "llama-3.1-8b")
    )
    outcomes = in_processes(2)([bad, good])
    assert isinstance(outcomes[0], Rejection)
    assert outcomes[0].reason == "failed"
    assert "does not fit" in outcomes[0].detail
    assert isinstance(outcomes[1], Searched)
    assert isinstance(outcomes[1].best, Estimate)
    assert outcomes[1] == simulated_turn(good)


def test_no_turns_and_no_processes() -> None:
    assert in_processes(3)([]) == []
    with pytest.raises(ConfigError, match="--jobs 0: at least 1 process"):
        in_processes(0)


def test_a_question_is_simulated_once() -> None:
    ask = Simulation()
    asked = (candidate(), workload(), Load(users=3))
    assert ask(*asked) == ask(*asked)
    assert ask.runs == 1
    assert ask(candidate(), workload(arrivals="poisson", requests=2000), Load(rps=500.0)) is None, "its queue grows"
    with pytest.raises(CapabilityError, match="does not fit"):
        ask(candidate(model="llama-3.1-405b"), workload(), Load(users=3))


def test_the_closed_form_and_the_simulation_mean_the_same_deployment() -> None:
    """Without a queue, at equal lengths and few users, both price the same steps: within a tenth."""
    demand = workload(isl=1000, osl=100, min_ratio=1.0, requests=None)
    for mode in ("agg", "disagg"):
        for engine in ("vllm", "sglang", "trtllm"):
            one = candidate(engine, mode)
            prior = Simulation()._closed(one, demand, Load(users=4))
            played = simulate(one, demand, Load(users=4))
            assert prior is not None
            assert isinstance(played, Estimate), played
            assert played.value("tpot", "mean") == pytest.approx(prior.value("tpot", "mean"), rel=0.1), one.name


def test_without_ray_there_is_one_line(tmp_path: Path, root: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError\n", encoding="utf-8")
    code = "from aiconfig.spread import *\ntry: on_ray('auto')\nexcept Exception as e: print(repr(e))"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CapabilityError")
    assert "pip install 'dynatwin[distributed]'" in done.stdout
