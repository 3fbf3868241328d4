"""C20 and its likes on engines of other kinds, by hand: a hit below the device is loaded, timed and counted once,
whatever schedules the requests.

The TOY engine with blocks of 64 tokens that take half a millisecond to come up.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, toy

from policies.errors import CapabilityError

TIER = (
    "workers.engine.block_size=64",
    "workers.kvbm.cpu_cache_tokens=256",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.cpu_gb_per_s=16.777216",
    "workers.kvbm.cpu_latency_s=0",
    "workers.kvbm.cpu_trigger=on_evict",
)


def rows(folder: Path, *requests: tuple[float, int, list[int], int, str | None]) -> Path:
    """A trace of (ms, prompt tokens, ids, output tokens, adapter), 64 tokens an id."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": isl, "output_length": osl, "hash_ids": ids, "lora": lora})
            + "\n"
            for ms, isl, ids, osl, lora in requests
        )
    )
    return path


def hits(run: Run) -> dict[str, int]:
    return {name: n for name, n in run.report.meta.kvbm["hits"].items() if n and not name.endswith("_tokens")}


@pytest.mark.parametrize("leap", [True, False])
def test_c20_with_draft_tokens(leap: bool, tmp_path: Path) -> None:
    sets = (*TIER, "workers.engine.kv_blocks=3", "workers.engine.nextn=2", "workers.engine.accept_rates=1,1")
    run = toy("c20_tiers.jsonl", tmp_path / "run", *sets, "allow_no_effect=true", key_tokens=64, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


def test_adapters_share_no_prefix_in_lower_tiers(tmp_path: Path) -> None:
    """A under adapter a went down; under a it is found again, under b it is not."""
    others = [(1000.0 * n, 130, [10 * n, 10 * n + 1, 10 * n + 2], 1, None) for n in (1, 2)]
    for lora, found in (("a", 2), ("b", 0)):
        trace = rows(tmp_path, (0, 130, [1, 2, 3], 1, "a"), *others, (3000, 130, [1, 2, 3], 1, lora))
        run = toy(trace, tmp_path / f"run-{lora}", *TIER, "workers.engine.kv_blocks=3", key_tokens=64)
        assert hits(run).get("g2", 0) == found
        assert run.ms("ttft_s")[3] == (3 if found else 130)


def test_nothing_comes_up_for_an_adapter_that_would_be_one_too_many(tmp_path: Path) -> None:
    """Adapter b runs from 4000 to 5124 ms; what adapter a has below comes up when it is done, not before."""
    trace = rows(
        tmp_path,
        (0, 130, [1, 2, 3], 1, "a"),
        (1000, 380, [11, 12, 13, 14, 15, 16], 1, None),
        (4000, 64, [21], 100, "b"),
        (4500, 130, [1, 2, 3], 1, "a"),
        (4600, 70, [31, 32], 1, None),
    )
    sets = (*TIER, "workers.engine.kv_blocks=6", "workers.kvbm.cpu_cache_tokens=6400", "workers.engine.max_loras=1")
    run = toy(trace, tmp_path / "run", *sets, serial=False, key_tokens=64)
    assert hits(run)["g2"] == 2
    b_ends_ms = 4064 + 99 * 10 + 70  # the plain model passes: its prompt of 70 ms stops the answer of b
    assert run.ms("ttft_s")[3] == b_ends_ms - 4500 + 1 + 2


TRTLLM = (*TIER, "workers.engine.kind=trtllm", "workers.engine.kv_blocks=3", "allow_no_effect=true")


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_c20_on_trtllm(policy: str, tmp_path: Path) -> None:
    sets = (*TRTLLM, f"workers.engine.capacity_policy={policy}")
    run = toy("c20_tiers.jsonl", tmp_path / "run", *sets, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


def test_on_trtllm_a_prompt_that_lies_below_to_its_last_block_computes_nothing(tmp_path: Path) -> None:
    """It comes up in a millisecond and pays for a decode, as it does when it is on the device."""
    others = [(1000.0 * n, 130, [10 * n, 10 * n + 1, 10 * n + 2], 1, None) for n in (1, 2)]
    trace = rows(tmp_path, (0, 128, [1, 2], 1, None), *others, (3000, 128, [1, 2], 1, None))
    run = toy(trace, tmp_path / "run", *TRTLLM, key_tokens=64)
    assert run.ms("ttft_s") == [128, 130, 130, 1 + 10]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


@pytest.mark.parametrize("leap", [True, False])
def test_c20_on_sglang(leap: bool, tmp_path: Path) -> None:
    """A page more than the case, since SGLang fills no pool to its last page; the load comes first, then two tokens."""
    sets = (*TIER, "workers.engine.kind=sglang", "workers.engine.kv_blocks=4", "allow_no_effect=true")
    run = toy("c20_tiers.jsonl", tmp_path / "run", *sets, serial=False, key_tokens=64, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 3]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}


def test_the_two_kinds_of_tiers_of_sglang_are_not_combined(tmp_path: Path) -> None:
    sets = (*TIER, "workers.engine.kind=sglang", "workers.engine.host_blocks=9", "allow_no_effect=true")
    with pytest.raises(CapabilityError, match=r"workers\.pool\.kvbm: it has a plain host tier \(host_blocks\)"):
        toy("c20_tiers.jsonl", tmp_path / "run", *sets, key_tokens=64)


def test_on_sglang_who_waits_for_a_store_does_not_end_those_behind(tmp_path: Path) -> None:
    """Found by random programs: with one slot, which a request that waits for a running store may take, the next one
    could not have its pages, nothing ran, and it failed."""
    trace = rows(
        tmp_path,
        (0, 130, [51, 52, 53], 1, None),
        (3000, 130, [1, 2, 3], 1, None),
        (3200, 130, [71, 72, 73], 1, None),
        (3400, 130, [1, 2, 3], 1, None),
        (3401, 130, [51, 52, 53], 1, None),
    )
    slow = ("workers.kvbm.cpu_gb_per_s=0.016777216", "workers.kvbm.cpu_trigger=on_complete")
    sets = (*TIER, *slow, "workers.kvbm.cpu_cache_tokens=6400", "workers.kvbm.min_batch_blocks=1")
    sglang = ("workers.engine.kind=sglang", "workers.engine.kv_blocks=4", "allow_no_effect=true")
    run = toy(trace, tmp_path / "run", *sets, *sglang, key_tokens=64)
    assert run.requests("status") == ["completed"] * 5
    assert hits(run)["g2"] >= 2


@pytest.mark.parametrize(("kind", "over_ms"), [("vllm", 2128), ("trtllm", 2138)])
@pytest.mark.parametrize("leap", [True, False])
def test_blocks_that_come_up_where_a_step_ends_are_told_of_with_the_next_one(
    leap: bool, kind: str, over_ms: int, tmp_path: Path
) -> None:
    """X decodes from 2066 ms on, 10 ms a step. A is looked up at 2106 and comes up in 20 ms, when the second step from
    there ends; its last two tokens take 2 ms, and TRT-LLM decodes with them."""
    requests = [(0, 130, [1, 2, 3], 1), (1000, 450, list(range(10, 18)), 1), (2000, 66, [30, 31], 40)]
    trace = rows(tmp_path, *((*request, None) for request in requests), (2100, 130, [1, 2, 3], 1, None))
    slow = (
        "workers.engine.kv_blocks=8",
        "workers.kvbm.cpu_gb_per_s=0.8388608",
        "router.mode=kv",
        f"workers.engine.kind={kind}",
        "allow_no_effect=true",
    )
    run = toy(trace, tmp_path / "run", *TIER, *slow, serial=False, key_tokens=64, leap=leap, journal=True)
    assert hits(run)["g2"] == 2
    assert run.ms("ttft_s")[3] == over_ms - 2100
    said = [json.loads(line).get("event", {}) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    stored = [event for event in said if event.get("type") == "BlocksStored"]
    told_s = [event["at_s"] for event in stored if event["tier"] == "G1_DEVICE"]
    assert told_s == [0.13, 1.45, 2.066, over_ms / 1000]
