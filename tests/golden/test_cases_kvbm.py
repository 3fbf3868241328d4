"""C20 with a block manager: a hit in a lower tier is loaded, timed and counted once, by class; and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, toy

from policies.errors import CapabilityError

DEVICE = ("workers.engine.block_size=64", "workers.engine.kv_blocks=3")
TIER = (
    *DEVICE,
    "workers.kvbm.cpu_cache_tokens=256",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.cpu_gb_per_s=16.777216",
    "workers.kvbm.cpu_latency_s=0",
    "workers.kvbm.cpu_trigger=on_evict",
)


def hits(run: Run) -> dict[str, int]:
    """Look-ups by class, those that there were."""
    return {name: n for name, n in run.report.meta.kvbm["hits"].items() if n and not name.endswith("_tokens")}


@pytest.mark.parametrize("leap", [True, False])
def test_c20_and_a1_with_a_block_manager(leap: bool, tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, key_tokens=64, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert run.requests("cached_tokens") == [0, 0, 0, 128]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    edge = run.report.meta.kvbm["edges"]["g2"]
    assert (edge["loaded"], edge["loaded_bytes"]) == (2, 2 * 8_388_608)
    assert run.report.meta.moved_bytes["tier_loads"] == 2 * 8_388_608
    assert run.report.meta.tiers == {
        "lookup_blocks": 8, "g1_hit_blocks": 0, "g2_hit_blocks": 2, "g3_hit_blocks": 0, "g4_hit_blocks": 0,
        "loaded_blocks": 2,
    }  # fmt: skip


def faults(tmp_path: Path, *entries: str) -> str:
    path = tmp_path / "faults.toml"
    path.write_text("".join(f"[[faults]]\n{entry}\n" for entry in entries))
    return f"faults.path={path}"


def test_a4_a_read_that_fails_is_computed_and_counted_as_failed(tmp_path: Path) -> None:
    broken = faults(tmp_path, 'kind = "tier_corrupt"\ntier = "g2"\nrate = 1.0\nat_ms = 0')
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, broken, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 131], "both blocks are read, in a millisecond, and then computed"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}
    assert run.report.meta.kvbm["edges"]["g2"]["failed_reads"] == 2
    assert run.requests("cached_tokens") == [0, 0, 0, 0], "never reported as loaded"


def test_r7_a_tier_that_is_down_is_not_waited_for(tmp_path: Path) -> None:
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nat_ms = 2500')
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, down, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 130]
    assert hits(run) == {"lookups": 8, "miss_absent": 8}


def test_a_tier_that_is_lost_during_a_load_fails_the_load_at_once(tmp_path: Path) -> None:
    slow = ("workers.kvbm.cpu_gb_per_s=0.016777216",)  # half a second a block
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nat_ms = 3250')
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, *slow, down, key_tokens=64)
    assert run.ms("ttft_s")[3] == 250 + 130
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}


def test_a_full_tier_takes_nothing(tmp_path: Path) -> None:
    full = faults(tmp_path, 'kind = "tier_full"\ntier = "g2"\nat_ms = 0\nuntil_ms = 2500')
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, full, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 130]
    edge = run.report.meta.kvbm["edges"]["g2"]
    assert edge["failed_writes"] == 4, "what A and B left when they made room"
    assert edge["stored"] == 2, "what C left when A came back"


def test_a_load_that_hangs_fails_at_its_deadline(tmp_path: Path) -> None:
    hung = faults(tmp_path, 'kind = "link_down"\nlink = "kvbm-cpu:pool-0"\nat_ms = 2900')
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, hung, key_tokens=64)
    assert run.ms("ttft_s")[3] == 10_000 + 130
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}


def test_faults_of_tiers_need_tiers(tmp_path: Path) -> None:
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nat_ms = 2500')
    with pytest.raises(CapabilityError, match="no worker of this run has tiers below its device"):
        toy("c20_tiers.jsonl", tmp_path / "run", *DEVICE, down, key_tokens=64)
    other = faults(tmp_path, 'kind = "tier_down"\ntier = "g3"\nat_ms = 2500')
    run = toy("c20_tiers.jsonl", tmp_path / "run2", *TIER, other, key_tokens=64)
    timeline = json.loads((run.folder / "faults.json").read_text())["timeline"]
    assert timeline[0]["why_not"] == "no worker that is up has a tier g3"
