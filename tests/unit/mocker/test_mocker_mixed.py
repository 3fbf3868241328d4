"""Clusters of unlike groups in one run: block sizes, engines, GPUs; and what such a cluster refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy

from policies.errors import ConfigError
from twin.config_read import load

GROUPS = """
[[workers]]
name = "small"
count = 1
[workers.engine]
block_size = 16
kv_blocks = 100
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.001
decode_s = 0.01
[[workers]]
name = "large"
count = 1
tp = 2
[workers.engine]
block_size = 64
kv_blocks = 100
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.0005
decode_s = 0.02
"""
SAME = ", ".join(str(i) for i in range(16))  # 256 tokens in ids of 16


@pytest.fixture
def mixed(tmp_path: Path):
    def run(rows: list[str], *sets: str, **options: object) -> toy.Run:
        trace, file = tmp_path / "t.jsonl", tmp_path / "c.toml"
        trace.write_text("\n".join(rows) + "\n", encoding="utf-8")
        file.write_text(GROUPS, encoding="utf-8")
        sets = ("trace.hash_block_tokens=16", *sets)
        return toy.run(trace, tmp_path / "run", *sets, config_file=file, **options)

    return run


def row(at_ms: int, isl: int = 256, osl: int = 2) -> str:
    return f'{{"timestamp": {at_ms}, "input_length": {isl}, "output_length": {osl}, "hash_ids": [{SAME}]}}'


def test_each_group_caches_in_blocks_of_its_own(mixed) -> None:
    """The same 250 tokens four times in turn: small keeps 15 blocks of 16, large 3 of 64."""
    run = mixed([row(1000 * i, isl=250) for i in range(4)], "router.mode=round-robin")
    assert run.requests("worker_id") == [0, 1, 0, 1]
    assert run.requests("cached_tokens") == [0, 0, 240, 192]
    assert run.ms("ttft_s") == [250, 125, 10, 29]
    small, large = run.report.groups
    assert (small.group, small.gpus, large.group, large.gpus) == ("small", 4, "large", 2)
    assert (small.requests, large.requests) == (2, 2)


def test_leaping_changes_nothing_for_unlike_workers(mixed) -> None:
    rows = [row(100 * i, isl=250, osl=30 + i) for i in range(12)]
    leapt = [mixed(rows, leap=leap).ms("last_token_s") for leap in (True, False)]
    assert leapt[0] == leapt[1]


def test_a_router_that_compares_blocks_refuses_two_sizes_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GROUPS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"large\.engine\.block_size = 64, and the router .* the 16 of small"):
        load(file, sets=["router.mode=kv"])


def test_a_request_of_a_lost_worker_goes_on_in_blocks_of_another_size(mixed, tmp_path: Path) -> None:
    """small dies at 305 ms with 5 tokens out; large computes 250 + 5 tokens and makes the rest."""
    scenario = tmp_path / "faults.toml"
    scenario.write_text(
        'version = 1\nmigration_limit = 1\nfaults = [{at_ms = 305, kind = "worker_down", worker = "small-0"}]\n',
        encoding="utf-8",
    )
    run = mixed([row(0, isl=250, osl=20)], f"faults.path={scenario}")
    assert run.requests("status") == ["completed"]
    assert run.requests("output_tokens") == [20]
    assert run.requests("migrations") == [1]
    assert run.requests("worker_id") == [1]
