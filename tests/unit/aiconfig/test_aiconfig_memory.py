"""What fits: the twin's own pool, users in it, and each refusal with its two sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiconfig.candidate import Candidate, Pool
from aiconfig.estimate import Load
from aiconfig.memory import Fit, fit
from aiconfig.reasons import Rejection
from aiconfig.workload import Workload
from twin.cluster import build_groups
from twin.config import Config, EngineConfig, WorkerGroup
from twin.perf.layout import Layout

SHORT = Workload(isl=1024, osl=256)


def agg(
    model: str = "llama-3.1-8b", *, engine: str = "vllm", gpu: str = "h100_sxm", replicas: int = 1, **pool: object
) -> Candidate:
    base: dict = {
        "weights": "bf16",
        "kv": "bf16",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "layout": Layout(),
    }
    return Candidate(
        model=model, engine=engine, pools=(Pool(role="mixed", gpu=gpu, replicas=replicas, **(base | pool)),)
    )


def room(candidate: Candidate, workload: Workload = SHORT, load: Load | None = None) -> Fit:
    found = fit(candidate, workload, load)
    assert isinstance(found, Fit), found
    return found


def refusal(candidate: Candidate, workload: Workload = SHORT, load: Load | None = None) -> Rejection:
    found = fit(candidate, workload, load)
    assert isinstance(found, Rejection), found
    return found


def test_the_pool_of_the_specification() -> None:
    found = room(agg())  # M7: 27,763 blocks of 16
    assert found.pools[0].kv_tokens == 27_763 * 16
    assert found.users == 27_763 // 80  # a request ends with 1,280 tokens: 80 blocks


def test_the_pool_is_that_of_the_twin() -> None:
    group = WorkerGroup(
        model="deepseek-v3",
        gpu="h200_sxm",
        tp=1,
        dp=8,
        ep=8,
        weights="fp8",
        count=1,
        engine=EngineConfig(max_num_seqs=256),
    )
    built = build_groups(Config(workers=(group,)))[0].settings
    found = room(agg("deepseek-v3", gpu="h200_sxm", layout=Layout(dp=8, ep=8), weights="fp8")).pools[0]
    assert found.rank_kv_tokens == built.blocks * built.block_size


def test_replicas_have_room_each() -> None:
    assert room(agg(replicas=3)).users == 3 * room(agg()).users


def test_a_common_prefix_is_there_once() -> None:
    shared = room(agg(), Workload(isl=1024, osl=256, prefix_tokens=512)).users
    assert shared == (27_763 - 32) // 48


@pytest.mark.parametrize(
    ("candidate", "workload", "load", "reason", "needs", "has"),
    [
        (agg("llama-3.1-70b"), SHORT, None, "weights_do_not_fit", 131.4, 69.2),
        (agg(), Workload(isl=500_000, osl=1), None, "context_too_long", 500_001, 444_208),
        (agg(), SHORT, Load(users=400), "kv_too_small", 512_000, 444_208),
    ],
)
def test_refusals_compare_two_numbers(
    candidate: Candidate, workload: Workload, load: Load | None, reason: str, needs: float, has: float
) -> None:
    found = refusal(candidate, workload, load)
    assert found.reason == reason
    assert found.needs is not None
    assert found.has is not None
    assert found.needs > found.has
    assert (found.needs, found.has) == pytest.approx((needs, has), rel=1e-3)


def test_weights_may_leave_no_room_for_a_single_block(tmp_path: Path) -> None:
    table = tmp_path / "gpus.toml"  # 0.9 of it is what weights (14.958 GiB) and the runtime (2.5 GiB) take, and 1 MiB
    table.write_text("[h100_sxm]\nmemory_mib = 19865\n", encoding="utf-8")
    found = fit(agg(), SHORT, None, table)
    assert isinstance(found, Rejection)
    assert (found.reason, found.unit) == ("kv_too_small", "GiB")
    assert found.needs is not None
    assert found.has is not None
    assert 0 < found.needs - found.has < 2 / 1024


def test_a_load_that_just_fits_is_not_refused() -> None:
    users = room(agg()).users
    assert room(agg(), SHORT, Load(users=users)).users == users
    assert "KV full at 347 users, 348 asked for" in refusal(agg(), SHORT, Load(users=users + 1)).detail


def test_a_prefill_worker_needs_room_for_prompts_alone() -> None:
    pools = tuple(
        Pool(role=role, gpu="h100_sxm", layout=Layout(), replicas=1, weights="bf16", kv="bf16", max_num_seqs=256,
             max_num_batched_tokens=8192) for role in ("prefill", "decode")
    )  # fmt: skip
    split = Candidate(model="llama-3.1-8b", engine="vllm", pools=pools)
    long = Workload(isl=440_000, osl=4_000)
    assert [pool.users for pool in room(split, long).pools] == [1, 1]
    assert refusal(split, Workload(isl=440_000, osl=5_000)).reason == "context_too_long"
