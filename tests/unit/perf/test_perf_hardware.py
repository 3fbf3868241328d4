"""The GPU table, and users' files that add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.perf.hardware import find_gpu, gpus

OWN = """
[my_gpu]
family = "hopper"
memory_mib = 40000
bandwidth_tb_s = 2.0
bf16_tflops = 500
pcie_gb_s = 64
tdp_w = 500

[h100_sxm]
bandwidth_tb_s = 3.0
"""


def test_every_row_has_a_source_and_sane_rates() -> None:
    assert len(gpus()) == 14
    for gpu in gpus().values():
        assert gpu.source == "vendor data sheet"
        assert 20e9 < gpu.mem_bytes < 320e9
        assert gpu.bf16_flops <= gpu.math_flops("fp8") <= gpu.math_flops("nvfp4") or gpu.fp4_flops is None


def test_memory_is_what_the_driver_reports() -> None:
    assert find_gpu("h100_sxm").mem_bytes == 81_559 * 2**20


@pytest.mark.parametrize(
    ("gpu", "weights", "tflops"),
    [
        ("h100_sxm", "fp8", 1978.9),
        ("h100_sxm", "bf16", 989.4),
        ("h100_sxm", "int4", 989.4),  # weight-only
        ("h100_sxm", "nvfp4", 989.4),  # no FP4 units
        ("a100_sxm_80", "fp8", 312),  # no FP8 units
        ("a100_sxm_80", "int8", 624),
        ("b200_sxm", "mxfp4", 9000),
        ("b300_sxm", "int8", 2250),  # its INT8 units are slower than BF16
    ],
)
def test_a_format_without_units_runs_at_the_bf16_rate(gpu: str, weights: str, tflops: float) -> None:
    assert find_gpu(gpu).math_flops(weights) == tflops * 1e12


def test_links_inside_a_group() -> None:
    assert find_gpu("h100_sxm").group_bytes_per_s(2) == 450e9  # a switch gives a pair the full rate
    assert find_gpu("mi300x").group_bytes_per_s(2) == 64e9  # a mesh only their one link
    assert find_gpu("mi300x").group_bytes_per_s(8) == 448e9
    assert find_gpu("l40s").group_bytes_per_s(4) == 32e9  # PCIe


def test_a_gpu_without_network_card_cannot_leave_its_host() -> None:
    with pytest.raises(ConfigError, match="rtx_4090 has no network card"):
        find_gpu("rtx_4090").network_bytes_per_s()


def test_a_users_file_adds_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    mine = find_gpu("my_gpu", file)
    assert (mine.mem_bytes, mine.source) == (40_000 * 2**20, str(file))
    changed = find_gpu("h100_sxm", file)
    assert changed.mem_bytes_per_s == 3.0e12
    assert changed.bf16_flops == find_gpu("h100_sxm").bf16_flops
    assert changed.source == f"{file}, rest vendor data sheet"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[g]\nfamly = 'x'", r"own\.toml: \[g\]: key 'famly' is not known; did you mean 'family'"),
        ("[g]\nfamily = 'x'", r"memory_mib is missing"),
        ("[h100_sxm]\nbf16_tflops = -1", r"\[h100_sxm\]: bf16_tflops = -1 is less than 0"),
        ("[h100_sxm]\nbf16_tflops = 0", r"bf16_tflops must be more than 0"),
        ("[h100_sxm]\nscale_up = 'ring'", "it is 'switch', 'mesh' or absent"),
        ("h100_sxm = 3", "expected a table, found 3"),
        ("[h100_sxm", "not valid TOML"),
    ],
)
def test_a_bad_file_costs_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_gpu("h100_sxm", file)


def test_a_typo_names_the_nearest_gpu() -> None:
    with pytest.raises(ConfigError, match="GPU 'h100' is not known; did you mean 'h100_sxm'"):
        find_gpu("h100")
