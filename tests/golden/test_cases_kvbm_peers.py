"""Prompts of one worker that come up from the host memory of another: times by hand, and what becomes of them when the
other one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cases_kvbm import TIER, faults, hits
from test_cases_kvbm_roles import TIER as ROLE_TIER
from test_cases_kvbm_roles import rows, split, worker
from toy import CASES, Run, toy

from policies.errors import TwinError
from reports.decisions import decision_text, decisions_of
from reports.record import RunRecord

PEERS = ("workers.kvbm.peers=true", "workers.kvbm.peer_gb_per_s=8.388608", "workers.kvbm.peer_latency_s=0")
"""A block of 8,388,608 B takes a millisecond from worker to worker."""


def two(tmp_path: Path, *sets: str, **options: bool) -> Run:
    """A on W0, B on W1, C on W0, where it drives A down to host memory, A again on W1; 130 tokens each."""
    return toy("c20_tiers.jsonl", tmp_path / "run", *TIER, *sets, workers=2, key_tokens=64, **options)


def test_without_peers_the_other_worker_computes_everything(tmp_path: Path) -> None:
    run = two(tmp_path)
    assert run.ms("ttft_s") == [130, 130, 130, 130]
    assert "peers" not in run.report.meta.kvbm
    assert "tier_peers" not in run.report.meta.moved_bytes


@pytest.mark.parametrize("leap", [True, False])
def test_a_prefix_comes_from_the_host_memory_of_another_worker(leap: bool, tmp_path: Path) -> None:
    run = two(tmp_path, *PEERS, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 2 * 1 + 2], "two blocks of 1 ms, then two tokens"
    assert run.requests("cached_tokens") == [0, 0, 0, 128]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    kvbm = run.report.meta.kvbm
    assert kvbm["peers"] == {"loaded": 2, "failed_reads": 0, "loaded_bytes": 2 * 8_388_608}
    assert kvbm["edges"]["g2"]["loaded"] == 0, "its own host memory had nothing"
    assert run.report.meta.moved_bytes["tier_peers"] == 2 * 8_388_608
    assert run.report.meta.tiers["g2_hit_blocks"] == run.report.meta.tiers["loaded_blocks"] == 2


def test_the_first_byte_takes_its_time(tmp_path: Path) -> None:
    assert two(tmp_path, *PEERS, "workers.kvbm.peer_latency_s=0.003").ms("ttft_s")[3] == 3 + 2 + 2


def test_both_nics_carry_the_read(tmp_path: Path) -> None:
    """Where the topology names what KV crosses, the read crosses it, out of one worker and into the other."""
    config = tmp_path / "links.toml"
    config.write_text('[[links]]\nname = "nic"\nper = "worker"\nbandwidth_gb_per_s = 4.194304\n')
    sets = (*TIER, "workers.kvbm.peers=true", "workers.kvbm.peer_latency_s=0", "workers.links.store=nic")
    done = toy("c20_tiers.jsonl", tmp_path / "run", *sets, workers=2, key_tokens=64, config_file=config)
    assert done.ms("ttft_s")[3] == 4 + 2


def test_a_peer_that_is_lost_during_the_read_leaves_everything_to_compute(tmp_path: Path) -> None:
    lost = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-0"\nat_ms = 3001')
    run = two(tmp_path, *PEERS, lost)
    assert run.ms("ttft_s") == [130, 130, 130, 1 + 130], "the read fails at once, and is computed"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}
    assert run.report.meta.kvbm["peers"] == {"loaded": 2, "failed_reads": 2, "loaded_bytes": 2 * 8_388_608}
    assert run.requests("cached_tokens") == [0, 0, 0, 0], "never reported as loaded"


def test_a_peer_that_was_lost_before_is_not_asked(tmp_path: Path) -> None:
    lost = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-0"\nat_ms = 2500')
    run = two(tmp_path, *PEERS, lost)
    assert run.ms("ttft_s")[3] == 130
    assert hits(run) == {"lookups": 8, "miss_absent": 8}


def test_host_memory_that_vanishes_and_damaged_blocks_of_a_peer(tmp_path: Path) -> None:
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nworker = "pool-0"\nat_ms = 3001')
    assert two(tmp_path / "down", *PEERS, down).ms("ttft_s")[3] == 1 + 130
    bad = faults(tmp_path, 'kind = "tier_corrupt"\ntier = "g2"\nworker = "pool-0"\nrate = 1.0\nat_ms = 0')
    run = two(tmp_path / "bad", *PEERS, bad)
    assert run.ms("ttft_s")[3] == 2 + 130, "both blocks are read, and then computed"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}


def test_the_router_tells_what_it_saw_at_peers(tmp_path: Path) -> None:
    """A on W0, and C, which drives A down to host memory; A again: W0 has nothing on its device then, W1 could read it
    there."""
    kv = ("router.mode=kv", "router.tie_break=lowest_id", "router.peer_cache_hit_weight=0.5")
    a, c = (130, [1, 2, 3], 1), (130, [11, 12, 13], 1)
    trace = rows(tmp_path, (0, *a), (1000, *c), (2000, *a))
    run = toy(trace, tmp_path / "run", *TIER, *PEERS, *kv, workers=2, key_tokens=64, explain=True)
    record = RunRecord(run.folder)
    decisions = decisions_of(record, [0, 2])
    assert [[seen.peer_blocks for seen in one.candidates or ()] for one in decisions] == [[0, 0], [0, 2]]
    assert [seen.credit_blocks for seen in decisions[1].candidates or ()] == [0.75 * 2, 0.5 * 2]
    first, last = (decision_text(one, {0: "pool-0", 1: "pool-1"}) for one in decisions)
    assert "at peers" not in first
    assert last.splitlines()[-3].split()[-2:] == ["at", "peers"]
    assert last.splitlines()[-1].split() == ["pool-1", "3.031", "2.031", "1.000", "2.000", "0", "0", "2"]


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("workers.kvbm.peers=true",), "no other worker has a cpu tier and peers"),
        (("workers.kvbm.peer_gb_per_s=8",), "peers is off"),
    ],
)
def test_keys_without_effect_are_said(sets: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(TwinError, match=why):
        toy("c20_tiers.jsonl", tmp_path / "run", *TIER, *sets, key_tokens=64)


THROUGH = (
    "workers.kvbm.cpu_trigger=on_complete",
    "workers.kvbm.cpu_cache_tokens=6400",
    "workers.kvbm.min_batch_blocks=1",
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "engine",
    [
        ("kind=sglang", "kv_blocks=4"),
        ("kind=trtllm", "kv_blocks=3", "capacity_policy=max_utilization"),
        ("kind=trtllm", "kv_blocks=3"),
        ("nextn=2", "accept_rates=1,1"),
    ],
    ids="-".join,
)
def test_whatever_schedules_reads_from_peers(engine: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    """With two ranks, too: C20 uses one of each worker, and the last A comes to the other one of W1."""
    sets = (*PEERS, *THROUGH, *(f"workers.engine.{each}" for each in engine), f"workers.dp={ranks}")
    serial = "kind=sglang" not in engine
    run = toy(
        "c20_tiers.jsonl",
        tmp_path / "run",
        *TIER,
        *sets,
        "allow_no_effect=true",
        workers=2,
        serial=serial,
        key_tokens=64,
    )
    assert run.ms("ttft_s") == [130, 130, 130, 2 * 1 + 2]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    assert run.report.meta.kvbm["peers"] == {"loaded": 2, "failed_reads": 0, "loaded_bytes": 2 * 8_388_608}
    assert run.report.meta.tiers["loaded_blocks"] == 2


def test_sglang_with_tiers_uses_the_host_link_of_its_topology(tmp_path: Path) -> None:
    """Blocks that come up below the radix cache cross links.host, like those of other engines: 2 ms each."""
    config = tmp_path / "links.toml"
    config.write_text('[[links]]\nname = "bus"\nkind = "pcie"\nper = "worker"\nbandwidth_gb_per_s = 4.194304\n')
    sets = (*TIER, *THROUGH, "workers.engine.kind=sglang", "workers.engine.kv_blocks=4", "workers.links.host=bus")
    run = toy(
        "c20_tiers.jsonl",
        tmp_path / "run",
        *sets,
        "allow_no_effect=true",
        serial=False,
        key_tokens=64,
        config_file=config,
    )
    assert run.ms("ttft_s")[3] == 2 * 2 + 2


READING = ROLE_TIER + "peers = true\npeer_gb_per_s = 8.388608\npeer_latency_s = 0\n"
AT_ONCE = 'first_token = "prefill"\nbandwidth_gb_per_s = 1e6'


@pytest.mark.parametrize("leap", [True, False])
def test_prefill_workers_read_from_each_other(leap: bool, tmp_path: Path) -> None:
    """A on P0, B on P1, C on P0, A on P1, which reads what P0 has in host memory: 2 ms, then two tokens."""
    prefill = worker("prefill", 3, tier=READING).replace("count = 1", "count = 2")
    done = split(CASES / "c20_tiers.jsonl", tmp_path / "run", prefill, worker("decode", 100), table=AT_ONCE, leap=leap)
    assert done.ms("ttft_s") == [130, 130, 130, 2 * 1 + 2]
    assert hits(done) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    assert done.report.meta.kvbm["peers"]["loaded"] == 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_prefill_worker_reads_what_a_decode_worker_keeps(lost: bool, tmp_path: Path) -> None:
    """The prompt was handed over and went down there; the prefill worker's own host memory holds one block, of B."""
    small = READING.replace("cpu_cache_tokens = 6400", "cpu_cache_tokens = 64")
    a, b = [1, 2, 3], [11, 12, 13]
    trace = rows(tmp_path, (0, 130, a, 2), (1000, 130, b, 2), (2000, 130, a, 2))
    extra = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nworker = "decode-0"\nat_ms = 2001') if lost else ""
    done = split(
        trace,
        tmp_path / "run",
        worker("prefill", 3, tier=small),
        worker("decode", 9, tier=READING),
        table=AT_ONCE,
        extra=f'[faults]\npath = "{extra.removeprefix("faults.path=")}"' if lost else "",
    )
    assert done.ms("ttft_s")[2] == (1 + 130 if lost else 2 * 1 + 2)
    found = {"miss_failed": 2} if lost else {"g2": 2}
    assert hits(done) == {"lookups": 6, "miss_absent": 4} | found
    assert done.report.meta.kvbm["peers"] == {
        "loaded": 2,
        "failed_reads": 2 if lost else 0,
        "loaded_bytes": 2 * 8_388_608,
    }
