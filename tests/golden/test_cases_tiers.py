"""C20: a hit in the host tier is loaded, timed and counted once; and the reference's own example of such a load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_parity import peer_config, simulate
from toy import toy

TIER = (
    "workers.engine.block_size=64",
    "workers.engine.kv_blocks=3",
    "workers.engine.host_blocks=4",
    "workers.engine.host_block_bytes=8388608",
    "workers.engine.host_load_gb_per_s=16.777216",
)


def test_c20_a_lower_tier_hit_is_loaded_timed_and_counted_once(tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert run.requests("cached_tokens") == [0, 0, 0, 128]
    tiers = run.report.meta.tiers
    assert tiers == {"lookup_blocks": 8, "g1_hit_blocks": 0, "g2_hit_blocks": 2, "loaded_blocks": 2}
    assert tiers["lookup_blocks"] - tiers["g1_hit_blocks"] - tiers["g2_hit_blocks"] == 6, "misses"
    assert (tiers["g1_hit_blocks"] + tiers["g2_hit_blocks"]) / tiers["lookup_blocks"] == 0.25


def test_c20_without_the_tier_the_last_request_computes_everything(tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER[:2], key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 130]
    assert run.report.meta.tiers["lookup_blocks"] == 8, "the definition does not change with the tier"
    assert run.report.meta.tiers["g1_hit_blocks"] == 0


SGLANG = (
    "workers.engine.kind=sglang",
    "workers.engine.exclusive_prefill=false",
    "workers.engine.chunked_prefill=true",
    "workers.engine.block_size=64",
    "workers.engine.kv_blocks=4",
    *TIER[2:],
)
"""One page more than in the case: SGLang lets nobody in who would fill its pool to the last page."""


@pytest.mark.parametrize(
    ("sets", "ttft_ms"),
    [
        (["workers.engine.host_load_overlap=false"], 3.0),  # two pages of 0.5 ms, then two tokens
        ([], 2.0),  # two tokens, layer by layer behind pages that take 1 ms
        (["workers.engine.host_load_gb_per_s=2.097152"], 8.0),  # two pages of 4 ms hide the tokens
        (["workers.engine.host_offload=on_store", "workers.engine.host_blocks=6"], 2.0),
    ],
)
def test_c20_on_sglang(sets: list[str], ttft_ms: float, tmp_path: Path) -> None:
    """As the case has it, and with SGLang's own way of loading while it computes."""
    engine = dict(pair.split("=", 1) for pair in (*SGLANG, *sets))
    run = toy("c20_tiers.jsonl", tmp_path / "run", *[f"{k}={v}" for k, v in engine.items()], key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, ttft_ms]
    assert run.requests("cached_tokens") == [0, 0, 0, 128]
    assert run.report.meta.tiers == {"lookup_blocks": 8, "g1_hit_blocks": 0, "g2_hit_blocks": 2, "loaded_blocks": 2}


@pytest.mark.shared
@pytest.mark.parametrize("trigger", ["on_evict", "on_store"])
def test_golden_host_offload(trigger: str, shared: Path, tmp_path: Path) -> None:
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    golden = next(g for g in goldens["trace"] if g["case"] == "host_offload")
    trace = tmp_path / "rows.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    settings = {"num_workers": 1, "extra_engine_args": {"engine": {"num_gpu_blocks": 24}}}
    run = {"rows": [0, 4], "trace_block_size": 64, "settings": settings}
    config = peer_config(
        run,
        trace,
        "workers.engine.host_blocks=100",
        f"workers.engine.host_block_bytes={64 * 131072}",
        f"workers.engine.host_offload={trigger}",
    )
    ended = simulate(config)
    for row, theirs in enumerate(golden["requests"]):
        seq = ended[row][0].sequence
        assert seq is not None
        ours = (seq.admit_s, seq.first_token_s, seq.last_token_s)
        for at_s, key in zip(ours, ("first_admit_ms", "first_token_ms", "last_token_ms"), strict=True):
            assert at_s is not None
            assert at_s * 1e3 == pytest.approx(theirs[key], rel=1e-6)
        assert seq.reused_tokens == theirs["reused_input_tokens"]
