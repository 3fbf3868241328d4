"""What a search simulates is what `twin replay` replays from the file that it hands out: equal figures, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate, workload

from aiconfig.candidate import Candidate
from aiconfig.deployment import Setting, write_deployment
from aiconfig.estimate import SIMULATED, Band, Estimate, Load
from aiconfig.evaluate import Simulation, simulate
from aiconfig.judge import judge
from aiconfig.reasons import Rejection
from reports.report import Report
from reports.sla import STATISTICS, parse_sla
from twin.perf.layout import Layout

CASES = [
    ("vllm", "agg", {}, Load(users=6)),
    ("vllm", "disagg", {}, Load(users=6)),
    ("sglang", "agg", {"prefix_tokens": 100}, Load(users=5)),
    ("sglang", "disagg", {}, Load(rps=4.0)),
    ("trtllm", "agg", {}, Load(rps=6.0)),
    ("trtllm", "disagg", {"prefix_tokens": 64}, Load(users=4)),
]


@pytest.mark.parametrize(("engine", "mode", "changes", "load"), CASES)
def test_twin_replay_of_best_toml_gives_the_figures_of_the_search(
    engine: str, mode: str, changes: dict[str, int], load: Load, tmp_path: Path, root: Path
) -> None:
    demand = workload(arrivals="closed" if load.users else "poisson", **changes)
    setting = Setting(sla="ttft=200ms,tpot=30ms")
    found = simulate(candidate(engine, mode, replicas=2), demand, load, setting)
    assert isinstance(found, Estimate), found
    made = write_deployment(tmp_path / "made", candidate(engine, mode, replicas=2), demand, load, setting).path
    moved = tmp_path / "elsewhere"
    shutil.move(made.parent, moved)  # the rows lie beside it, so it can go anywhere
    line = [sys.executable, "-m", "twin", "replay", "--config", str(moved / made.name), "--json", "--no-html"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    report = Report.from_json(done.stdout)
    assert _figures(found) == _figures_of(report)
    assert json.loads(done.stdout)["meta"]["no_effect"] == []


def _figures(found: Estimate) -> dict[str, object]:
    stats = {metric: dict(found.stats[metric]) for metric in ("ttft", "tpot", "itl", "e2e")}
    rates = (found.requests_per_s, found.output_tokens_per_s, found.kv_share, found.goodput_share)
    return {**stats, "rates": rates, "speed": found.value("tps_user", "mean"), "energy": found.energy_j}


def _figures_of(report: Report) -> dict[str, object]:
    assert report.sla is not None
    stats = {
        metric: {name: getattr(report.latency, f"{metric}_s").statistic(name) for name in STATISTICS}
        for metric in ("ttft", "tpot", "itl", "e2e")
    }
    through = report.throughput
    rates = (through.requests_per_s, through.output_tokens_per_s, report.kv_peak_share, report.sla.attainment)
    energy = [group.energy_j for group in report.groups]
    return {**stats, "rates": rates, "speed": report.tokens_per_s_per_user.mean, "energy": sum(energy)}  # type: ignore[arg-type]


def test_the_same_question_has_the_same_answer() -> None:
    asked = (candidate("sglang", replicas=2), workload(), Load(users=7))
    assert simulate(*asked) == simulate(*asked)


def test_the_opening_burst_is_left_out_and_said() -> None:
    found = simulate(candidate(), workload(requests=100), Load(users=20))
    assert isinstance(found, Estimate)
    assert "100 requests played, the first 20 left out as warm-up" in found.notes[0]
    short = simulate(candidate(), workload(requests=30), Load(users=20))
    assert isinstance(short, Estimate)
    assert any("opening burst is part" in note for note in short.notes)
    assert short.value("ttft", "mean") > found.value("ttft", "mean"), "twenty prompts at once wait for each other"


def test_bound_and_bands_are_those_of_the_closed_form() -> None:
    bands = {"ttft": Band(typical=0.2, wide=0.5, level="engine"), "tpot": None}
    first = simulate(candidate(), workload(), Load(users=2))
    assert isinstance(first, Estimate)
    prior = Estimate(
        candidate=candidate(), load=Load(users=2), level="closed form", stats={}, requests_per_s=1.0,
        output_tokens_per_s=1.0, kv_share=0.0, bound="weights", bands=bands,
    )  # fmt: skip
    found = simulate(candidate(), workload(), Load(users=2), prior=prior)
    assert isinstance(found, Estimate)
    assert (found.bound, found.bands, found.level) == ("weights", bands, SIMULATED)
    assert (first.bound, first.stats) == ("unknown", found.stats)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (candidate(), "this model was not measured there"),
        (candidate(mode="disagg"), "prefill and decode apart"),
        (candidate(layout=Layout(tp=1, pp=2)), "2 pipeline stages"),
    ],
)
def test_what_was_never_measured_is_not_surely_within_limits_by_a_simulation_either(one: Candidate, text: str) -> None:
    """The calibration's error says nothing of it, however wide the margin."""
    found = Simulation()(one, workload(), Load(users=2))
    assert found is not None
    assert any(text in line for line in found.unmeasured)
    assert judge(found, parse_sla("tpot=10s")).verdict == "likely"


def test_a_full_pool_is_the_bound_whatever_the_prior_says() -> None:
    tight = workload(isl=12_000, osl=200, min_ratio=1.0)
    found = simulate(candidate(max_num_seqs=256), tight, Load(users=60))
    assert isinstance(found, Estimate)
    assert found.bound == "kv"
    assert found.kv_share > 0.95


def test_what_the_twin_refuses_is_a_rejection_with_its_text() -> None:
    huge = simulate(candidate(model="llama-3.1-70b"), workload(), Load(users=2))
    assert isinstance(huge, Rejection)
    assert huge.reason == "failed"
    assert "does not fit" in huge.detail
    long = simulate(candidate("trtllm", max_num_batched_tokens=1024), workload(isl=2000), Load(users=2))
    assert isinstance(long, Rejection)
    assert (long.reason, long.unit, long.needs) == ("failed", "requests", 60)
    assert "exceeds max_num_batched_tokens 1024" in long.detail
