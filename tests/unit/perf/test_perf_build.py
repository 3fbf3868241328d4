"""Models from a configuration: each by its name, and every mistyped name refused with the nearest one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.perf.build import build_latency
from twin.perf.protocol import LatencyModel, PrefillChunk


@dataclass(frozen=True)
class Settings:
    model: str = "roofline"
    params: Mapping[str, object] = field(default_factory=dict)


def built(name: str, params: Mapping[str, object] | None = None, **worker: object) -> LatencyModel:
    default: dict[str, object] = {
        "engine": "vllm",
        "model": "llama-3.1-70b",
        "gpu": "h100_sxm",
        "tp": 4,
        "weights": "fp8",
        "kv": "bf16",
        "pool_tokens": 686_144,
    }
    return build_latency(Settings(name, params or {}), **{**default, **worker})  # type: ignore[arg-type]


def test_each_model_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    file.write_text("kind,latency_ms,batch\ndecode,5,1\n")
    models = [
        built("fixed", {"decode_s": 0.01, "prefill_s_per_token": 0.001}),
        built("polynomial"),
        built("table", {"path": str(file)}),
        built("roofline"),
    ]
    assert [model.provenance.name for model in models] == ["fixed", "polynomial", "table", "roofline"]
    assert [model.decode_piece(1, 1000).g0 > 0 for model in models] == [True] * 4


def test_the_default_cluster_is_moderate() -> None:
    """5 sequences of 1,500 tokens decode in about 13 ms, a prompt of 1,465 tokens takes about 80 ms."""
    model = built("roofline")
    assert model.decode_piece(5, 7500).g0 == pytest.approx(0.0126, rel=0.02)
    assert model.step_s([PrefillChunk(1465, 0, 0, True)], 0, 0, 0, 0) == pytest.approx(0.080, rel=0.02)


def test_polynomial_uses_the_pool_of_the_worker() -> None:
    assert built("polynomial", pool_tokens=100).decode_piece(1, 100).g0 == pytest.approx(0.03401)
    with pytest.raises(ConfigError, match="needs the size of the KV pool, and it has 0 tokens"):
        built("polynomial", pool_tokens=0)


def test_polynomial_coefficients_can_be_given() -> None:
    model = built("polynomial", {"decode_constant_s": 1.0, "decode_linear_s": -0.5, "decode_quadratic_s": 0.0})
    assert model.decode_piece(1, 686_144).g0 == 0.5


def test_coefficients_by_name_by_key_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[mine]\nengine_version = "vLLM 9"\nerror_band = "3 % TPOT"\ne_bw = 1\ne_gemm = 1\ne_moe_bw = 1\ne_moe = 1\n'
        "e_kv = 1\ne_attn = 1\nalpha_s = 0\ne_link = 1\nt_launch_s = 0\n"
    )
    assert "coefficients generic" in built("roofline", {"coefficients": "generic"}).provenance.source
    slowed = built("roofline", {"h_prefill_s": 1.0})
    assert "vllm-hopper for llama-3.1-70b with h_prefill_s given" in slowed.provenance.source
    assert slowed.step_s([PrefillChunk(1, 0, 0, True)], 0, 0, 0, 0) > 1.0
    own = built("roofline", {"coefficients": str(file)}).provenance
    assert (own.engine_version, own.error_band) == ("vLLM 9", "3 % TPOT")
    assert own.source.endswith("coefficients mine (your own)")
    with pytest.raises(ConfigError, match=r"own\.toml: block 'other' is not known \(known: mine\)"):
        built("roofline", {"coefficients": f"{file}#other"})


def test_hardware_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text("[h100_sxm]\nbandwidth_tb_s = 1.675\n")
    faster = built("roofline", tp=1, weights="fp8").decode_piece(1, 1)
    slower = built("roofline", {"hardware": str(file)}, tp=1).decode_piece(1, 1)
    assert 1.5 < slower.g0 / faster.g0 < 2


@pytest.mark.parametrize(
    ("name", "params", "worker", "message"),
    [
        ("rooflin", {}, {}, "latency model 'rooflin' is not known; did you mean 'roofline'"),
        ("fixed", {"decode": 1}, {}, r"workers\.latency \(model 'fixed'\): key 'decode' is not known; did you mean"),
        ("fixed", {}, {}, "decode_s is missing"),
        ("fixed", {"decode_s": "10ms"}, {}, "decode_s = '10ms' is not a finite number"),
        ("fixed", {"decode_s": -1}, {}, "decode_s = -1 is less than 0"),
        ("fixed", {"decode_s": float("inf")}, {}, "decode_s = inf is not a finite number"),
        ("fixed", {"decode_s": True}, {}, "decode_s = True is not a finite number"),
        ("table", {}, {}, "path is missing"),
        ("table", {"path": "x.csv", "extrapolate": "yes"}, {}, "extrapolate = 'yes' is not true or false"),
        ("roofline", {"e_bw": 0}, {}, "e_bw must be more than 0"),
        ("roofline", {"prefill_s": 1}, {}, "'prefill_s' is not known"),
        ("roofline", {"coefficients": 3}, {}, "coefficients = 3 is not a string"),
        ("roofline", {}, {"gpu": "h10"}, "GPU 'h10' is not known; did you mean"),
        ("roofline", {}, {"model": "llama-3.1-70"}, "did you mean 'llama-3.1-70b'"),
        ("roofline", {}, {"engine": "vlm"}, "engine 'vlm' is not known; did you mean 'vllm'"),
        ("roofline", {}, {"weights": "fp88"}, "weight format 'fp88' is not known; did you mean 'fp8'"),
        ("roofline", {}, {"kv": "fp4"}, "KV format 'fp4' is not known"),
        ("roofline", {}, {"tp": 3}, "64 attention heads, which tp = 3 does not divide"),
    ],
)
def test_bad_settings_cost_one_line(
    name: str, params: Mapping[str, object], worker: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, params, **worker)


def test_building_the_default_model_imports_nothing_heavy() -> None:
    code = (
        "import sys, types; from twin.perf.build import build_latency;"
        "s = types.SimpleNamespace(model='roofline', params={});"
        "build_latency(s, engine='vllm', model='llama-3.1-70b', gpu='h100_sxm', tp=4, weights='fp8', kv='bf16',"
        " pool_tokens=1);"
        "print([m for m in ('numpy', 'pandas', 'scipy', 'pyarrow', 'csv', 'difflib') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
