"""A study tries different candidates only, the promising ones first, and remembers every one that it finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_eval_study import finished_in, scores, space, two_scores

from aiconfig.candidate import Candidate
from aiconfig.study import Score, Studied, StudyOptions, run_study
from policies.errors import CapabilityError, ConfigError

pytest.importorskip("optuna", reason="a study needs optuna: pip install 'dynatwin[study]'")
pytestmark = [pytest.mark.optional, pytest.mark.long]


def _names(done: Studied) -> list[str]:
    return [trial.candidate.name for trial in done.trials]


def test_no_candidate_is_tried_twice_and_a_whole_space_is_tried_once() -> None:
    small = space(60)
    done = run_study(small, scores, StudyOptions(trials=500))
    assert sorted(_names(done)) == sorted(one.name for one in small)
    assert (done.space, done.kept, done.complete, done.sampler) == (60, 0, True, "TPE")


def test_a_tenth_of_the_space_is_enough_to_find_the_best_hundredth() -> None:
    every = space(1000)
    ranked = sorted((score.values[0] for score in scores(every)), reverse=True)
    done = run_study(every, scores, StudyOptions(trials=100))
    assert max(trial.score.values[0] for trial in done.trials) >= ranked[10]


@pytest.mark.parametrize("objectives", [1, 2])
@pytest.mark.parametrize("width", [1, 4])
def test_the_same_seed_gives_the_same_trials_and_another_seed_others(objectives: int, width: int) -> None:
    score = scores if objectives == 1 else two_scores
    options = StudyOptions(trials=70, objectives=objectives, width=width, seed=3)
    first = run_study(space(300), score, options)
    assert first == run_study(space(300), score, options)
    assert _names(first) != _names(run_study(space(300), score, replace(options, seed=4)))
    assert first.sampler == ("TPE" if objectives == 1 else "NSGA-II")


@pytest.mark.parametrize(("objectives", "width", "cut"), [(1, 1, 30), (1, 4, 30), (2, 1, 60), (2, 4, 61)])
def test_a_study_that_goes_on_tries_what_it_would_have_tried(
    objectives: int, width: int, cut: int, tmp_path: Path
) -> None:
    """Cut in the middle of a batch too: 30 is no multiple of 4."""
    score = scores if objectives == 1 else two_scores
    every, options = space(300), StudyOptions(trials=80, objectives=objectives, width=width)
    stored = replace(options, storage=f"sqlite:///{tmp_path}/s.db")
    whole = run_study(every, score, options)
    asked: list[str] = []

    def cut_off(candidates: Sequence[Candidate]) -> Sequence[Score]:
        asked.extend(one.name for one in candidates)
        if len(asked) > cut:
            raise KeyboardInterrupt
        return score(candidates)

    first = run_study(every, cut_off, stored)
    assert not first.complete
    assert 0 < len(first.trials) <= cut
    second = run_study(every, score, stored)
    assert second.kept == len(first.trials)
    assert second.trials == whole.trials


def test_rejected_candidates_count_and_are_kept_with_their_reason(tmp_path: Path) -> None:
    def refuses(candidates: Sequence[Candidate]) -> list[Score]:
        return [
            Score(why="kv_too_small")
            if one.pools[0].layout.tp == 1
            else Score(values=(1.0,), violation=0.5, note={"a": [1]})
            for one in candidates
        ]

    options = StudyOptions(trials=40, storage=f"sqlite:///{tmp_path}/s.db")
    done = run_study(space(40), refuses, options)
    again = run_study(space(40), refuses, options)
    assert again.trials == done.trials
    assert again.kept == 40
    why = {trial.score.why for trial in done.trials if trial.candidate.pools[0].layout.tp == 1}
    assert why == {"kv_too_small"}


def test_limits_draw_the_sampler_away_from_what_misses_them() -> None:
    def limited(candidates: Sequence[Candidate]) -> list[Score]:
        return [
            Score(values=(float(one.pools[0].replicas),), violation=float(one.pools[0].replicas > 5))
            for one in candidates
        ]

    done = run_study(space(1000), limited, StudyOptions(trials=120))
    late = [trial.candidate.pools[0].replicas for trial in done.trials[40:]]
    assert sum(replicas <= 5 for replicas in late) > 0.6 * len(late)


def test_time_is_up_after_the_batch_that_was_begun() -> None:
    done = run_study(space(100), scores, StudyOptions(trials=100, timeout_s=1e-6))
    assert (done.trials, done.complete) == ((), False)


def test_a_storage_of_another_search_is_refused(tmp_path: Path) -> None:
    options = StudyOptions(trials=3, storage=f"sqlite:///{tmp_path}/s.db", about="a")
    run_study(space(20), scores, options)
    with pytest.raises(ConfigError, match="is of another search; name another with --study-name"):
        run_study(space(20), scores, replace(options, about="b"))
    with pytest.raises(ConfigError, match="is of another search"):
        run_study(space(21), scores, options)
    run_study(space(21), scores, replace(options, name="mine"))


@pytest.mark.parametrize("storage", ["search.db", "sqlite:////no/such/folder/s.db"])
def test_a_storage_that_cannot_be_used_is_one_line(storage: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as refused:
        run_study(space(5), scores, StudyOptions(storage=storage))
    assert "\n" not in str(refused.value)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--trials 0"):
        StudyOptions(trials=0)
    with pytest.raises(ConfigError, match="--timeout 0"):
        StudyOptions(timeout_s=0)


def test_without_optuna_there_is_one_line(tmp_path: Path, root: Path) -> None:
    (tmp_path / "optuna.py").write_text("raise ImportError\n", encoding="utf-8")
    code = (
        "from aiconfig.study import *\ntry: run_study([], None, StudyOptions())\nexcept Exception as e: print(repr(e))"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(CapabilityError.__name__)
    assert "pip install 'dynatwin[study]'" in done.stdout


@pytest.mark.slow
def test_a_study_of_a_thousand_candidates_survives_being_killed(tmp_path: Path, root: Path) -> None:
    """Killed twice without warning, then run to the end: every candidate is scored once, and none after its trial was
    finished. Only what was under way may be asked for again: one trial for each kill."""
    storage, log = f"sqlite:///{tmp_path}/s.db", tmp_path / "log.txt"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    finished: list[list[str]] = []
    for kill_at in (130, 420):
        line = [sys.executable, "-m", "aiconfig_eval_study", storage, str(log), str(kill_at)]
        killed = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        finished.append(finished_in(storage))
    assert [len(names) for names in finished] == [129, 419]
    done = run_study(space(1000), scores, StudyOptions(trials=1000, storage=storage))
    assert done.kept == 419
    assert len(set(_names(done))) == 1000
    assert _names(done)[:419] == finished[1]
    assert finished[1][:129] == finished[0]
    asked = log.read_text(encoding="utf-8").split()
    assert len(asked) == 130 + (420 - 129)
    assert len(asked) - len(set(asked)) == 1, "the one that was under way when it was killed"
