"""A cluster with known coefficients is measured by simulation; the fit must predict it, seen and unseen, and say so."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from closed_loop import measured_by, row

from policies.errors import ConfigError
from twin.calibrate.fitted import FromFile
from twin.calibrate.measured import Table
from twin.calibrate.study import Study, design_of, errors_by_slice, study, worse
from twin.calibrate.write import calibration_text
from twin.perf.build import build_latency
from twin.perf.coefficients import Coefficients
from twin.perf.protocol import LatencyModel

# About as far from the priors as the ridge expects of a block; farther ones need more runs than these.
TRUTH = Coefficients(
    e_bw=0.78, e_gemm=0.68, e_moe_bw=0.75, e_moe=0.27, e_kv=0.65, e_attn=0.36, alpha_s=3e-6, e_link=0.45,
    t_launch_s=36e-6, t_moe_s=22e-6, h0_s=8e-4, h_seq_s=12e-6, h_prefill_s=4.4e-3, t_half_tokens=50.0,
    expert_imbalance=1.1, client_s=0.035, client_s_per_token=4.5e-6,
)  # fmt: skip
ON_BLACKWELL = replace(TRUTH, e_gemm=0.6, e_link=0.4, t_launch_s=42e-6)


@pytest.fixture(scope="module")
def done() -> Study:
    """Two models on two families of GPUs; the engines, too, are told apart."""
    places = [("llama-3.1-70b", "h100_sxm", 4), ("llama-3.1-70b", "h100_sxm", 8), ("llama-3.1-8b", "h100_sxm", 1),
              ("llama-3.1-70b", "b200_sxm", 2), ("llama-3.1-8b", "b200_sxm", 1), ("gpt-oss-120b", "h100_sxm", 2),
              ("gpt-oss-120b", "h100_sxm", 4), ("llama-3.1-8b", "h100_sxm", 2)]  # fmt: skip
    rows = []
    for model, gpu, tp in places:
        weights = "mxfp4" if model == "gpt-oss-120b" else "fp8"
        truth = ON_BLACKWELL if gpu == "b200_sxm" else TRUTH
        for users, isl, osl in ((1, 512, 48), (8, 512, 48), (8, 3000, 48), (48, 512, 48)):
            one = row(model=model, gpu=gpu, tp=tp, weights=weights, users=users, isl=isl, osl=osl)
            rows.append(measured_by(one, truth))
    table, design = design_of(Table(name="made", digest="0" * 12, rows=tuple(rows), left_out={}))
    return study(table, design)


@pytest.fixture(scope="module")
def file(done: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "made.toml"
    path.write_text(calibration_text(done.table, done.design, done.fit, done.bands, date(2026, 11, 30)))
    return path


def latency(file: Path | str, **others: object) -> LatencyModel:
    keys = {"coefficients": str(file), **{key: others.pop(key) for key in ("strict",) if key in others}}
    worker = {"engine": "vllm", "model": "llama-3.1-70b", "gpu": "h100_sxm", "tp": 4, "weights": "fp8", "kv": "bf16"}
    settings = SimpleNamespace(model="roofline", params=keys)
    return build_latency(settings, pool_tokens=600_000, **{**worker, **others})


def test_times_of_the_fit_come_back_within_one_percent(done: Study) -> None:
    found = errors_by_slice(done.design, done.design.predict(done.fit))["overall"]
    assert found.tpot is not None
    assert found.ttft is not None
    assert found.tpot.mape < 0.01
    assert found.ttft.mape < 0.01
    assert abs(found.tpot.bias) < 0.005


def test_configurations_outside_the_fit_are_near(done: Study) -> None:
    found = errors_by_slice(done.design, done.bands.configurations)["overall"]
    assert found.tpot is not None
    assert found.tpot.median < 0.05


def test_the_file_says_what_the_fit_said(done: Study, file: Path) -> None:
    fitted, read = done.design.predict(done.fit), done.design.predict(FromFile(str(file)))
    assert read.tpot == pytest.approx(fitted.tpot, rel=1e-3)
    assert read.ttft == pytest.approx(fitted.ttft, rel=1e-3)


def test_the_same_table_gives_the_same_file(done: Study, file: Path) -> None:
    again = study(*design_of(done.table))
    assert calibration_text(again.table, again.design, again.fit, again.bands, date(2026, 11, 30)) == file.read_text()


def test_the_nearest_neighbour_is_told_with_its_band(file: Path) -> None:
    near = latency(file).provenance
    assert "vllm-hopper for llama-3.1-70b (calibrated 2026-11-30 with made)" in near.source
    assert near.error_band is not None
    assert "on runs not used in the fit" in near.error_band
    assert not any("calibrated with" in note for note in near.notes)
    other_model = latency(file, model="qwen3-32b").provenance
    assert any("this model was not measured there" in note for note in other_model.notes)
    other_engine = latency(file, engine="sglang").provenance
    assert "coefficients hopper (" in other_engine.source
    other_family = latency(file, gpu="mi300x").provenance
    assert "coefficients generic (" in other_family.source
    bands = {near.error_band, other_model.error_band, other_engine.error_band, other_family.error_band}
    assert len(bands - {None}) >= 2


def test_strict_refuses_what_was_not_measured(file: Path) -> None:
    assert latency(file, strict=True).provenance.reach is not None
    for others, why in (
        ({"model": "qwen3-32b"}, "this model was not measured there"),
        ({"gpu": "h200_sxm"}, "GPU h200_sxm: not among what was measured"),
        ({"weights": "bf16"}, "weights in bf16"),
    ):
        with pytest.raises(ConfigError, match=f"strict, and .* outside the calibrated range: .*{why}"):
            latency(file, strict=True, **others)


def test_a_worse_file_is_noticed(done: Study, file: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(file.read_text().replace("[vllm-blackwell]", "[vllm-blackwell]\nm_decode = 1.3"))
    good, bad = (errors_by_slice(done.design, done.design.predict(FromFile(str(path)))) for path in (file, slow))
    assert worse(good, good) == []
    lines = worse(good, bad)
    assert any(line.startswith("b200_sxm: mean TPOT error") for line in lines)
    assert not any(line.startswith("h100_sxm: mean TPOT") for line in lines)
    assert np.isfinite(done.design.predict(FromFile(str(slow))).ttft).all()
