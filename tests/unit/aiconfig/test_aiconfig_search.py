"""The search: its answer, who is simulated, every reason with a way to it, and the same bytes each time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from aiconfig_builders import agg, estimated
from hypothesis import given, settings
from hypothesis import strategies as st

from aiconfig.candidate import Candidate
from aiconfig.estimate import SIMULATED, Band, Estimate, Load
from aiconfig.evaluation import ClosedFormEvaluation
from aiconfig.outcome import Scored, SearchResult
from aiconfig.pareto import dominates
from aiconfig.patience import unplayed
from aiconfig.reasons import REASONS
from aiconfig.request import search_request
from aiconfig.result import result_of
from aiconfig.search import search
from aiconfig.space import Space
from aiconfig.workload import Workload
from policies.errors import ConfigError
from reports.sla import Sla, parse_sla

BANDS = {name: Band(typical=0.02, wide=0.05, level="test") for name in ("ttft", "tpot")}
OPEN = Workload(isl=1024, osl=256, arrivals="poisson")


def asked(sla: str | None = None, **given: object) -> SearchResult:
    given = {"gpus": 2, "kv": ("bf16",), "weights": ("bf16",)} | given
    return search(search_request({**given, "sla": None if sla is None else parse_sla(sla)}))


class Played:
    """Stands for a simulation: the closed form, with percentiles `spread` times its means. Keeps what was asked."""

    def __init__(self, spread: float = 1.5, refuses: str = "nobody") -> None:
        self.runs: list[tuple[str, Load]] = []
        self._spread, self._refuses, self._closed = spread, refuses, ClosedFormEvaluation()

    def __call__(self, candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
        self.runs.append((candidate.name, load))
        if self._refuses in candidate.name:
            raise ConfigError(f"{candidate.name}: refused")
        one = self._closed(candidate, workload, load)
        if one is None:
            return None
        stats = {
            metric: {"mean": values["mean"], "p95": None if values["mean"] is None else values["mean"] * self._spread}
            for metric, values in one.stats.items()
        }
        return replace(
            one, level=SIMULATED, stats=stats, bands=BANDS, goodput_share=0.97, energy_j=500.0, output_tokens=100
        )


@cache
def played(
    sla: str = "ttft=300ms,tpot=20ms", spread: float = 1.5, refuses: str = "nobody"
) -> tuple[SearchResult, Played]:
    simulate = Played(spread, refuses)
    given = {"gpus": 2, "kv": ("bf16",), "weights": ("bf16",), "sla": parse_sla(sla)}
    return search(search_request(given), simulate), simulate


# ---------------------------------------------------------------- by the closed form


def test_limits_on_means_are_judged_without_a_simulation() -> None:
    found = asked("ttft=300ms@mean,tpot=20ms@mean")
    assert found.best is not None
    assert (found.best.judgement.verdict, found.exit_code, found.nearest) == ("likely", 0, None)
    assert found.best.distance == 0.0
    assert found.best_agg is not None
    assert found.best_disagg is not None
    assert found.best is found.ranked[0]


def test_limits_on_percentiles_are_not() -> None:
    found = asked("ttft=300ms,tpot=20ms")
    assert (found.best, found.nearest, found.exit_code) == (None, None, 3)
    assert found.ranked[0].judgement.verdict == "not judged"
    assert any("simulate, or ask for means" in note for note in found.notes)


def test_without_limits_the_best_is_by_the_objective() -> None:
    found = asked()
    assert found.best is not None
    assert found.best.score == max(one.score for one in found.ranked)
    assert asked(objective="min-gpus").best.candidate.gpus == 1  # type: ignore[union-attr]
    fastest = asked(objective="latency", load=Load(users=4)).best
    assert fastest is not None
    assert fastest.candidate.gpus == 2


def test_an_sla_below_every_idle_figure_is_answered_with_that_bound() -> None:
    found = asked("ttft=10ms@mean")
    assert found.exit_code == 3
    assert set(found.counts) == {"over_gpu_budget", "ttft_bound"}
    assert found.nearest is not None
    bounds = [one.has for one in found.rejections if one.reason == "ttft_bound"]
    assert found.nearest.scored.estimate.value("ttft", "mean") == pytest.approx(min(bounds) / 1e3)  # type: ignore[type-var,operator]
    assert f"nearest: {found.nearest.scored.candidate.name} at 1 user," in found.nearest.line
    assert any("even one user alone" in note for note in found.notes)


def test_a_load_that_is_given_is_kept() -> None:
    found = asked("tpot=12ms@mean", load=Load(users=48))
    assert {one.load for one in found.ranked} == {Load(users=48)}
    kept = [one for one in found.ranked if one.judgement.kept]
    assert kept
    assert len(kept) < len(found.ranked)
    assert list(found.ranked[: len(kept)]) == kept


def test_a_rate_that_nobody_serves_is_told_with_the_most() -> None:
    found = asked(workload=OPEN, load=Load(rps=1000.0))
    assert found.counts["unstable"] == found.legal
    assert any("no deployment serves this rate; the most is" in note for note in found.notes)


# ---------------------------------------------------------------- with a simulation


def test_the_best_was_simulated_and_keeps_every_limit() -> None:
    found, simulate = played()
    assert found.best is not None
    assert found.best.estimate.level == SIMULATED
    assert found.best.judgement.verdict in ("meets", "likely")
    assert (found.best.candidate.name, found.best.load) in simulate.runs
    assert found.best.runs >= 1
    assert all(one.estimate.level == SIMULATED for one in found.front)


def test_the_load_of_the_closed_form_gives_way_to_that_of_the_runs() -> None:
    found, _ = played()
    assert found.best is not None
    closed, simulated = found.best.closed.load.users, found.best.load.users
    assert closed is not None
    assert simulated is not None
    assert simulated < closed  # percentiles are above means


def test_both_modes_are_simulated() -> None:
    found, simulate = played()
    assert {name.split("-")[1] for name, _ in simulate.runs} == {"agg", "disagg"}
    assert found.best_agg is not None
    assert found.best_disagg is not None


def test_who_is_not_simulated_is_told_why() -> None:
    found, simulate = played()
    names = {name for name, _ in simulate.runs}
    left_out = {one.name: one.reason for one in found.rejections if one.reason in ("dominated", "not_simulated")}
    assert left_out
    assert not names & set(left_out)
    assert names | set(left_out) == {one.candidate.name for one in found.ranked}


def test_what_the_twin_refuses_is_counted() -> None:
    found, _ = played(refuses="disagg")
    assert found.counts["failed"] >= 1
    assert found.best_disagg is None
    assert found.best is not None


def test_who_survives_no_run_is_never_best() -> None:
    given = {"gpus": 1, "kv": ("bf16",), "sla": parse_sla("tpot=20ms@mean")}
    found = search(search_request(given), lambda candidate, workload, load: None)
    assert (found.best, found.exit_code) == (None, 3)
    assert found.counts["unstable"] >= 1


def test_a_twin_that_refuses_everybody_is_told() -> None:
    found, _ = played(refuses="vllm")
    assert (found.best, found.nearest, found.exit_code) == (None, None, 3)
    assert any("every simulation was refused" in note for note in found.notes)


def test_the_nearest_miss_is_a_simulated_one_and_changes_are_simulated_too() -> None:
    found, _ = played("ttft=35ms,tpot=20ms", spread=2.0)
    assert (found.best, found.exit_code) == (None, 3)
    assert found.nearest is not None
    assert found.nearest.scored.estimate.level == SIMULATED
    assert found.nearest.scored.distance == min(one.distance for one in found.ranked if one.estimate.level == SIMULATED)
    assert {change.estimate.level for change in found.nearest.changes} == {SIMULATED}


def test_a_run_may_know_what_the_closed_form_does_not() -> None:
    given = {"gpus": 1, "objective": "energy", "load": Load(users=8)}
    found = search(search_request(given), Played())
    assert found.best is not None
    assert found.best.score == -5.0  # 500 J for 100 tokens


def test_the_shortlist_goes_by_the_energy_of_the_closed_form() -> None:
    """Throughput for each GPU of the budget wants all of them; energy for a token wants few that are busy."""
    given = {"gpus": 8, "modes": ("agg",), "objective": "energy", "load": Load(users=8), "top": 3}
    request = search_request(given)
    by_formula = search(request).ranked
    assert all(one.score == -(one.estimate.power_w or 0.0) / one.estimate.output_tokens_per_s for one in by_formula)
    assert [one.score for one in by_formula] == sorted((one.score for one in by_formula), reverse=True)
    simulate = Played()
    search(request, simulate)
    asked_first = {name for name, _ in simulate.runs}
    assert {one.candidate.name for one in by_formula[:3]} <= asked_first
    fastest = search(search_request({**given, "objective": "throughput-per-gpu"})).ranked
    assert by_formula[0].candidate.gpus < fastest[0].candidate.gpus


# ---------------------------------------------------------------- laws


@settings(max_examples=8)
@given(ttft=st.integers(30, 600), tpot=st.integers(5, 40), engine=st.sampled_from(["vllm", "sglang", "trtllm"]))
def test_nothing_that_is_best_breaks_a_limit_and_nobody_on_the_front_does(ttft: int, tpot: int, engine: str) -> None:
    found = asked(f"ttft={ttft}ms@mean,tpot={tpot}ms@mean", engines=(engine,))
    sla = found.request.sla
    assert sla is not None
    for one in (*found.front, *([found.best] if found.best else [])):
        assert all(slo.holds(one.estimate.value(slo.metric, "mean")) for slo in sla.slos)  # type: ignore[arg-type]
    assert (found.best is None) == (found.nearest is not None)
    figures = [figures_of(one) for one in found.front]
    assert not any(dominates(a, b) for a in figures for b in figures)


def figures_of(one: Scored) -> tuple[float, float]:
    return one.estimate.output_tokens_per_s, one.estimate.tokens_per_s_per_user or 0.0


def test_everybody_is_accounted_for() -> None:
    found = asked("ttft=100ms@mean", model="qwen3-30b-a3b", gpus=4)
    space = list(Space(found.request))
    assert len(found.ranked) + len(found.rejections) == len(space)
    assert sum(found.counts.values()) == len(found.rejections)


def test_what_is_proposed_is_searched_and_nothing_else() -> None:
    request = search_request({"gpus": 2})
    some = list(Space(request).legal())[:3]
    assert {one.candidate.name for one in search(request, None, some).ranked} == {one.candidate.name for one in some}


def test_the_same_request_gives_the_same_bytes_under_any_hash_seed(root: Path) -> None:
    code = (
        "from aiconfig.request import search_request; from aiconfig.search import search;"
        "from reports.sla import parse_sla;"
        "r = search(search_request({'gpus': 4, 'engines': ('vllm', 'sglang'), 'sla': parse_sla('ttft=50ms@mean')}));"
        "print(repr(r))"
    )
    answers = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        answers.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert len(answers) == 1


# ---------------------------------------------------------------- reasons


SERVED = {
    "workload": Workload(isl=1024, osl=256, prefix_tokens=512, trace=Path("mine.parquet"), requests=100),
    "host_kv": (0, 10**12),
    "routers": ("round-robin", "kv"),
    "load": Load(users=4),
}
"""One worker has nothing to route, and no GPU of a host of 240 GB has a terabyte."""


def reasons_reached() -> set[str]:
    found = [
        asked(model="qwen2.5-7b", gpus=8),
        asked(model="llama-3.1-70b"),
        asked(workload=Workload(isl=600_000, osl=10)),
        asked(load=Load(users=3000)),
        asked(gpu="a100_sxm_80", kv=("fp8",)),
        asked(nextn=(1,)),
        asked(max_num_batched_tokens=(8,)),
        asked(model="mixtral-8x7b", gpus=16, modes=("agg",), engines=("trtllm",)),
        asked(model="qwen3-30b-a3b", engines=("sglang",), weights=("fp8",), gpus=8, modes=("agg",)),
        asked(model="qwen3.5-397b-a17b", gpu="b200_sxm", gpus=16, modes=("disagg",)),
        asked(strict=True),
        asked("ttft=10ms@mean"),
        asked("tpot=1ms@mean"),
        asked("e2e=10ms@mean"),
        asked(workload=OPEN, load=Load(rps=1000.0)),
        played()[0],
        played(refuses="disagg")[0],
        search(search_request({"gpus": 4, "top": 1}), Played()),
        search(search_request({"gpus": 1, "gpu": "gb200", "top": 1, **SERVED}), Played()),
    ]
    return {one.reason for result in found for one in result.rejections}


def test_every_reason_of_a_search_can_be_reached() -> None:
    # four pipeline stages are fewer than any model's layers: the rule itself has its own test
    assert reasons_reached() == set(REASONS) - {"layers_too_few"}


def test_ways_to_serve_are_no_deployments_that_were_estimated() -> None:
    request = search_request(
        {"gpus": 2, "modes": ("agg",), "load": Load(users=4), "routers": ("random", "round-robin")}
    )
    found = search(request, Played())
    assert len(found.ranked) > found.legal
    assert found.scored == found.legal


def test_a_search_that_is_stopped_before_its_finalists_names_the_best_of_them_by_the_closed_form() -> None:
    request = search_request({"gpus": 4, "load": Load(users=4)})
    stopped = search(request, Played(), spread=lambda turns: [unplayed(turn.candidate.name) for turn in turns])
    closed = search(request)
    assert closed.best is not None
    assert result_of(stopped, complete=False).best == closed.best


def test_who_was_not_good_enough_for_a_simulation_is_no_answer_where_all_others_are_refused() -> None:
    """Host tiers that no host holds, of every finalist: nothing is served as it was asked for."""
    given: dict[str, object] = {"gpus": 2, "gpu": "gb200", "modes": ("agg",), "load": Load(users=4)}
    found = search(search_request({**given, **SERVED, "host_kv": (10**15,)}), Played())
    assert found.counts["host_memory"] > 0
    assert found.ranked == ()
    assert result_of(found).best is None


def test_limits_of_the_sla_are_never_forgotten() -> None:
    sla: Sla = parse_sla("ttft=1ms@mean")
    assert search(search_request({"gpus": 1, "sla": sla})).best is None
    assert estimated(agg()).candidate == agg()
