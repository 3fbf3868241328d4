"""C20 with a block manager: a hit in a lower tier is loaded, timed and counted once, by class; and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, run, toy

from policies.errors import CapabilityError, ConfigError, TwinError
from twin.perf.hardware import find_gpu

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


FOUR = ("workers.engine.kv_blocks=5", "workers.kvbm.cpu_cache_tokens=100000")


@pytest.mark.parametrize(
    ("case", "fault", "ttft_ms", "classes"),
    [
        ("R1 all is good", None, 4 * 0.5 + 44, {"g2": 4}),
        ("R3 the first is bad", 'kind = "tier_corrupt"\ntier = "g2"\nrate = 1.0', 4 * 0.5 + 300, {"miss_failed": 4}),
        ("R7 the tier is down", 'kind = "tier_down"\ntier = "g2"', 300, {"miss_absent": 4}),
    ],
)
def test_r1_r3_r7_four_blocks_to_load_of_a_prompt_of_300_tokens(
    case: str, fault: str | None, ttft_ms: float, classes: dict[str, int], tmp_path: Path
) -> None:
    """Half a millisecond a block, a millisecond for each token that is computed."""
    mine, others = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]
    trace = rows(tmp_path, (0, 300, mine, 1), (1000, 300, others, 1), (2000, 300, mine, 1))
    broken = [faults(tmp_path, f"{fault}\nat_ms = 1500")] if fault is not None else []
    run = toy(trace, tmp_path / "run", *TIER, *FOUR, *broken, key_tokens=64)
    assert run.ms("ttft_s") == [300, 300, ttft_ms], case
    found = dict.fromkeys(("g2", "miss_absent", "miss_failed"), 0) | {"miss_absent": 8}
    for name, blocks in classes.items():
        found[name] += blocks
    assert hits(run) == {"lookups": 12} | {name: n for name, n in found.items() if n}


WIDE = ("workers.engine.block_size=64", "workers.kvbm.cpu_cache_tokens=100000", "workers.kvbm.block_bytes=1000000")


def test_a2_the_block_of_the_last_token_is_a_miss_of_its_own_class(tmp_path: Path) -> None:
    run = toy("c13_fullhit.jsonl", tmp_path / "run", *WIDE, key_tokens=64)
    assert hits(run) == {"lookups": 4, "g1": 1, "miss_absent": 2, "miss_last_token": 1}
    assert run.report.meta.kvbm["hits"]["cached_tokens"] == 64
    assert run.report.meta.kvbm["hits"]["prompt_tokens"] == 256


def test_a3_hits_on_the_device_are_what_they_are_without_tiers(tmp_path: Path) -> None:
    run = toy("c06_mooncake512.jsonl", tmp_path / "run", *WIDE, key_tokens=512)
    assert hits(run) == {"lookups": 40, "g1": 16, "miss_absent": 24}
    assert run.report.meta.kvbm["hits"]["cached_tokens"] == 1024
    assert run.report.meta.tiers["g1_hit_blocks"] == 16


def rows(tmp_path: Path, *requests: tuple[float, int, list[int], int]) -> Path:
    """A trace of (ms, prompt tokens, ids, output tokens), 64 tokens an id."""
    return tenants_rows(tmp_path, *((*request, None) for request in requests))


def tenants_rows(tmp_path: Path, *requests: tuple[float, int, list[int], int, str | None]) -> Path:
    """The same, with whose request it is."""
    names = ("timestamp", "input_length", "hash_ids", "output_length", "tenant")
    path = tmp_path / "rows.jsonl"
    table = [dict(zip(names, request, strict=True)) for request in requests]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in table))
    return path


def test_a6_prompts_without_a_full_block_look_nothing_up(tmp_path: Path) -> None:
    run = toy(rows(tmp_path, (0, 40, [1], 1), (100, 40, [1], 1)), tmp_path / "run", *WIDE, key_tokens=64)
    assert hits(run) == {}


def test_a7_a_block_behind_a_gap_is_a_hole(tmp_path: Path) -> None:
    """The last block of a prompt went down when it was evicted, the one before it found the host full."""
    others = [(1000, 100, [7, 8], 1), (2000, 100, [17, 18], 1)]
    trace = rows(tmp_path, (0, 200, [1, 2, 3, 4], 1), *others, (3000, 200, [1, 2, 3, 4], 1))
    tier = (*TIER, "workers.engine.kv_blocks=4", "workers.kvbm.cpu_cache_tokens=64", "workers.kvbm.when_full=drop")
    run = toy(trace, tmp_path / "run", *tier, key_tokens=64)
    assert hits(run) == {"lookups": 8, "g1": 1, "miss_absent": 6, "miss_hole": 1}
    assert run.report.meta.kvbm["edges"]["g2"]["dropped"] > 0


def test_a5_who_comes_back_after_preemption_is_not_looked_up_again(tmp_path: Path) -> None:
    """Two requests outgrow the device together; the younger one is sent back and comes in again."""
    trace = rows(tmp_path, (0, 64, [1], 100), (0, 64, [2], 100))
    sets = (*WIDE, "workers.engine.kv_blocks=3", "workers.kvbm.cpu_trigger=on_evict")
    run = toy(trace, tmp_path / "run", *sets, serial=False, key_tokens=64)
    assert run.requests("readmissions") == [0, 1]
    assert hits(run) == {"lookups": 2, "miss_absent": 2}
    again = run.report.meta.kvbm["hits"]
    assert again["recomputed_tokens"] + again["reused_tokens"] > 64


def test_a_request_whose_blocks_are_on_their_way_waits_for_them_and_they_move_once(tmp_path: Path) -> None:
    other = (1000, 260, [7, 8, 9, 10, 11], 1)
    trace = rows(tmp_path, (0, 130, [1, 2, 3], 1), other, *[(4000, 130, [1, 2, 3], 1)] * 2)
    sets = (*TIER, "workers.engine.kv_blocks=5", "workers.kvbm.cpu_gb_per_s=0.016777216")
    trace_out = toy(trace, tmp_path / "run", *sets, serial=False, key_tokens=64)
    assert trace_out.report.meta.kvbm["edges"]["g2"]["loaded"] == 2
    assert hits(trace_out) == {"lookups": 10, "g1": 2, "g2": 2, "miss_absent": 6}
    first, second = trace_out.ms("ttft_s")[2:]
    assert (first, second) == (1002, 1004), "half a second a block, then two tokens each"


SLOW_STORE = (*TIER, "workers.kvbm.cpu_gb_per_s=0.016777216")
"""Half a second a block, each way."""


def returns_early(tmp_path: Path) -> Path:
    """A, then B which pushes it down: a batch that begins at 1010 ms and has landed at 2010. A again at 1500."""
    return rows(tmp_path, (0, 130, [1, 2, 3], 1), (1000, 130, [11, 12, 13], 1), (1500, 130, [1, 2, 3], 1))


@pytest.mark.parametrize("leap", [True, False])
def test_a_load_waits_for_a_running_store_of_its_blocks(leap: bool, tmp_path: Path) -> None:
    run = toy(returns_early(tmp_path), tmp_path / "run", *SLOW_STORE, key_tokens=64, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 510 + 1000 + 2]
    assert hits(run) == {"lookups": 6, "g2": 2, "miss_absent": 4}
    assert run.report.meta.kvbm["edges"]["g2"]["loaded"] == 2


def test_who_compares_times_computes_what_a_running_store_brings_too_late(tmp_path: Path) -> None:
    for rule in ("faster", "deadline"):
        sets = (*SLOW_STORE, f"workers.kvbm.onboard={rule}")
        sets += ("workers.kvbm.onboard_deadline_s=1.4",) if rule == "deadline" else ()
        run = toy(returns_early(tmp_path), tmp_path / rule, *sets, key_tokens=64)
        assert run.ms("ttft_s") == [130, 130, 130], "510 ms until it has landed, and a second to load"
        assert hits(run) == {"lookups": 6, "miss_absent": 6}
    sets = (*SLOW_STORE, "workers.kvbm.onboard=deadline", "workers.kvbm.onboard_deadline_s=1.6")
    assert toy(returns_early(tmp_path), tmp_path / "in_time", *sets, key_tokens=64).ms("ttft_s")[2] == 1512


def test_a_store_that_fails_or_hangs_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    lost = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nat_ms = 1700')
    run = toy(returns_early(tmp_path), tmp_path / "lost", *SLOW_STORE, lost, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 200 + 130]
    refused = faults(tmp_path, 'kind = "tier_full"\ntier = "g2"\nat_ms = 1700')
    run = toy(returns_early(tmp_path), tmp_path / "refused", *SLOW_STORE, refused, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 510 + 130]
    hung = faults(tmp_path, 'kind = "link_down"\nlink = "kvbm-cpu:pool-0"\nat_ms = 1700')
    run = toy(returns_early(tmp_path), tmp_path / "hung", *SLOW_STORE, hung, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 10_000 + 130]
    assert hits(run) == {"lookups": 6, "miss_absent": 6}


FETCH = (
    "workers.engine.block_size=64",
    "workers.engine.kv_blocks=17",
    "workers.kvbm.cpu_cache_tokens=1280",
    "workers.kvbm.disk_cache_tokens=100000",
    "workers.kvbm.disk_offload=presence",
    "workers.kvbm.block_bytes=8388608",
    "router.queue.prefill_busy_tokens=100",
)


def returns_from_disk(tmp_path: Path) -> Path:
    """A; ten others, whose blocks push A's two out of host memory (20 blocks); a prompt of a second; A once more, which
    waits in the router until that is computed."""
    others = [(1000 * n, 130, [100 * n, 100 * n + 1, 100 * n + 2], 1) for n in range(1, 11)]
    long = (20_000, 1000, list(range(5000, 5016)), 1)
    return rows(tmp_path, (0, 130, [1, 2, 3], 1), *others, long, (20_001, 130, [1, 2, 3], 1))


@pytest.mark.parametrize("leap", [True, False])
def test_blocks_of_a_request_that_waits_in_the_router_climb_to_host_memory(leap: bool, tmp_path: Path) -> None:
    trace = returns_from_disk(tmp_path)
    plain = toy(trace, tmp_path / "plain", *FETCH, key_tokens=64, leap=leap)
    assert plain.ms("ttft_s")[-1] == round(999 + 0.1 + 2 * 0.8388608 + 2, 3)
    assert hits(plain)["g3"] == 2
    ahead = toy(trace, tmp_path / "ahead", *FETCH, "workers.kvbm.prefetch=true", key_tokens=64, leap=leap)
    assert ahead.ms("ttft_s")[-1] == round(999 + 0.01 + 2 * 0.262144 + 2, 3)
    assert hits(ahead) == {"lookups": 39, "g2": 2, "miss_absent": 37}
    assert ahead.report.meta.kvbm["prefetch"] == {"fetched": 2, "used": 2, "wasted": 0}
    assert ahead.report.meta.moved_bytes["tier_fetches"] == 2 * 8_388_608
    assert "prefetch" not in plain.report.meta.kvbm


def test_what_was_fetched_for_a_request_that_leaves_is_wasted(tmp_path: Path) -> None:
    leaves = faults(tmp_path, 'kind = "client_disconnect"\nrow = 12\nat_ms = 20500')
    run = toy(
        returns_from_disk(tmp_path), tmp_path / "run", *FETCH, leaves, "workers.kvbm.prefetch=true", key_tokens=64
    )
    assert run.report.meta.kvbm["prefetch"] == {"fetched": 2, "used": 0, "wasted": 2}


def test_a_prefetch_that_reads_damaged_blocks_brings_none(tmp_path: Path) -> None:
    bad = faults(tmp_path, 'kind = "tier_corrupt"\ntier = "g3"\nrate = 1.0\nat_ms = 15000')
    run = toy(returns_from_disk(tmp_path), tmp_path / "run", *FETCH, bad, "workers.kvbm.prefetch=true", key_tokens=64)
    assert run.report.meta.kvbm["prefetch"] == {"fetched": 0, "used": 0, "wasted": 0}
    assert run.ms("ttft_s")[-1] == 999 + 130, "forgotten, and computed"


def test_prefetching_that_can_do_nothing_is_told(tmp_path: Path) -> None:
    for sets, why in (
        ((*TIER, "router.queue.prefill_busy_tokens=100"), "it takes a cpu tier and one below it"),
        ([text for text in FETCH if "queue" not in text], "no request ever waits in the router"),
    ):
        with pytest.raises(ConfigError, match=f"workers.pool.kvbm.prefetch has no effect: {why}"):
            run_plain(tmp_path, *sets, "workers.kvbm.prefetch=true")


QUOTA = (
    *TIER,
    "workers.kvbm.cpu_cache_tokens=100000",
    "workers.kvbm.cpu_offload=presence+tenant_quota",
    "workers.kvbm.tenant_quota_tokens=192",
)


def test_a_tenant_has_no_more_of_a_tier_than_its_quota(tmp_path: Path) -> None:
    """Of two prompts of a three blocks stay; b has its own. Each prompt pushes the one before it off the device."""
    asked = [("a", 1), ("a", 11), ("b", 1)] * 2
    trace = tenants_rows(tmp_path, *((1000 * n, 130, [k, k + 1, k + 2], 1, who) for n, (who, k) in enumerate(asked)))
    run = toy(trace, tmp_path / "run", *QUOTA, key_tokens=64)
    assert run.report.meta.kvbm["tenants"] == {"g2": {"a": 3, "b": 2}}
    assert hits(run) == {"lookups": 12, "g2": 5, "miss_absent": 7}
    assert run.report.meta.kvbm["edges"]["g2"]["filtered"] > 0


def test_a_quota_without_tenants_is_told(tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *QUOTA, key_tokens=64)
    assert any("no row of the trace names its tenant" in line for line in run.report.meta.no_effect)
    sets = [text for text in QUOTA if "quota_tokens" not in text]
    with pytest.raises(ConfigError, match="offload 'tenant_quota' needs tenant_quota_tokens"):
        toy("c20_tiers.jsonl", tmp_path / "none", *sets, key_tokens=64)


def test_tenants_share_no_content(tmp_path: Path) -> None:
    trace = tenants_rows(tmp_path, *((1000 * n, 130, [1, 2, 3], 1, who) for n, who in enumerate(["a", "b", "a", None])))
    run = toy(trace, tmp_path / "run", *WIDE, key_tokens=64)
    assert hits(run) == {"lookups": 8, "g1": 2, "miss_absent": 6}


def test_groups_that_a_block_manager_cannot_serve_are_refused_by_name(tmp_path: Path) -> None:
    for change, why in (
        ("workers.engine.prefix_caching=false", "prefix caching is off"),
        ("workers.engine.host_blocks=4", "it has a plain host tier"),
    ):
        with pytest.raises(CapabilityError, match=f"workers.pool.kvbm: {why}"):
            run_plain(tmp_path, "workers.kvbm.cpu_cache_gb=1", "allow_no_effect=true", change)


def test_what_is_wrong_with_a_tier_is_said_before_the_run(tmp_path: Path) -> None:
    for change, why in (
        ("workers.kvbm.cpu_eviction=linage", "did you mean 'lineage'"),
        ("workers.kvbm.cpu_eviction=belady", "looks into the future"),
        ("workers.kvbm.cpu_offload=presence+presense", "did you mean 'presence'"),
        ("workers.kvbm.cpu_cache_tokens=3", "holds no block"),
        ("workers.kvbm.onboard=deadline", "needs workers.pool.kvbm.onboard_deadline_s"),
        ("workers.kvbm.min_batch_blocks=65", "batches of 65 to 64 blocks"),
    ):
        with pytest.raises(TwinError, match=why):
            run_plain(tmp_path, *([] if "tokens" in change else ["workers.kvbm.cpu_cache_gb=1"]), change)


def run_plain(tmp_path: Path, *sets: str) -> None:
    run(rows(tmp_path, (0, 40, [1], 1)), tmp_path / "run", *sets)


# ---------------------------------------------------------------- ways up

DISK = (
    *DEVICE,
    "workers.kvbm.disk_cache_tokens=100000",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.disk_offload=presence",
    "workers.kvbm.disk_trigger=on_evict",
)


@pytest.mark.parametrize(
    ("path", "load_ms"),
    [
        ("direct", 0.1 + 2 * 0.8388608),
        ("bounce", 0.1 + 2 * 0.8388608 + 2 * 0.262144),
        ("piped", 0.1 + 2 * 0.8388608 + 0.262144),
    ],
)
def test_blocks_come_up_from_disk_in_one_hop_or_two(path: str, load_ms: float, tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *DISK, f"workers.kvbm.disk_path={path}", key_tokens=64)
    assert run.ms("ttft_s")[3] == round(load_ms + 2, 3)
    assert hits(run) == {"lookups": 8, "g3": 2, "miss_absent": 6}


def test_what_is_computed_faster_is_not_loaded(tmp_path: Path) -> None:
    """Two blocks take 335 ms to load and 128 ms to compute."""
    sets = (*TIER, "workers.kvbm.cpu_gb_per_s=0.05", "workers.kvbm.onboard=faster")
    run = toy("c20_tiers.jsonl", tmp_path / "run", *sets, key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 130]
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_slower": 2}


def test_a_worker_reads_from_the_remote_store_what_another_one_wrote(tmp_path: Path) -> None:
    """Rows take turns: A and C on worker 0, B and the second A on worker 1, over 5 GB/s after 5 ms."""
    remote = ("workers.kvbm.remote=true", "workers.kvbm.remote_offload=presence", "workers.kvbm.block_bytes=8388608")
    run = toy("c20_tiers.jsonl", tmp_path / "run", *DEVICE, *remote, workers=2, key_tokens=64)
    assert run.ms("ttft_s")[3] == round(5 + 2 * 8.388608 / 5 + 2, 3)
    assert hits(run) == {"lookups": 8, "g4": 2, "miss_absent": 6}


def test_tiers_cross_the_links_of_the_run_where_these_are_named(tmp_path: Path) -> None:
    sets = [text for text in TIER if "cpu_gb_per_s" not in text]
    run = toy("c20_tiers.jsonl", tmp_path / "run", *sets, "workers.links.host=pcie", key_tokens=64)
    pcie = find_gpu("h100_sxm").pcie_bytes_per_s
    assert pcie is not None
    assert run.ms("ttft_s")[3] == round(2 * 8_388_608 / 4 / pcie * 1e3 + 2, 3), "an even share for each of four ranks"


def test_tiers_that_are_too_small_are_told(tmp_path: Path) -> None:
    run = toy("c20_tiers.jsonl", tmp_path / "run", *TIER, "workers.engine.kv_blocks=4", key_tokens=64)
    told = [warning for warning in run.report.meta.warnings if "kvbm" in warning]
    assert told == [
        "workers.pool.kvbm: tier g2 holds 4 blocks and the device pool 4: a tier that is not larger than the one above "
        "it mostly keeps second copies"
    ]


def test_groups_that_share_a_tier_must_be_able_to_read_it(tmp_path: Path) -> None:
    config = tmp_path / "two.toml"
    group = '[[workers]]\nname = "{0}"\n[workers.engine]\nblock_size = {1}\n[workers.kvbm]\nremote = true\n'
    config.write_text(group.format("a", 16) + group.format("b", 32))
    with pytest.raises(ConfigError, match="the groups a, b differ in model, KV format, tp or block_size"):
        run_config(rows(tmp_path, (0, 40, [1], 1)), tmp_path / "run", config)


def run_config(trace: Path, out: Path, config: Path) -> None:
    run(trace, out, config_file=config)


SLOW_SECOND_HOP = (
    *DEVICE,
    "workers.kvbm.disk_cache_tokens=256",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.disk_gb_per_s=16.777216",
    "workers.kvbm.cpu_gb_per_s=0.08388608",
    "workers.kvbm.disk_latency_s=0",
    "workers.kvbm.disk_offload=presence",
    "workers.kvbm.disk_trigger=on_evict",
)
"""A block takes half a millisecond from disk to host memory, and 100 ms from there to the device."""


@pytest.mark.parametrize(("path", "load_ms"), [("direct", 200), ("bounce", 201), ("piped", 200.5)])
def test_who_compares_times_counts_every_hop_of_a_load(path: str, load_ms: float, tmp_path: Path) -> None:
    """128 tokens are computed in 128 ms: sooner than two blocks cross both hops, later than they cross the first."""
    sets = (*SLOW_SECOND_HOP, f"workers.kvbm.disk_path={path}")
    always = toy("c20_tiers.jsonl", tmp_path / "always", *sets, key_tokens=64)
    assert always.ms("ttft_s")[3] == load_ms + 2
    faster = toy("c20_tiers.jsonl", tmp_path / "faster", *sets, "workers.kvbm.onboard=faster", key_tokens=64)
    assert faster.ms("ttft_s") == [130, 130, 130, 130]
    assert hits(faster) == {"lookups": 8, "miss_absent": 6, "miss_slower": 2}
    for deadline_ms, ttft_ms in ((load_ms - 1, 130), (load_ms + 1, load_ms + 2)):
        onboard = ("workers.kvbm.onboard=deadline", f"workers.kvbm.onboard_deadline_s={deadline_ms / 1e3}")
        late = toy("c20_tiers.jsonl", tmp_path / f"{deadline_ms:g}", *sets, *onboard, key_tokens=64)
        assert late.ms("ttft_s")[3] == ttft_ms


def test_who_compares_times_counts_with_the_bandwidth_of_now(tmp_path: Path) -> None:
    """A fault leaves the host link a hundredth: loading takes 100 ms a block, computing 64. Later it is whole again."""
    others = [(1000, 130, [11, 12, 13], 1), (3000, 130, [11, 12, 13], 1)]
    again = [(2000, 130, [1, 2, 3], 1), (4000, 130, [1, 2, 3], 1)]
    trace = rows(tmp_path, (0, 130, [1, 2, 3], 1), others[0], again[0], others[1], again[1])
    slow = faults(
        tmp_path, 'kind = "link_slow"\nlink = "kvbm-cpu:pool-0"\nfactor = 0.005\nat_ms = 1800\nuntil_ms = 2900'
    )
    run = toy(trace, tmp_path / "run", *TIER, slow, "workers.kvbm.onboard=faster", key_tokens=64)
    assert run.ms("ttft_s") == [130, 130, 130, 3, 3]
