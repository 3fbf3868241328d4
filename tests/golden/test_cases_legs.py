"""Acceptance cases C16 and C17: the hand-over of KV is paid once, and blocks are held until they are fetched.

Figures are those of the cases; times are exact to 0.001 ms.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import CASES, Run, run


def split(name: str, out: Path, *, prefill: dict[str, object], decode: dict[str, object], table: str) -> Run:
    """One prefill and one decode worker of the TOY engine, from a TOML file as a user would write it."""
    lines = [f"[trace]\nhash_block_tokens = 16\n[disaggregation]\n{table}\n"]
    for role, keys in (("prefill", prefill), ("decode", decode)):
        per_token = keys.pop("prefill_s_per_token", 0.001)
        engine = "\n".join(f"{key} = {value}" for key, value in keys.items())
        lines.append(
            f'[[workers]]\nname = "{role}"\nrole = "{role}"\ncount = 1\n'
            f"[workers.engine]\nchunked_prefill = false\nexclusive_prefill = true\n{engine}\n"
            f'[workers.latency]\nmodel = "fixed"\nprefill_s_per_token = {per_token}\ndecode_s = 0.01\n'
        )
    file = out.parent / "run.toml"
    file.write_text("".join(lines))
    return run(CASES / name, out, config_file=file)


@pytest.mark.parametrize(("first", "ttft_ms"), [("prefill", 50.0), ("decode", 63.621)])
def test_c16_the_hand_over_is_paid_once_and_the_parts_add_up(first: str, ttft_ms: float, tmp_path: Path) -> None:
    done = split(
        "c16_disagg.jsonl",
        tmp_path / "run",
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table=f'first_token = "{first}"\nkv_bytes_per_token = 131072\nbandwidth_gb_per_s = 50.0\nsetup_s = 0.001',
    )
    assert done.ms("ttft_s") == [ttft_ms]
    if first == "prefill":
        assert done.ms("e2e_s") == [153.621]
        gaps = [row for row in done.rows("steps") if row["kind"] == "gap"]
        assert [round(row["gap0_s"] * 1e3, 5) for row in gaps] == [13.62144], "the second token comes at 63.62144"
    else:
        assert done.ms("e2e_s") == [163.621], "the decode worker makes the first token too: one step more"


def test_c17_prefill_keeps_its_blocks_until_they_are_fetched(tmp_path: Path) -> None:
    done = split(
        "c17_held.jsonl",
        tmp_path / "run",
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table='first_token = "prefill"\nkv_bytes_per_token = 0\nbandwidth_gb_per_s = 50.0',
    )
    assert done.ms("e2e_s") == [416, 736]
    held = [row for row in done.rows("steps") if row["worker_id"] == 1 and row["kind"] != "gap"]
    assert max(row["active_blocks"] for row in held) <= 10
    assert done.report.preemptions == 0


def test_c17_a_lease_that_ends_costs_a_second_prefill(tmp_path: Path) -> None:
    """Resilience table E2: held 200 ms, given up at 392, computed again once a decode slot is free, done at 832."""
    done = split(
        "c17_held.jsonl",
        tmp_path / "run",
        prefill={"kv_blocks": 20, "max_num_seqs": 1, "prefix_caching": "false"},
        decode={"kv_blocks": 10},
        table='first_token = "prefill"\nkv_bytes_per_token = 0\nbandwidth_gb_per_s = 50.0\nlease_s = 0.2',
    )
    assert done.ms("e2e_s") == [416, 832]


def test_layers_that_were_sent_during_the_computation_are_not_sent_again(tmp_path: Path) -> None:
    """C16 with room taken first: 50 ms of computing cover all of the transfer but set-up and the last layer of 80."""
    done = split(
        "c16_disagg.jsonl",
        tmp_path / "run",
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table='order = "decode-first"\noverlap = true\nfirst_token = "prefill"\nkv_bytes_per_token = 131072\n'
        "bandwidth_gb_per_s = 50.0\nsetup_s = 0.001",
    )
    assert done.ms("ttft_s") == [50]
    last_layer_ms = 131072 * 1000 / 50e9 * 1e3 / 80
    assert done.ms("e2e_s") == [pytest.approx(50 + 1 + last_layer_ms + 100, abs=0.001)]
