"""What a fit must not see: folds that are the same everywhere, and predictions that never come from their own rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from closed_loop import measured_by, row

from twin.calibrate import folds
from twin.calibrate.errors import errors_of, slices
from twin.calibrate.fitted import Design
from twin.calibrate.schedules import schedule
from twin.perf.coefficients import named_block

KEYS = ["agg:llama3-70b/h100_sxm/vllm/fp8/4/1/1/none", "", "übung", *map(str, range(40))]


def test_folds_are_stable_across_hash_seeds(root: Path) -> None:
    code = f"from twin.calibrate.folds import fold_of; print([fold_of(key) for key in {KEYS!r}])"
    command, found = [sys.executable, "-c", code], set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert found == {f"{[folds.fold_of(key) for key in KEYS]}\n"}
    assert folds.fold_of(KEYS[0]) == 2  # for ever
    assert {folds.fold_of(key) for key in KEYS} == set(range(folds.FOLDS))


def test_a_group_is_never_split() -> None:
    same = [row(users=users) for users in (1, 4, 64)]
    assert len({folds.by_group(one) for one in same}) == 1


def test_rows_never_predict_themselves() -> None:
    """A model whose times are all three times too long is not believed where it is not in the fit."""
    truth = named_block("vllm-hopper").values
    rows = [measured_by(row(model=model, users=users, tp=2), truth) for users in (1, 4) for model in
            ("llama-3.1-8b", "qwen3-8b", "qwen3-32b")]  # fmt: skip
    odd = [replace(one, tpot_s=3 * (one.tpot_s or 0)) if one.model == "qwen3-8b" else one for one in rows]
    design = Design(odd, [schedule(one) for one in odd])
    unseen = folds.unseen(design, folds.by_model)
    ratio = unseen.tpot / design.measured.tpot
    at = np.array([one.model == "qwen3-8b" for one in odd])
    assert (ratio[at] < 0.6).all()


def test_nothing_is_predicted_where_nothing_is_left_to_fit() -> None:
    one = measured_by(row(), named_block("vllm-hopper").values)
    design = Design([one], [schedule(one)])
    assert np.isnan(folds.unseen(design, folds.by_model).tpot).all()


def test_pairs_that_are_known_apart() -> None:
    rows = [row(gpu=gpu, model=model) for gpu, model in
            (("h100_sxm", "llama-3.1-8b"), ("h100_sxm", "qwen3-8b"), ("b200_sxm", "llama-3.1-8b"))]  # fmt: skip
    kept = folds.still_known(rows, lambda one: f"{one.model}{one.placed.gpu.name}", folds.by_model, folds.by_gpu)
    assert kept.tolist() == [True, False, False]


def test_errors_are_what_their_names_say() -> None:
    measured = np.array([1.0, 2.0, 4.0, np.nan, 10.0])
    predicted = np.array([1.05, 1.0, 4.6, 3.0, np.nan])
    found = errors_of(predicted, measured)
    assert found is not None
    assert found.rows == 4
    assert found.mape == pytest.approx((0.05 + 0.5 + 0.15 + 1.0) / 4)
    assert found.median == pytest.approx((0.15 + 0.5) / 2)
    assert found.bias == pytest.approx(0.05)
    assert found.within == (0.25, 0.5, 0.75)
    assert found.coverage == 0.75
    assert errors_of(predicted, np.full(5, np.nan)) is None


def test_slices_cover_each_row_once_by_kind_engine_and_gpu() -> None:
    rows = (row(), row(model="gpt-oss-120b", engine="trtllm", tp=2), row(model="deepseek-v3", gpu="b200_sxm", tp=8))
    parts = slices(rows)
    for names in (("dense models", "MoE, GQA", "MoE, MLA / hybrid / sparse"), ("vllm", "trtllm"),
                  ("h100_sxm", "b200_sxm"), ("overall",)):  # fmt: skip
        assert sum(parts[name].astype(int) for name in names).tolist() == [1, 1, 1], names
