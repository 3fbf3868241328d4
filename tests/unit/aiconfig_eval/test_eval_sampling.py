"""A space that is too large to be searched exactly: what is studied of it, and that the answer says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiconfig_eval_builders import workload

from aiconfig.request import SearchRequest
from aiconfig.sampling import sample
from aiconfig.search import search
from aiconfig.space import Legal, Space
from aiconfig.study import StudyOptions
from policies.errors import ConfigError
from reports.sla import parse_sla

pytest.importorskip("optuna", reason="sampling needs optuna: pip install 'dynatwin[study]'")
pytestmark = pytest.mark.optional

REQUEST = SearchRequest(gpus=8, workload=workload(isl=1000, osl=100, min_ratio=1.0), sla=parse_sla("mean:tpot<12ms"))


def test_a_part_of_the_space_finds_nearly_what_the_whole_has(tmp_path: Path) -> None:
    space = sum(1 for _ in Space(REQUEST).legal())
    options = StudyOptions(trials=space // 4, storage=f"sqlite:///{tmp_path}/s.db")
    sampled = sample(REQUEST, options)
    assert len(sampled.studied.trials) == space // 4
    assert f"sampled by TPE: {space // 4:,} of {space:,} legal deployments" in sampled.line()
    part, whole = search(REQUEST, proposed=sampled.proposed), search(REQUEST)
    assert part.legal == space // 4
    assert part.best is not None
    assert whole.best is not None
    assert part.best.score >= 0.9 * whole.best.score
    again = sample(REQUEST, options)
    assert again.proposed == sampled.proposed
    assert again.studied.kept == space // 4


def test_every_rejection_of_the_space_is_still_counted() -> None:
    sampled = sample(REQUEST, StudyOptions(trials=5))
    asked = [one for one in Space(REQUEST) if not isinstance(one, Legal)]
    assert [one for one in sampled.proposed if not isinstance(one, Legal)] == asked


def test_several_objectives_are_sampled_for_their_front() -> None:
    sampled = sample(REQUEST, StudyOptions(trials=40), ("throughput-per-gpu", "latency"))
    assert sampled.studied.sampler == "NSGA-II"
    assert {len(trial.score.values) for trial in sampled.studied.trials} <= {0, 2}


def test_an_objective_that_only_a_simulation_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="--objective goodput-per-gpu: known from simulated runs alone"):
        sample(REQUEST, StudyOptions(trials=5), ("goodput-per-gpu",))


def test_more_deployments_than_can_be_enumerated_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 1000000: there are more than 300,000 deployments.*fewer GPUs"):
        sample(SearchRequest(gpus=1_000_000, modes=("agg",)), StudyOptions(trials=5))
