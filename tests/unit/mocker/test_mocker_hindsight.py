"""Decisions in hindsight: exact where nothing comes later, and nothing of them reaches the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.record import RunRecord
from twin.config_read import load
from twin.replay import Replayed, replay

pytestmark = pytest.mark.long


def replayed(folder: Path, rows: str, *sets: str, explain: bool = True, leap: bool = True, **flags: object) -> Replayed:
    trace = folder / "t.csv"
    trace.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    config = load(None, {"TRACE": trace, **{f"--{name}": value for name, value in flags.items()}}, sets)
    return replay(config, out=folder / f"run-{explain}-{leap}", html=False, explain=explain, leap=leap)


SPREAD = "".join(f"{2 * at},{200 + 50 * at},20\n" for at in range(12))
CROWD = "".join(f"{at / 40},{300 + 97 * at % 3000},{10 + at % 50}\n" for at in range(200))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_where_nothing_comes_later_the_chosen_worker_does_what_was_foreseen(tmp_path: Path, engine: str) -> None:
    done = replayed(tmp_path, SPREAD, router="kv", workers="3", engine=engine)
    oracle = done.report.meta.oracle
    assert oracle is not None
    assert (oracle.every, len(oracle.samples), oracle.left_out) == (1, 12, 0)
    ttft = RunRecord(done.folder).requests.floats("ttft_s")
    for one in oracle.samples:
        assert one.ttft_s == pytest.approx(float(ttft[one.row]), abs=1e-9)


def test_a_busy_worker_is_seen_to_be_the_worse_choice(tmp_path: Path) -> None:
    """Two long prompts at once, and round robin over two workers gives the third request to the one that got the
    longer of them."""
    rows = "0,8000,5\n0,200,5\n0.001,200,5\n"
    done = replayed(tmp_path, rows, workers="2", router="round-robin")
    oracle = done.report.meta.oracle
    assert oracle is not None
    third = oracle.samples[-1]
    assert (third.row, third.worker_id, third.best_worker_id) == (2, 0, 1)
    assert third.ttft_s > 3 * third.best_ttft_s


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_looking_changes_nothing_that_the_run_does(tmp_path: Path, engine: str, leap: bool) -> None:
    plain = replayed(tmp_path, CROWD, router="kv", workers="3", engine=engine, explain=False, leap=leap)
    looked = replayed(tmp_path, CROWD, router="kv", workers="3", engine=engine, explain=True, leap=leap)
    for name in ("requests.parquet", "steps.parquet", "samples.parquet"):
        assert (plain.folder / name).read_bytes() == (looked.folder / name).read_bytes(), name
    assert plain.report.meta.oracle is None
    oracle = looked.report.meta.oracle
    assert oracle is not None
    assert (oracle.every, len(oracle.samples) + oracle.left_out) == (4, 50)


def test_looking_twice_sees_the_same(tmp_path: Path) -> None:
    first = replayed(tmp_path, CROWD, router="kv", workers="3").report.to_json()
    assert replayed(tmp_path, CROWD, router="kv", workers="3").report.to_json() == first


def test_legs_are_judged_by_when_the_prompt_is_computed(tmp_path: Path, root: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n" + SPREAD, encoding="utf-8")
    config = load(root / "docs" / "examples" / "legs.toml", {"TRACE": trace})
    done = replay(config, out=tmp_path / "run", html=False, explain=True)
    oracle = done.report.meta.oracle
    assert oracle is not None
    assert len(oracle.samples) == 12
    held = RunRecord(done.folder).requests.floats("held_s") - RunRecord(done.folder).requests.floats("arrival_s")
    for one in oracle.samples:
        assert one.ttft_s == pytest.approx(float(held[one.row]), abs=1e-9)
