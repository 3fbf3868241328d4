"""Tiers below prefill and decode workers, by hand: what comes up where, what goes down, and what shares which link.

The TOY engine: 1 ms per prompt token, 10 ms per decode step; blocks of 64 tokens and 8,388,608 bytes, links of
16.777216 GB/s, so that a block takes half a millisecond.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import CASES, Run, run

from policies.errors import CapabilityError

TOKENS_BYTES = 8_388_608 // 64
TIER = """
[workers.kvbm]
cpu_cache_tokens = 6400
block_bytes = 8388608
cpu_gb_per_s = 16.777216
cpu_latency_s = 0
min_batch_blocks = 1
"""
BUS = """
[[links]]
name = "bus"
kind = "pcie"
per = "worker"
discipline = "fair"
bandwidth_gb_per_s = 16.777216
"""


def worker(role: str, kv_blocks: int, more: str = "", tier: str = "", links: str = "") -> str:
    return (
        f'[[workers]]\nname = "{role}"\nrole = "{role}"\ncount = 1\ntp = 1\n{links}\n[workers.engine]\n'
        f"block_size = 64\nchunked_prefill = false\nexclusive_prefill = true\nkv_blocks = {kv_blocks}\n{more}\n"
        f'[workers.latency]\nmodel = "fixed"\nprefill_s_per_token = 0.001\ndecode_s = 0.01\n{tier}\n'
    )


def split(trace: Path, out: Path, *workers: str, table: str = "", extra: str = "", **options: object) -> Run:
    """Prefill and decode workers whose hand-offs take no time unless `table` says otherwise."""
    handed = table or "bandwidth_gb_per_s = 1e6"
    file = out.parent / "run.toml"
    file.write_text(
        "[trace]\nhash_block_tokens = 64\n"
        f"[disaggregation]\nkv_bytes_per_token = {TOKENS_BYTES}\n{handed}\n{extra}\n" + "".join(workers)
    )
    return run(trace, out, config_file=file, **options)


def rows(folder: Path, *requests: tuple[float, int, list[int], int]) -> Path:
    """A trace of (ms, prompt tokens, ids, output tokens), 64 tokens an id."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": isl, "output_length": osl, "hash_ids": ids}) + "\n"
            for ms, isl, ids, osl in requests
        )
    )
    return path


def hits(run: Run) -> dict[str, int]:
    return {name: n for name, n in run.report.meta.kvbm["hits"].items() if n and not name.endswith("_tokens")}


@pytest.mark.parametrize("leap", [True, False])
def test_c20_on_a_prefill_worker(leap: bool, tmp_path: Path) -> None:
    """What A, B and C left when they were pushed out comes up for the second A: 1 ms, then two tokens."""
    tier = TIER + 'cpu_trigger = "on_evict"\n'
    done = split(
        CASES / "c20_tiers.jsonl",
        tmp_path / "run",
        worker("prefill", 3, tier=tier),
        worker("decode", 100),
        table='first_token = "prefill"\nbandwidth_gb_per_s = 1e6',
        leap=leap,
    )
    assert done.ms("ttft_s") == [130, 130, 130, 3]
    assert done.requests("cached_tokens") == [0, 0, 0, 128]
    assert hits(done) == {"lookups": 8, "g2": 2, "miss_absent": 6}


def test_a_decode_worker_sends_down_what_came_by_hand_off_and_what_it_made(tmp_path: Path) -> None:
    """128 tokens came, 64 more were made; the last of them has no KV, so two blocks and no third one."""
    trace = rows(tmp_path, (0, 128, [1, 2], 64))
    done = split(trace, tmp_path / "run", worker("prefill", 100), worker("decode", 100, tier=TIER))
    edge = done.report.meta.kvbm["edges"]["g2"]
    assert (edge["offered"], edge["stored"], edge["loaded"]) == (2, 2, 0)
    assert hits(done) == {}, "nothing is looked up where a prompt comes by hand-off"


def test_who_is_sent_back_on_a_decode_worker_takes_up_what_went_down(tmp_path: Path) -> None:
    """Two prompts of a block outgrow three blocks together; the younger one comes back when the older one is done.

    Meanwhile its first block was needed. It is read again in half a millisecond, and the rest is computed.
    """
    trace = rows(tmp_path, (0, 64, [1], 100), (0, 64, [2], 100))
    done = split(trace, tmp_path / "run", worker("prefill", 100), worker("decode", 3, tier=TIER))
    edge = done.report.meta.kvbm["edges"]["g2"]
    assert done.requests("readmissions") == [0, 1]
    assert edge["loaded"] == 1
    again = done.report.meta.kvbm["hits"]
    assert (again["reused_tokens"], again["lookups"]) == (64, 0)


