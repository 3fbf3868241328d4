"""What a router of mode kv makes of host memory that workers read of each other: credit, terms, bookings."""

from __future__ import annotations

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Dispatch
from policies.cluster.events import WorkerUp
from policies.cluster.ids import Tier

PROMPT = list(range(10))


def dispatched(scene: Scene, request_id: str, isl: int = 641, keys: list[int] | None = None) -> Dispatch:
    sent = scene.arrive(request_id, isl, [*PROMPT, 10] if keys is None else keys)
    assert isinstance(sent, Dispatch)
    return sent


def readers(*layouts: str | None) -> list[WorkerUp]:
    return [worker(n, peers=layout) for n, layout in enumerate(layouts)]


def peers_scene(*layouts: str | None, weight: float | None = 0.5) -> Scene:
    return Scene(router("kv", explain=True, peer_cache_hit_weight=weight), readers(*layouts))


def test_what_a_worker_can_read_of_its_peers_counts_for_it() -> None:
    """10 blocks: W0 has 6 in host memory, W1 2 on its device and the sixth to the eighth in host memory. W2 has another
    layout, W3 reads nobody."""
    scene = peers_scene("a", "a", "b", None)
    scene.stored(0, PROMPT[:6], tier=Tier.G2_HOST)
    scene.stored(1, PROMPT[:2])
    scene.stored(1, PROMPT[:8], lo=5, tier=Tier.G2_HOST)
    sent = dispatched(scene, "r")
    assert [c.peer_blocks for c in sent.candidates] == [2, 6, 0, 0]
    assert [c.credit_blocks for c in sent.candidates] == [0.75 * 6 + 0.5 * 2, 2 + 0.5 * 6, 0, 0]
    assert sent.worker_id == 0
    assert "0 blocks cached and 2 at peers" in sent.reason


def test_peers_stand_between_host_memory_and_disk_and_behind_no_gap() -> None:
    scene = Scene(
        router("kv", explain=True, peer_cache_hit_weight=0.5, shared_cache_multiplier=0.125), readers("a", "a")
    )
    scene.stored(0, PROMPT[:2], tier=Tier.G2_HOST)
    scene.stored(0, PROMPT[:7], lo=1, tier=Tier.G3_DISK)
    scene.stored(1, PROMPT[:4], lo=2, tier=Tier.G2_HOST)
    scene.stored(1, PROMPT[:9], lo=8, tier=Tier.G2_HOST)
    scene.stored(1, PROMPT[:8], lo=7, tier=Tier.G4_REMOTE)
    first = dispatched(scene, "r").candidates[0]
    assert first.credit_blocks == 0.75 * 2 + 0.5 * 2 + 0.25 * 3 + 0.125 * 1
    assert first.peer_blocks == 2


def test_without_a_weight_peers_count_for_nobody() -> None:
    scene = peers_scene("a", "a", weight=None)
    scene.stored(0, PROMPT[:6], tier=Tier.G2_HOST)
    sent = dispatched(scene, "r")
    assert [(c.credit_blocks, c.peer_blocks) for c in sent.candidates] == [(0.75 * 6, 0), (0, 0)]
    assert "at peers" not in sent.reason


def test_a_peer_that_is_lost_or_has_lost_its_memory_is_worth_nothing() -> None:
    scene = peers_scene("a", "a", "a")
    for place in (0, 1):
        scene.stored(place, PROMPT[: 6 + place], tier=Tier.G2_HOST)
    assert [c.peer_blocks for c in dispatched(scene, "all").candidates] == [1, 0, 7]
    scene.lost(0)
    assert [c.peer_blocks for c in dispatched(scene, "one").candidates] == [0, 7]
    scene.cleared(1, Tier.G2_HOST)
    assert [c.peer_blocks for c in dispatched(scene, "two").candidates] == [0, 0]
    scene.up(0, epoch=1, peers="a")
    scene.stored(0, PROMPT[:4], tier=Tier.G2_HOST)
    scene.removed(0, PROMPT[:4], lo=3, tier=Tier.G2_HOST)
    assert [c.peer_blocks for c in dispatched(scene, "three").candidates] == [0, 3, 3]


def test_what_comes_from_peers_is_not_booked_as_prompt_to_compute() -> None:
    for weight, open_tokens in ((0.5, 1), (None, 641)):
        scene = peers_scene("a", "a", weight=weight)
        scene.stored(0, PROMPT, tier=Tier.G2_HOST)
        pinned = scene.arrive("p", isl=641, keys=[*PROMPT, 10], hint=1)
        assert isinstance(pinned, Dispatch)
        assert dispatched(scene, "b", isl=64, keys=[99]).candidates[1].active_prefill_tokens == open_tokens


@pytest.mark.parametrize(("load_blocks", "alone", "credited"), [(2, 0, 0), (5, 0, 1), (8, 1, 1)])
def test_a_loaded_holder_gets_less_when_others_can_read_what_it_has(
    load_blocks: int, alone: int, credited: int
) -> None:
    """W0 holds 10 blocks of the prompt, worth 7.5 there and 5 elsewhere, and decodes a request of `load_blocks`."""
    for weight, chosen in ((None, alone), (0.5, credited)):
        scene = peers_scene("a", "a", weight=weight)
        scene.stored(0, PROMPT, tier=Tier.G2_HOST)
        scene.send("other", isl=load_blocks * 64, hint=0)
        scene.first_token("other")
        assert dispatched(scene, "r").worker_id == chosen
