"""Tables of measured runs: what a row becomes, and that what is left out is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.calibrate.measured import read_table

HEAD = "engine,arch,gpu,weights,attn_tp,isl,osl,concurrency,ttft_ms,tpot_ms"


def table(folder: Path, *lines: str, head: str = HEAD) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_a_row(tmp_path: Path) -> None:
    read = read_table(table(tmp_path, "vllm,llama3-70b,h100_sxm,fp8,4,1000,200,16,120.5,20"))
    (row,) = read.rows
    assert (row.model, row.family, row.placed.layout.tp) == ("llama-3.1-70b", "hopper", 4)
    assert (row.isl, row.osl, row.users, row.prompts) == (1000, 200, 16, None)
    assert (row.ttft_s, row.tpot_s) == (0.1205, 0.020)
    assert read.count("ttft") == 1
    assert len(read.digest) == 12


def test_four_bit_weights_are_what_the_model_is_released_in(tmp_path: Path) -> None:
    lines = [f"vllm,{model},b200_sxm,fp4,1,1000,200,16,120,20" for model in ("gpt-oss-120b", "llama3-70b")]
    assert [row.placed.weights for row in read_table(table(tmp_path, *lines)).rows] == ["mxfp4", "nvfp4"]


def test_rows_that_cannot_be_priced_are_counted(tmp_path: Path) -> None:
    good = "vllm,llama3-70b,h100_sxm,fp8,4,1000,200,16,120,20"
    path = table(
        tmp_path, good, good.replace("h100_sxm", "h10"), good.replace(",4,", ",3,"), good.replace("120,20", ","),
    )  # fmt: skip
    read = read_table(path)
    assert len(read.rows) == 1
    assert sum(read.left_out.values()) == 3
    assert any("h10" in reason for reason in read.left_out)
    assert any("tp = 3" in reason for reason in read.left_out)
    assert read.left_out["neither time to be used"] == 1


def test_flags_of_a_table_are_kept_to(tmp_path: Path) -> None:
    head = HEAD + ",use_ttft,use_tpot,spec_decode"
    lines = [
        "vllm,llama3-70b,h100_sxm,fp8,4,1000,200,16,120,20,false,true,none",
        "vllm,llama3-70b,h100_sxm,fp8,4,1000,200,16,120,20,true,true,mtp",
    ]
    read = read_table(table(tmp_path, *lines, head=head))
    assert [(row.ttft_s, row.tpot_s) for row in read.rows] == [(None, 0.020)]
    assert read.left_out == {"speculative decoding on": 1}


def test_users_of_one_replica(tmp_path: Path) -> None:
    path = table(tmp_path, "vllm,llama3-70b,h100_sxm,fp8,4,1000,200,64,120,20,4", head=HEAD + ",replicas")
    assert read_table(path).rows[0].users == 16


@pytest.mark.parametrize(("text", "message"), [("", "cannot be read as a table"), (HEAD + "\n", "has no rows")])
def test_what_is_no_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(path)


def test_a_table_without_a_usable_row_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no row can be used: 1 .*'vlm'"):
        read_table(table(tmp_path, "vlm,llama3-70b,h100_sxm,fp8,4,1000,200,16,120,20"))
