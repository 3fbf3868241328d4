"""When a prompt stays on a decode worker: the router spec, section 11, F1 to F8."""

from __future__ import annotations

import pytest
from builders import Scene, router_settings, worker

from policies.cluster.actions import Dispatch
from policies.cluster.events import RequestMigrated
from policies.cluster.ids import Leg, RequestId, Role, WorkerId
from policies.router.base import Router
from policies.router.build import build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings, stays_local

KEYS = list(range(100, 200))


@pytest.mark.parametrize(
    ("isl", "overlap_blocks", "local"),
    [(2000, 0, False), (2000, 10, True), (2000, 9, False), (4000, 30, False), (4000, 31, True), (10_000, 125, True)],
)
def test_little_is_left_in_tokens_and_as_a_share(isl: int, overlap_blocks: int, local: bool) -> None:
    assert stays_local(isl, overlap_blocks * 64) is local


def deployment(
    *, conditional: str, share: float | None, busy_tokens: int | None = None, mode: str = "kv", decode: int = 1
) -> Scene:
    """One prefill worker (0) and decode workers with 100 blocks of 64 tokens (1, ...)."""
    prefill, other = (build(leg) for leg in leg_settings(router_settings(mode)))
    assert isinstance(prefill, Router)
    assert isinstance(other, Router)
    settings = DisaggregationSettings(
        order="prefill_first",
        conditional=conditional,  # type: ignore[arg-type]
        busy_tokens=busy_tokens,
        decode_busy_share=share,
    )
    ups = [worker(i, role=Role.DECODE if i else Role.PREFILL, total_blocks=100) for i in range(1 + decode)]
    return Scene(Disaggregated(prefill, other, settings), ups)


def went(scene: Scene, request_id: str, isl: int, keys: list[int] | None = None) -> tuple[int, Leg]:
    action = scene.arrive(request_id, isl, keys)
    assert isinstance(action, Dispatch), action
    return action.worker_id, action.leg


LOCAL, REMOTE = (1, Leg.AGG), (0, Leg.PREFILL)


def test_f7_a_long_prompt_stays_while_prefill_is_busy() -> None:
    for rule in ("prefill_load", "isl_or_load"):
        scene = deployment(conditional=rule, share=None, busy_tokens=3000)
        assert [went(scene, f"r{n}", 4000) for n in range(3)] == [REMOTE, LOCAL, LOCAL]


def test_f8_a_prompt_that_would_stay_goes_when_its_decode_worker_is_busy() -> None:
    """F2: 2,000 tokens are 32 blocks, 10 of them cached. Two such prompts are 64 % of 100 blocks, three 96 %."""
    scene = deployment(conditional="isl", share=0.64)
    scene.stored(1, KEYS[:10])
    assert [went(scene, f"r{n}", 2000, KEYS[:32]) for n in range(3)] == [LOCAL, LOCAL, REMOTE]
    scene.finish("r0")
    assert went(scene, "r3", 2000, KEYS[:32]) == LOCAL, "room again: 64 blocks are not more than 64"
    scene.cancel("r1")
    assert went(scene, "r4", 2049, KEYS[:33]) == REMOTE, "2,049 tokens are one block more: 65"


def test_without_a_share_no_decode_worker_is_ever_busy() -> None:
    scene = deployment(conditional="isl", share=None)
    scene.stored(1, KEYS[:10])
    assert {went(scene, f"r{n}", 2000, KEYS[:32]) for n in range(20)} == {LOCAL}


@pytest.mark.parametrize("mode", ["kv", "round-robin", "least-loaded"])
def test_f8_holds_when_prefill_is_busy_too_and_prompts_stay_with_decode_workers_that_are_not(mode: str) -> None:
    """Each of two decode workers keeps three prompts of 25 blocks; the last is handed over, busy or not."""
    scene = deployment(conditional="prefill_load", share=0.75, busy_tokens=100, mode=mode, decode=2)
    assert went(scene, "first", 1600) == REMOTE
    kept = [went(scene, f"r{n}", 1600) for n in range(6)]
    assert sorted(kept) == [(1, Leg.AGG)] * 3 + [(2, Leg.AGG)] * 3
    assert went(scene, "last", 1600) == REMOTE


def test_blocks_of_a_lost_decode_worker_are_promised_no_more() -> None:
    scene = deployment(conditional="isl", share=0.4)
    scene.stored(1, KEYS[:10])
    assert went(scene, "r0", 2000, KEYS[:32]) == LOCAL
    assert went(scene, "r1", 2000, KEYS[:32]) == REMOTE
    scene.fail("r0")
    scene.lost(1)
    scene.up(1, role=Role.DECODE, total_blocks=100, epoch=1)
    scene.stored(1, KEYS[:10])
    assert went(scene, "r2", 2000, KEYS[:32]) == LOCAL


def test_a_migrated_prompt_stays_where_it_is_cached_whoever_is_excluded() -> None:
    """Worker 1 failed it; of 2 and 3 the latter has most of the prompt."""
    scene = deployment(conditional="isl", share=None, decode=3)
    scene.stored(3, KEYS[:20])
    again = RequestMigrated(
        at_s=scene.next_s,
        request_id=RequestId("r"),
        isl=2000,
        blocks=scene.path(KEYS[:31]),
        attempt=1,
        excluded=(WorkerId(1),),
    )
    policy = scene.policy
    (action,) = policy.decide(again, scene.view)
    assert isinstance(action, Dispatch)
    assert (action.worker_id, action.leg, action.rule) == (3, Leg.AGG, "local")
