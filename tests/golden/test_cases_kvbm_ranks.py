"""Tiers below a worker with two attention-DP ranks, by hand: host memory and all below it belongs to the worker, so
what one rank sent down comes up to the device of the other.

The TOY engine with a device of three blocks of 64 tokens for each rank; a block takes half a millisecond to come up.
Ranks take requests in turn.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_cases_kvbm import TIER, faults, hits
from toy import Run, toy

from policies.errors import ConfigError

RANKS = (*TIER, "workers.dp=2", "allow_no_effect=true")
A, B, C = [1, 2, 3], [11, 12, 13], [21, 22, 23]


def asked(folder: Path, *requests: tuple[float, list[int]]) -> Path:
    """A trace of prompts of 130 tokens that are answered with one, at so many ms."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": 130, "output_length": 1, "hash_ids": ids}) + "\n"
            for ms, ids in requests
        )
    )
    return path


def c20(tmp_path: Path, *sets: str, **options: object) -> Run:
    """A on rank 0, B on rank 1, C on rank 0, where it drives A down to host memory, A again on rank 1."""
    return toy("c20_tiers.jsonl", tmp_path / "run", *RANKS, *sets, key_tokens=64, **options)


@pytest.mark.parametrize("leap", [True, False])
def test_what_one_rank_sent_down_comes_up_to_another(leap: bool, tmp_path: Path) -> None:
    run = c20(tmp_path, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 1 + 2]
    assert run.requests("cached_tokens") == [0, 0, 0, 128]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    edge = run.report.meta.kvbm["edges"]["g2"]
    assert (edge["loaded"], edge["stored"], edge["evicted"]) == (2, 4, 0), "B went down for it, after A"
    assert run.report.meta.tiers["loaded_blocks"] == 2


def test_a_block_is_stored_once_whichever_ranks_have_it(tmp_path: Path) -> None:
    trace = asked(tmp_path, (0, A), (1000, A), (2000, A))
    sets = ("workers.kvbm.cpu_trigger=on_complete", "workers.kvbm.min_batch_blocks=1")
    run = toy(trace, tmp_path / "run", *RANKS, *sets, key_tokens=64)
    assert hits(run) == {"lookups": 6, "g2": 2, "g1": 2, "miss_absent": 2}
    edge = run.report.meta.kvbm["edges"]["g2"]
    assert (edge["stored"], edge["filtered"]) == (2, 2), "rank 1 offers what came up to it, in vain"


def test_a_rank_waits_for_what_another_one_is_sending_down(tmp_path: Path) -> None:
    """A goes down from 130 to 1130 ms; rank 1 waits for that, then for as long until it has come up."""
    trace = asked(tmp_path, (0, A), (500, A))
    slow = ("workers.kvbm.cpu_gb_per_s=0.016777216", "workers.kvbm.cpu_trigger=on_complete")
    run = toy(trace, tmp_path / "run", *RANKS, *slow, "workers.kvbm.min_batch_blocks=1", key_tokens=64)
    assert run.ms("ttft_s") == [130, 1130 + 1000 + 2 - 500]
    assert hits(run) == {"lookups": 4, "g2": 2, "miss_absent": 2}


def test_the_host_memory_of_a_worker_vanishes_for_all_its_ranks(tmp_path: Path) -> None:
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nworker = "pool-0"\nat_ms = 3000.5')
    run = c20(tmp_path, down)
    assert run.ms("ttft_s")[3] == 0.5 + 130, "the load of rank 1 fails at once"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}
    bad = faults(tmp_path, 'kind = "tier_corrupt"\ntier = "g2"\nworker = "pool-0"\nrate = 1.0\nat_ms = 0')
    assert hits(c20(tmp_path / "bad", bad)) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}


def test_a_worker_that_comes_back_has_nothing_below_any_rank(tmp_path: Path) -> None:
    lost = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-0"\nat_ms = 2500\nfor_ms = 200')
    run = c20(tmp_path, lost, "workers.startup_s=0")
    assert hits(run) == {"lookups": 8, "miss_absent": 8}


def test_blocks_of_a_rank_cross_the_host_links_of_its_own_gpus(tmp_path: Path) -> None:
    """A millisecond for a block over the one link of rank 1; over those of both ranks it would be half of that."""
    config = tmp_path / "links.toml"
    config.write_text('[[links]]\nname = "bus"\nkind = "pcie"\nper = "rank"\nbandwidth_gb_per_s = 8.388608\n')
    run = c20(tmp_path, "workers.links.host=bus", "workers.tp=1", config_file=config)
    assert run.ms("ttft_s")[3] == 2 + 2


@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
def test_other_engines(kind: str, tmp_path: Path) -> None:
    blocks = "workers.engine.kv_blocks=4" if kind == "sglang" else "workers.engine.kv_blocks=3"
    run = toy(
        "c20_tiers.jsonl",
        tmp_path / "run",
        *RANKS,
        f"workers.engine.kind={kind}",
        blocks,
        "workers.kvbm.cpu_trigger=on_complete",
        "workers.kvbm.min_batch_blocks=1",
        "workers.kvbm.cpu_cache_tokens=6400",
        serial=kind != "sglang",
        key_tokens=64,
    )
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


ROUTED = ("router.mode=kv", "router.index=engine", "router.route_ranks=true", "router.tie_break=lowest_id")


def test_a_router_that_chooses_ranks_credits_each_with_the_host_memory_of_its_worker(tmp_path: Path) -> None:
    """A is on rank 0, then in host memory; whichever rank the last A goes to, both have its two blocks there."""
    run = c20(tmp_path, *ROUTED, explain=True)
    last = pq.read_table(run.folder / "decisions.parquet").to_pylist()[-1]
    ranks = {one["dp_rank"]: one["credit_blocks"] for one in json.loads(last["candidates"])}
    assert ranks == {0: 2 * 0.75, 1: 2 * 0.75}, "host_cache_hit_weight is 0.75"
    assert hits(run)["g2"] == 2


def test_one_account_of_a_worker_does_not_tell_its_ranks_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.route_ranks = true with workers\.pool\.kvbm\.events = dedupe"):
        c20(tmp_path, *ROUTED, "workers.kvbm.events=dedupe")
    routed_by_worker = ("router.mode=kv", "router.index=engine", "router.tie_break=lowest_id")
    assert hits(c20(tmp_path, *routed_by_worker, "workers.kvbm.events=dedupe"))["g2"] == 2
