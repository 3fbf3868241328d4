"""Prompts of one worker that come up from the host memory of another: times by hand, and what becomes of them when the
other one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cases_kvbm import TIER, faults, hits
from toy import Run, toy

from policies.errors import TwinError

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


def test_the_look_up_and_the_first_byte_take_their_time(tmp_path: Path) -> None:
    slow = ("workers.kvbm.peer_latency_s=0.003", "workers.kvbm.peer_lookup_s=0.02")
    assert two(tmp_path, *PEERS, *slow).ms("ttft_s")[3] == 20 + 3 + 2 + 2


def test_a_look_up_that_takes_too_long_finds_nothing_and_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(TwinError, match=r"peers.*every look-up takes more than 0\.02 s"):
        two(tmp_path, *PEERS, "workers.kvbm.peer_lookup_s=0.021")


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
