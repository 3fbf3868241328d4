"""Host memory that the workers of one node share, by hand: what one of them sent down comes up to another."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_cases_kvbm import TIER, faults, hits
from toy import Run, toy

from policies.errors import CapabilityError, TwinError

NODE = (*TIER, "workers.kvbm.cpu_shared_by=2", "workers.kvbm.cpu_cache_tokens=6400")


def two(tmp_path: Path, *sets: str, workers: int = 2, **options: bool) -> Run:
    """A on W0, B on W1, C on W0, where it drives A down to host memory, A again on W1; 130 tokens each."""
    return toy("c20_tiers.jsonl", tmp_path / "run", *NODE, *sets, workers=workers, key_tokens=64, **options)


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_worker_sent_down_comes_up_to_another(leap: bool, ranks: int, tmp_path: Path) -> None:
    through = ("workers.kvbm.cpu_trigger=on_complete", "workers.kvbm.min_batch_blocks=1") if ranks > 1 else ()
    run = two(tmp_path, f"workers.dp={ranks}", *through, leap=leap)
    assert run.ms("ttft_s") == [130, 130, 130, 1 + 2]
    assert hits(run) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    assert run.report.meta.kvbm["edges"]["g2"]["loaded"] == 2


@pytest.mark.parametrize(("shared_by", "found"), [(1, 0), (2, 0), (3, 2)])
def test_workers_of_another_node_have_their_own(shared_by: int, found: int, tmp_path: Path) -> None:
    """A on W0, B on W1, C on W2, D on W0, where it drives A down, E on W1, and A on W2."""
    trace = tmp_path / "rows.jsonl"
    names = [[10 * n, 10 * n + 1, 10 * n + 2] for n in (1, 2, 3, 4, 5, 1)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * n, "input_length": 130, "output_length": 1, "hash_ids": ids}) + "\n"
            for n, ids in enumerate(names)
        )
    )
    sets = (*NODE, f"workers.kvbm.cpu_shared_by={shared_by}")
    run = toy(trace, tmp_path / "run", *sets, workers=3, key_tokens=64)
    assert hits(run).get("g2", 0) == found
    assert run.ms("ttft_s")[5] == (1 + 2 if found else 130)


@pytest.mark.parametrize("index", ["simulated", "engine"])
def test_the_router_credits_every_worker_of_the_node(index: str, tmp_path: Path) -> None:
    sets = ("router.mode=kv", f"router.index={index}", "router.tie_break=least_recent", "allow_no_effect=true")
    run = two(tmp_path, *sets, explain=True)
    last = pq.read_table(run.folder / "decisions.parquet").to_pylist()[-1]
    credit = {one["worker_id"]: one["credit_blocks"] for one in json.loads(last["candidates"])}
    assert credit == {0: 2 * 0.75, 1: 2 * 0.75}, "host_cache_hit_weight is 0.75"


def test_the_memory_of_a_node_stays_while_one_of_its_workers_is_there(tmp_path: Path) -> None:
    lost = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-0"\nat_ms = 2500')
    assert hits(two(tmp_path, lost)) == {"lookups": 8, "g2": 2, "miss_absent": 6}
    both = "".join(
        f'[[faults]]\nkind = "worker_down"\nworker = "pool-{n}"\nat_ms = 2500\nfor_ms = 100\n' for n in (0, 1)
    )
    (tmp_path / "both.toml").write_text(both)
    run = two(tmp_path / "both", f"faults.path={tmp_path / 'both.toml'}", "workers.startup_s=0")
    assert hits(run) == {"lookups": 8, "miss_absent": 8}, "with the last of them it is gone"


def test_a_worker_that_comes_back_is_known_to_reach_what_is_there(tmp_path: Path) -> None:
    back = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-1"\nat_ms = 2300\nfor_ms = 300')
    for index in ("simulated", "engine"):
        sets = ("router.mode=kv", f"router.index={index}", "router.tie_break=least_recent", "allow_no_effect=true")
        run = two(tmp_path / index, back, *sets, "workers.startup_s=0", explain=True)
        last = pq.read_table(run.folder / "decisions.parquet").to_pylist()[-1]
        assert {one["credit_blocks"] for one in json.loads(last["candidates"])} == {2 * 0.75}


def test_the_memory_of_a_node_vanishes_for_all_its_workers(tmp_path: Path) -> None:
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nworker = "pool-0"\nat_ms = 3000.5')
    run = two(tmp_path, down)
    assert run.ms("ttft_s")[3] == 0.5 + 130, "the load of W1 fails at once"
    assert hits(run) == {"lookups": 8, "miss_absent": 6, "miss_failed": 2}


@pytest.mark.parametrize("name", ["peers", "prefetch"])
def test_what_shared_host_memory_cannot_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=rf"workers\.pool\.kvbm\.{name}: .*cpu_shared_by = 2"):
        two(tmp_path, f"workers.kvbm.{name}=true", "workers.kvbm.disk_cache_tokens=64000", "allow_no_effect=true")


@pytest.mark.parametrize(("workers", "why"), [(1, "the group has one worker")])
def test_one_worker_shares_with_nobody(workers: int, why: str, tmp_path: Path) -> None:
    with pytest.raises(TwinError, match=f"cpu_shared_by.*{why}"):
        two(tmp_path, workers=workers)


@pytest.mark.parametrize("index", ["simulated", "engine"])
def test_a_worker_that_gives_one_account_tells_what_its_node_has(index: str, tmp_path: Path) -> None:
    """W1 comes back at 2600 ms, after A went down: it publishes A as its own, tier or no tier."""
    back = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-1"\nat_ms = 2300\nfor_ms = 300')
    sets = ("router.mode=kv", f"router.index={index}", "workers.kvbm.events=dedupe", "allow_no_effect=true")
    run = two(tmp_path / "run", back, *sets, "router.tie_break=least_recent", "workers.startup_s=0", explain=True)
    last = pq.read_table(run.folder / "decisions.parquet").to_pylist()[-1]
    assert {one["overlap_blocks"] for one in json.loads(last["candidates"])} == {2}
