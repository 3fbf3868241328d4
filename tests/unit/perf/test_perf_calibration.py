"""Calibration files as the roofline reads them, and the coefficients that came with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from closed_loop import roofline, row

from policies.errors import ConfigError
from twin.perf.calibration import Band, Reach
from twin.perf.coefficients import block_of, named_block
from twin.perf.costs import step_costs

CORE = "e_bw = 1\ne_gemm = 1\ne_moe_bw = 1\ne_moe = 1\ne_kv = 1\ne_attn = 1\nalpha_s = 0\ne_link = 1\nt_launch_s = 0\n"
HEAD = '[calibration]\ntable = "t.csv"\ndate = "2026-11-30"\n'
VLLM = f'[vllm-hopper]\nengine = "vllm"\nfamily = "hopper"\n{CORE}client_s = 0.1\n'
KNOWN = named_block("generic").values


def test_a_launch_of_experts_is_paid_once_per_layer_that_has_some() -> None:
    moe, dense = row(model="deepseek-v3", tp=8).placed, row().placed
    dearer = replace(KNOWN, t_moe_s=1.0)
    assert step_costs(moe, dearer).layers_s - step_costs(moe, KNOWN).layers_s == pytest.approx(58)  # of 61, 3 are dense
    assert step_costs(dense, dearer) == step_costs(dense, KNOWN)


def test_dense_and_expert_products_reach_half_their_rate_apart() -> None:
    placed = row(model="deepseek-v3", tp=8).placed
    assert step_costs(placed, replace(KNOWN, t_half_tokens=8.0)).experts == step_costs(placed, KNOWN).experts
    experts = step_costs(placed, replace(KNOWN, t_half_expert_tokens=2.0)).experts
    assert experts is not None
    assert experts.half_tokens == 2.0 * 256 / 8


def test_the_client_path_is_told_and_never_part_of_a_step() -> None:
    one = row()
    slow = roofline(one, replace(KNOWN, client_s=0.02, client_s_per_token=3e-6))
    assert slow.decode_piece(4, 400) == roofline(one, KNOWN).decode_piece(4, 400)
    assert "about 20 ms and 3.0 us per prompt token" in slow.provenance.notes[0]


def test_factors_of_a_model_go_with_its_block(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    factors = '[calibration.factors."llama-3.1-8b"]\nm_decode = 1.25\nm_client = 0.5\n'
    file.write_text(HEAD + factors + VLLM + '[vllm-hopper.models."llama-3.1-8b"]\ntpot_p50 = 0.04\ntpot_p90 = 0.1\n')
    block = block_of(str(file), "vllm", row().placed)
    assert (block.values.m_decode, block.values.m_prefill, block.values.client_s) == (1.25, 1.0, 0.05)
    assert (block.level, block.error_band) == ("model", "TPOT 4% (90th percentile 10%) on runs not used in the fit")
    other = block_of(str(file), "vllm", row(model="qwen3-8b").placed)
    assert (other.values.m_decode, other.level, other.error_band) == (1.0, "engine", None)


def test_by_name_a_block_is_what_it_says_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(HEAD + VLLM)
    block = block_of(f"{file}#vllm-hopper", "trtllm", row().placed)
    assert (block.label, block.level, block.notes) == ("vllm-hopper", None, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + VLLM, r"c\.toml: no block for sglang on hopper, none for hopper, and no generic one"),
        (HEAD + "hash = 1\n" + VLLM, r"\[calibration\]: key 'hash' is not known"),
        (HEAD + VLLM + "[vllm-hopper.band]\ntpot_p55 = 1\n", "key 'tpot_p55' is not known; did you mean 'tpot_p50'"),
        (HEAD + VLLM + "[vllm-hopper.range]\nbatch = 0\n", "batch = 0 is less than 1"),
        (HEAD + VLLM + "[vllm-hopper.clients]\nother = 0\n", "other must be more than 0"),
        (HEAD + VLLM + "models = 3\n", "models = 3 is not a table"),
    ],
)
def test_what_is_wrong_with_a_file_costs_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        block_of(str(file), "sglang", row().placed)


def test_reach_names_what_is_beyond_it() -> None:
    reach = Reach(batch=64, prompt_tokens=1000, context_tokens=2000, gpus=("h100_sxm",), weights=("fp8",), kv=("fp8",))
    assert reach.beyond_load(batch=64, prompt_tokens=1000, context_tokens=2000) == []
    assert reach.beyond_load(batch=65, prompt_tokens=1001, context_tokens=2001) == [
        "batch of 65: measured up to 64",
        "prompt tokens 1,001: measured up to 1,000",
        "tokens of context 2,001: measured up to 2,000",
    ]
    assert reach.beyond(row().placed) == ["KV in bf16: not among what was measured (fp8)"]


def test_a_band_without_figures_says_nothing() -> None:
    assert Band(tpot=None, ttft=None).text() is None


def test_the_shipped_calibration_by_name() -> None:
    near = block_of("calibrated", "vllm", row(model="llama-3.1-70b", tp=4).placed)
    assert near.level == "model"
    assert near.label == "vllm-hopper for llama-3.1-70b"
    assert near.error_band is not None
    for engine in ("vllm", "sglang", "trtllm"):
        for gpu, level in (("h200_sxm", "engine"), ("b300_sxm", "engine"), ("mi300x", "generic")):
            block = block_of("calibrated", engine, row(model="mixtral-8x7b", gpu=gpu).placed)
            assert block.level == level
            assert block.error_band is not None
            assert not block.error_band.startswith("TTFT")
    assert block_of("", "vllm", row().placed) == block_of("calibrated", "vllm", row().placed)
    assert block_of("priors", "vllm", row().placed) == named_block("vllm-hopper")


def test_bands_of_the_shipped_calibration_widen_with_distance() -> None:
    """In the median over engines: a model that was never measured is missed by more than a configuration was."""
    near, far = [], []
    for engine in ("vllm", "sglang", "trtllm"):
        for gpu in ("h100_sxm", "b200_sxm"):
            block = block_of("calibrated", engine, row(gpu=gpu).placed)
            near += [band.tpot[0] for name, band in block.bands.items() if name and band.tpot]
            far += [band.tpot[0] for name, band in block.bands.items() if not name and band.tpot]
    assert sorted(near)[len(near) // 2] < sorted(far)[len(far) // 2]
