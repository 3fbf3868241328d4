"""C20 with a block manager: a hit in a lower tier is loaded, timed and counted once, by class; and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import Run, toy

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
