"""Look-ups in a registry that take time, are late, are wrong, or find nobody to ask: times by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cases_kvbm import TIER, faults, hits, rows
from test_cases_kvbm_peers import PEERS, two
from toy import Run, toy

from policies.errors import ConfigError

LOOK_UP = "workers.kvbm.registry_lookup_s=0.002"

STORE = (
    "workers.engine.block_size=64",
    "workers.engine.kv_blocks=3",
    "workers.kvbm.remote=true",
    "workers.kvbm.remote_offload=presence",
    "workers.kvbm.remote_gb_per_s=8.388608",
    "workers.kvbm.remote_latency_s=0",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.cpu_gb_per_s=1000",
    "workers.kvbm.flush_s=0",
)
"""A block goes to the store, or comes from there, in a millisecond."""


def registry(run: Run) -> dict[str, int]:
    return run.report.meta.kvbm["registry"]


@pytest.mark.parametrize("leap", [True, False])
def test_every_request_that_lacks_anything_asks_and_waits_for_the_answer(leap: bool, tmp_path: Path) -> None:
    run = two(tmp_path, *PEERS, LOOK_UP, leap=leap)
    assert run.ms("ttft_s") == [132, 132, 132, 2 + 2 + 2], "the question, two blocks, two tokens"
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    assert registry(run) == {"asked": 4, "late": 0}


@pytest.mark.parametrize("leap", [True, False])
def test_tiers_that_all_share_are_asked_for_in_the_same_way(leap: bool, tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *STORE, LOOK_UP, workers=2, key_tokens=64, leap=leap)
    assert run.ms("ttft_s") == [132, 132, 132, 2 + 2 + 2]
    assert hits(run) == {"lookups": 8, "g4": 2, "miss_absent": 6}
    at_once = toy("c20_tiers.jsonl", tmp_path / "once", *STORE, workers=2, key_tokens=64, leap=leap)
    assert at_once.ms("ttft_s") == [130, 130, 130, 2 + 2]
    assert "registry" not in at_once.report.meta.kvbm


def test_a_look_up_without_an_answer_in_20_ms_is_a_miss(tmp_path: Path) -> None:
    assert two(tmp_path / "in", *PEERS, "workers.kvbm.registry_lookup_s=0.02").ms("ttft_s") == [150, 150, 150, 24]
    run = two(tmp_path / "late", *PEERS, "workers.kvbm.registry_lookup_s=0.021")
    assert run.ms("ttft_s") == [150, 150, 150, 150]
    assert hits(run) == {"lookups": 8, "miss_absent": 8}
    assert registry(run) == {"asked": 4, "late": 4}
    assert any("every look-up of the registry takes more than 0.02 s" in line for line in run.report.meta.warnings)


def test_a_prompt_that_lies_on_the_device_asks_nobody(tmp_path: Path) -> None:
    trace = rows(tmp_path, (0, 130, [1, 2, 3], 1), (1000, 130, [1, 2, 3], 1))
    run = toy(trace, tmp_path / "run", *STORE, LOOK_UP, key_tokens=64)
    assert run.ms("ttft_s") == [132, 2]
    assert registry(run) == {"asked": 1, "late": 0}


@pytest.mark.parametrize(("negative_s", "ttft_ms"), [(1.0, 130), (0.1, 2 + 2 + 2)])
def test_what_nobody_had_a_moment_ago_is_not_asked_for_though_it_is_there(
    negative_s: float, ttft_ms: float, tmp_path: Path
) -> None:
    """In turn: W0 uses P twice, and puts it into the store when Q drives it off its device. W1 asked for P before that;
    it uses it once, so what it drives off itself is not put. 700 ms after it asked it wants P again."""
    trace = rows(
        tmp_path,
        (0, 130, [1, 2, 3], 1),
        (1, 40, [7], 1),
        (300, 130, [1, 2, 3], 1),
        (301, 130, [1, 2, 3], 1),
        (600, 130, [11, 12, 13], 1),
        (601, 130, [21, 22, 23], 1),
        (1000, 40, [8], 1),
        (1001, 130, [1, 2, 3], 1),
    )
    twice = ("remote_trigger=on_evict", "remote_offload=presence_lfu", "min_lfu_count=1")
    sets = (*STORE, LOOK_UP, f"workers.kvbm.registry_negative_s={negative_s}", *(f"workers.kvbm.{s}" for s in twice))
    run = toy(trace, tmp_path / "run", *sets, workers=2, key_tokens=64)
    assert run.report.meta.kvbm["edges"]["g4"]["stored"] == 2
    assert run.ms("ttft_s")[7] == ttft_ms
    assert hits(run).get("g4", 0) == (2 if negative_s == 0.1 else 0)


def cut_off(tmp_path: Path, at_ms: float, until_ms: float | None = None, kind: str = "partition") -> str:
    until = f"\nuntil_ms = {until_ms}" if until_ms is not None else ""
    who = 'worker = "pool-0"\ndetect = "silent"\n' if kind == "partition" else ""
    return faults(tmp_path, f'kind = "{kind}"\n{who}at_ms = {at_ms}{until}')


def test_a_peer_that_is_cut_off_is_read_in_vain_until_its_lease_is_over(tmp_path: Path) -> None:
    """Cut off from 2.5 s on; at 3 s the other one wants what it has."""
    cut = cut_off(tmp_path, 2500)
    run = two(tmp_path / "held", *PEERS, LOOK_UP, cut)
    assert run.ms("ttft_s")[3] == 2 + 10_000 + 130, "it is on record; the read comes to nothing at its deadline"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}
    assert run.report.meta.kvbm["peers"]["failed_reads"] == 2
    run = two(tmp_path / "over", *PEERS, LOOK_UP, cut, "workers.kvbm.registry_lease_s=0.3")
    assert run.ms("ttft_s")[3] == 132
    assert hits(run) == {"lookups": 8, "miss_absent": 8}
    assert any("registry_lease_s = 0.3 is shorter than the longest read" in line for line in run.report.meta.warnings)


def test_a_read_that_a_partition_breaks_off_begins_anew_when_it_is_over(tmp_path: Path) -> None:
    cut = cut_off(tmp_path, 3003, 3050)
    run = two(tmp_path / "run", *PEERS, LOOK_UP, cut)
    assert run.ms("ttft_s")[3] == 50 + 2 + 2
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


def test_workers_that_do_not_reach_each_other_ask_and_read_in_vain(tmp_path: Path) -> None:
    """Both reach the registry, so leases are renewed; the read begins when the partition is over."""
    parted = faults(tmp_path, 'kind = "partition"\nbetween = ["pool-0", "pool-1"]\nat_ms = 2500\nuntil_ms = 3500')
    run = two(tmp_path / "run", *PEERS, LOOK_UP, parted)
    assert run.ms("ttft_s")[3] == 500 + 2 + 2
    at_once = two(tmp_path / "once", *PEERS, parted)
    assert at_once.ms("ttft_s")[3] == 130, "who knows all at once does not ask for what it cannot reach"


def test_a_peer_that_is_back_puts_all_that_it_has(tmp_path: Path) -> None:
    cut = cut_off(tmp_path, 2200, 2900)
    run = two(tmp_path / "run", *PEERS, LOOK_UP, cut, "workers.kvbm.registry_lease_s=0.3")
    assert run.ms("ttft_s")[3] == 2 + 2 + 2


def test_without_a_registry_who_is_cut_off_is_not_read(tmp_path: Path) -> None:
    run = two(tmp_path / "run", *PEERS, cut_off(tmp_path, 2500))
    assert run.ms("ttft_s")[3] == 130


def test_while_the_store_of_leases_is_down_nobody_answers(tmp_path: Path) -> None:
    down = cut_off(tmp_path, 2500, 9000, "discovery_down")
    run = two(tmp_path / "run", *PEERS, LOOK_UP, down)
    assert run.ms("ttft_s") == [132, 132, 132, 20 + 130]
    assert registry(run) == {"asked": 4, "late": 1}
    assert hits(run) == {"lookups": 8, "miss_absent": 8}


def test_what_was_written_while_its_writer_was_cut_off_is_found_when_it_is_back(tmp_path: Path) -> None:
    """W0 computes A from 0 to 132 ms, and is cut off when A's blocks land in the store; W1 wants A at 1 s."""
    trace = rows(tmp_path, (0, 130, [1, 2, 3], 1), (1000, 130, [1, 2, 3], 1))
    for until_ms, ttft_ms in ((900, 2 + 2 + 2), (2000, 132)):
        cut = cut_off(tmp_path, 133, until_ms)
        run = toy(trace, tmp_path / f"{until_ms}", *STORE, LOOK_UP, cut, workers=2, key_tokens=64)
        assert run.ms("ttft_s")[1] == ttft_ms


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ((LOOK_UP,), "there is nothing to ask for"),
        ((*PEERS, "workers.kvbm.registry_negative_s=2"), "nobody asks a registry"),
        ((*PEERS, LOOK_UP, "workers.kvbm.registry_lease_s=2"), "without faults every lease is renewed"),
    ],
)
def test_keys_without_effect_are_said(sets: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        toy("c20_tiers.jsonl", tmp_path / "run", *TIER, *sets, workers=2, key_tokens=64)