def test_a_hand_off_and_blocks_that_go_down_share_a_link_that_both_cross(tmp_path: Path) -> None:
    """Two blocks leave for the host as 128 tokens leave for the decode worker: each takes twice as long."""
    trace = rows(tmp_path, (0, 128, [1, 2], 2))
    both = 'links.kv = "bus"\nlinks.host = "bus"'
    shared = TIER.replace("cpu_gb_per_s = 16.777216\n", "")
    alone = split(
        trace,
        tmp_path / "alone",
        worker("prefill", 100, links='links.kv = "bus"'),
        worker("decode", 100, links='links.kv = "bus"'),
        table="setup_s = 0",
        extra=BUS,
    )
    assert alone.ms("ttft_s") == [128 + 1 + 10]
    beside = split(
        trace,
        tmp_path / "beside",
        worker("prefill", 100, tier=shared, links=both),
        worker("decode", 100, links='links.kv = "bus"'),
        table="setup_s = 0",
        extra=BUS,
    )
    assert beside.ms("ttft_s") == [128 + 2 + 10]
    assert beside.report.meta.moved_bytes == {"kv": 16_777_216, "tier_stores": 16_777_216}


def test_a_hand_off_and_a_remote_store_share_the_network_card_where_that_is_said(tmp_path: Path) -> None:
    trace = rows(tmp_path, (0, 128, [1, 2], 2))
    remote = """
[workers.kvbm]
remote = true
remote_offload = "presence"
remote_gb_per_s = 1000
remote_latency_s = 0
block_bytes = 8388608
min_batch_blocks = 1
"""
    decode = worker("decode", 100, links='links.kv = "bus"')
    for links, took_ms in (('links.kv = "bus"', 1), ('links.kv = "bus"\nlinks.store = "bus"', 2)):
        done = split(
            trace,
            tmp_path / f"run{took_ms}",
            worker("prefill", 100, tier=remote + "cpu_gb_per_s = 1000\n", links=links),
            decode,
            table="setup_s = 0",
            extra=BUS,
        )
        assert done.ms("ttft_s") == [128 + took_ms + 10]


def test_conditional_counts_what_the_device_has_and_not_what_lies_below(tmp_path: Path) -> None:
    """The second A has two of three blocks in the decode worker's host memory, and none on its device: it is handed
    over. With two on the device it would stay."""
    others = [(1000 * n, 192, [10 * n, 10 * n + 1, 10 * n + 2], 1) for n in (1, 2)]
    trace = rows(tmp_path, (0, 192, [1, 2, 3], 1), *others, (3000, 192, [1, 2, 3], 1))
    table = 'conditional = "isl"\nbandwidth_gb_per_s = 1e6'
    for kv_blocks, local in ((4, 0), (100, 1)):
        done = split(
            trace,
            tmp_path / f"run{kv_blocks}",
            worker("prefill", 100),
            worker("decode", kv_blocks, tier=TIER),
            table=table,
            extra='[router]\nmode = "kv"',
        )
        assert done.report.meta.routing["local"] == local


def test_who_places_prompts_hears_of_a_shared_store_that_decode_workers_write(tmp_path: Path) -> None:
    """Only the decode worker has a store below it; whoever places prompts hears of what lies there all the same."""
    shared = """
[workers.kvbm]
remote = true
remote_offload = "presence"
remote_latency_s = 0
block_bytes = 8388608
"""
    trace = rows(tmp_path, (0, 130, [1, 2, 3], 1), (1000, 130, [7, 8, 9], 1), (2000, 130, [1, 2, 3], 1))
    done = split(
        trace,
        tmp_path / "run",
        worker("prefill", 3),
        worker("decode", 100, tier=shared),
        extra='[router]\nmode = "kv"',
    )
    assert done.report.meta.routing["prefill_lower_tier_blocks"] == 4
    assert done.report.meta.routing["prefill_stale_events"] == 0


def test_roles_under_the_reference_rules_have_no_tiers(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    head = 'compat = "dynamo-1.6.1"\n[trace]\nhash_block_tokens = 64\n'
    file.write_text(head + worker("prefill", 9, tier=TIER) + worker("decode", 9))
    with pytest.raises(CapabilityError, match=r"workers\.prefill\.kvbm: compat = dynamo-1\.6\.1"):
        run(rows(tmp_path, (0, 64, [1], 1)), tmp_path / "run", config_file=file)
