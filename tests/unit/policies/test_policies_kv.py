"""Mode kv: case C09 through the whole policy, case C11, what the books and the index change, what is counted."""

from __future__ import annotations

from collections import Counter

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Candidate, Dispatch
from policies.cluster.events import BlocksStored, RequestRejected, TokensEmitted
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.errors import ConfigError
from policies.router.kv import Kv

PROMPT = list(range(10))


def counters(scene: Scene) -> dict[str, int]:
    assert isinstance(scene.policy, Kv)
    return scene.policy.counters()


def dispatched(scene: Scene, request_id: str, isl: int = 640, keys: list[int] | None = PROMPT) -> Dispatch:
    sent = scene.arrive(request_id, isl, keys)
    assert isinstance(sent, Dispatch)
    return sent


def decoding(scene: Scene, request_id: str, worker_id: int, blocks: int) -> None:
    """A request of that many blocks of its own is past its prompt on a worker."""
    scene.send(request_id, isl=blocks * 64, hint=worker_id)
    scene.first_token(request_id)


def c09(**changes: object) -> Scene:
    """W1 holds 8 of the prompt's blocks and decodes 12 others, W2 nothing, W3 4 and 5."""
    scene = Scene(router("kv", decode_basis="active", **changes), [worker(i) for i in (1, 2, 3)])
    scene.stored(1, PROMPT[:8])
    scene.stored(3, PROMPT[:4])
    decoding(scene, "a", 1, 12)
    decoding(scene, "b", 3, 5)
    return scene


@pytest.mark.parametrize(
    ("weight", "costs", "chosen", "overlap"),
    [(1.0, [14, 10, 11], 2, 0), (2.0, [16, 20, 17], 1, 8), (0.0, [12, 0, 5], 2, 0)],
)
def test_c09_plain_arithmetic(weight: float, costs: list[float], chosen: int, overlap: int) -> None:
    sent = dispatched(c09(overlap_score_weight=weight, explain=True), "r")
    assert [c.cost for c in sent.candidates] == costs
    assert (sent.worker_id, sent.rule, sent.overlap_blocks) == (chosen, "min", overlap)


def test_c09_shows_every_term() -> None:
    sent = dispatched(c09(overlap_score_weight=1.0, explain=True), "r")
    assert sent.candidates[0] == Candidate(
        worker_id=WorkerId(1),
        in_flight=1,
        cost=14.0,
        overlap_blocks=8,
        prefill_blocks=10.0,
        credit_blocks=8.0,
        decode_blocks=12,
        active_prefill_tokens=0,
        active_requests=1,
    )


def test_c09_is_the_same_choice_every_time() -> None:
    chosen = {dispatched(c09(overlap_score_weight=1.0), f"r{n}").worker_id for n in range(100)}
    assert chosen == {2}


def test_the_choice_is_the_same_with_and_without_explanation() -> None:
    plain, told = c09(), c09(explain=True)
    for n in range(30):
        one, two = (
            dispatched(plain, f"r{n}", keys=[*PROMPT[: n % 10], *range(100, 110)][:10]),
            dispatched(told, f"r{n}", keys=[*PROMPT[: n % 10], *range(100, 110)][:10]),
        )
        assert (one.worker_id, one.rule, one.reason) == (two.worker_id, two.rule, two.reason)
        least = min(c.cost for c in two.candidates if c.cost is not None)
        assert next(c.cost for c in two.candidates if c.worker_id == two.worker_id) == least


def test_c11_another_block_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"worker 0 \(w0\) has KV blocks of 16 tokens, .* blocks of 64"):
        Scene(router("kv"), [worker(0, block_size=16)])


def test_the_longer_overlap_wins_between_idle_workers() -> None:
    scene = Scene(router("kv"), workers=3)
    scene.stored(0, PROMPT[:3])
    scene.stored(1, PROMPT[:7])
    sent = dispatched(scene, "r")
    assert (sent.worker_id, sent.overlap_blocks, sent.rule) == (1, 7, "min")


def test_a_full_hit_leaves_the_last_block_to_compute() -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.stored(0, PROMPT)
    assert dispatched(scene, "r", isl=640).overlap_blocks == 9
    assert dispatched(scene, "s", isl=641, keys=[*PROMPT, 77]).overlap_blocks == 10


def test_a_booking_is_seen_by_the_next_decision() -> None:
    scene = Scene(router("kv", tie_break="lowest_id"), workers=3)
    assert [scene.send(f"r{n}", keys=[n] * 10) for n in range(6)] == [0, 1, 2, 0, 1, 2]


def test_formula_as_observed() -> None:
    """2 of 4 blocks cached and an identical request in prefill costs as much as an idle worker; more loses."""
    scene = Scene(router("kv", explain=True), workers=3)
    prompt = PROMPT[:4]
    scene.stored(0, prompt[:2])
    scene.send("same", isl=256, keys=prompt, hint=0)
    sent = dispatched(scene, "r", isl=256, keys=prompt)
    assert [c.cost for c in sent.candidates] == [8, 8, 8]
    assert sent.rule == "tie"


def observed(request_id: str, *, output_tokens: int = 0) -> Dispatch:
    """The same, with tokens booked for the one in prefill, so that its worker may have an output block more."""
    scene = Scene(router("kv", explain=True, track_output_blocks=True), workers=3)
    scene.stored(0, PROMPT[:2])
    scene.send("same", isl=256, keys=PROMPT[:4], hint=0)
    assert isinstance(scene.policy, Kv)
    scene.policy._books.emit(RequestId("same"), output_tokens)
    return dispatched(scene, request_id, isl=256, keys=PROMPT[:4])


def test_equals_are_drawn_evenly_and_one_output_block_more_is_never_drawn() -> None:
    """600 draws among three: 193, 205 and 202 were observed; here each is within three standard deviations of 200."""
    drawn = Counter(observed(f"r{n}").worker_id for n in range(600))
    assert set(drawn) == {0, 1, 2}
    assert all(abs(count - 200) < 3 * (600 * 2 / 9) ** 0.5 for count in drawn.values()), drawn
    later = [observed(f"r{n}", output_tokens=64) for n in range(100)]
    assert [c.cost for c in later[0].candidates] == [9, 8, 8]
    assert {sent.worker_id for sent in later} == {1, 2}


def test_prefill_counts_until_the_first_token_and_blocks_until_the_end() -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.send("a", keys=[1] * 10)

    def seen(request_id: str) -> tuple[int, float, int]:
        (c,) = dispatched(scene, request_id, isl=64, keys=[2]).candidates
        scene.fail(request_id)
        return c.active_prefill_tokens, c.decode_blocks, c.active_requests

    assert seen("x1") == (640, 11, 1)
    scene.prefill_done("a")
    assert seen("x2") == (0, 11, 1)
    scene.first_token("a")
    assert seen("x3") == (0, 11, 1)
    scene.finish("a")
    assert seen("x4") == (0, 1, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 4)),  # all 4 blocks are active already
        ({"assume_kv_reuse": False}, (4, 8)),  # blocks of equal prompts count twice
        ({"track_active_blocks": False}, (4, 0)),
        ({"track_prefill_tokens": False}, (0, 4)),
        ({"decode_basis": "active"}, (4, 4)),
    ],
)
def test_what_is_tracked(changes: dict[str, object], expected: tuple[float, float]) -> None:
    scene = Scene(router("kv", explain=True, **changes), workers=1)
    scene.send("a", isl=384, keys=[*PROMPT[:4], 90, 91])
    scene.send("b", isl=256, keys=PROMPT[:4])
    scene.finish("a")
    scene.first_token("b")
    (c,) = dispatched(scene, "r", isl=256, keys=PROMPT[:4]).candidates
    assert (c.prefill_blocks, c.decode_blocks) == expected


def test_output_blocks_count_when_asked_for() -> None:
    scene = Scene(router("kv", explain=True, track_output_blocks=True), workers=1)
    scene.send("a", isl=64, keys=[1])
    scene.first_token("a")
    scene.post(TokensEmitted(at_s=scene.next_s, request_id=RequestId("a"), worker_id=WorkerId(0), n=63))
    (c,) = dispatched(scene, "r", isl=64, keys=[1]).candidates
    assert c.decode_blocks == 2
    assert TokensEmitted not in Kv.subscribes  # by default nobody posts them


def test_softmax_spreads_the_choice() -> None:
    scene = Scene(router("kv", router_temperature=1.0), workers=3)
    scene.stored(0, PROMPT)
    chosen = []
    for n in range(60):
        sent = dispatched(scene, f"r{n}")
        assert sent.rule == "softmax"
        chosen.append(sent.worker_id)
        scene.fail(f"r{n}")
    assert set(chosen) == {0, 1, 2}
    assert chosen.count(0) > chosen.count(1)


def test_rows_without_content_are_balanced_by_load() -> None:
    scene = Scene(router("kv", tie_break="lowest_id"), workers=2)
    assert [scene.send(f"r{n}") for n in range(4)] == [0, 1, 0, 1]
    assert counters(scene)["overlap_differs"] == 0


def test_a_pinned_request_is_booked_with_its_overlap() -> None:
    scene = Scene(router("kv", explain=True), workers=2)
    scene.stored(1, PROMPT[:5])
    pinned = scene.arrive("p", keys=PROMPT, hint=1)
    assert isinstance(pinned, Dispatch)
    assert (pinned.rule, pinned.overlap_blocks) == ("pin", 5)
    assert [c.active_prefill_tokens for c in dispatched(scene, "r").candidates] == [0, 320]


# ---------------------------------------------------------------- the cache feed


def test_removed_and_cleared_blocks_count_no_more() -> None:
    scene = Scene(router("kv"), workers=2)
    scene.stored(1, PROMPT)
    scene.removed(1, PROMPT, lo=4)
    assert dispatched(scene, "r1").overlap_blocks == 4
    scene.cleared(1, Tier.G2_HOST)
    assert counters(scene)["index_blocks"] == 4
    scene.cleared(1)
    assert (counters(scene)["index_blocks"], counters(scene)["unknown_removals"]) == (0, 0)


def test_blocks_of_lower_tiers_are_not_taken_for_device_blocks() -> None:
    scene = Scene(router("kv"), workers=1)
    scene.stored(0, PROMPT, tier=Tier.G2_HOST)
    assert dispatched(scene, "r").overlap_blocks == 0
    assert counters(scene)["lower_tier_blocks"] == 10


def test_what_lies_below_the_device_counts_by_its_tier() -> None:
    """10 blocks: W0 has 4 on the device, 3 on the host and 2 on disk, W1 5 on the device; 3 are on the shared tier."""
    scene = Scene(router("kv", explain=True, shared_cache_multiplier=0.5), workers=3)
    scene.stored(0, PROMPT[:4])
    scene.stored(0, PROMPT[:7], lo=2, tier=Tier.G2_HOST)
    scene.stored(0, PROMPT[:9], lo=6, tier=Tier.G3_DISK)
    scene.stored(1, PROMPT[:5])
    scene.stored(2, PROMPT[:3], tier=Tier.G4_REMOTE)
    sent = dispatched(scene, "r", isl=641, keys=[*PROMPT, 10])
    assert [c.credit_blocks for c in sent.candidates] == [4 + 0.75 * 3 + 0.25 * 2, 5, 0.5 * 3]
    assert (sent.worker_id, sent.overlap_blocks) == (0, 4)


def test_a_hole_below_the_device_ends_the_credit_and_the_last_token_has_none() -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.stored(0, PROMPT[:2], tier=Tier.G2_HOST)
    scene.stored(0, PROMPT, lo=3, tier=Tier.G2_HOST)
    assert dispatched(scene, "a").candidates[0].credit_blocks == 0.75 * 2
    scene.stored(0, PROMPT[:3], lo=2, tier=Tier.G2_HOST)
    assert dispatched(scene, "b").candidates[0].credit_blocks == 0.75 * 9, "640 tokens: nine of ten blocks"


def test_tiers_are_cleared_one_by_one_and_the_shared_one_outlives_workers() -> None:
    scene = Scene(router("kv", explain=True, shared_cache_multiplier=0.5), workers=2)
    for tier in (Tier.G2_HOST, Tier.G3_DISK, Tier.G4_REMOTE):
        scene.stored(0, PROMPT[:4], tier=tier)
    scene.cleared(0, Tier.G2_HOST)
    assert dispatched(scene, "a").candidates[0].credit_blocks == 0.25 * 4
    scene.lost(0)
    assert dispatched(scene, "b").candidates[0].credit_blocks == 0.5 * 4, "worker 1 reads what worker 0 wrote"
    scene.cleared(1, Tier.G4_REMOTE)
    assert counters(scene)["lower_tier_blocks"] == 0


def test_blocks_that_will_come_up_are_not_booked_as_prompt_to_compute() -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.stored(0, PROMPT, tier=Tier.G2_HOST)
    dispatched(scene, "a", isl=641, keys=[*PROMPT, 10])
    assert dispatched(scene, "b", isl=64, keys=[99]).candidates[0].active_prefill_tokens == 1


def test_late_news_of_a_lost_worker_brings_nothing_back() -> None:
    scene = Scene(router("kv"), workers=2)
    scene.stored(0, PROMPT)
    scene.lost(0)
    scene.stored(0, PROMPT)
    assert (counters(scene)["index_blocks"], counters(scene)["stale_events"]) == (0, 1)
    scene.up(0, epoch=1)
    assert dispatched(scene, "r").overlap_blocks == 0


def test_a_feed_that_never_comes_is_noticed() -> None:
    silent, fed = Scene(router("kv"), workers=2), Scene(router("kv"), workers=2)
    fed.stored(0, PROMPT)
    for scene in (silent, fed):
        for n in range(100):
            assert counters(scene)["kv_index_empty"] == 0
            scene.send(f"r{n}", keys=PROMPT)
            scene.finish(f"r{n}")
    assert [counters(s)["kv_index_empty"] for s in (silent, fed)] == [1, 0]


def test_counters_tell_whether_overlap_mattered() -> None:
    scene = Scene(router("kv", tie_break="lowest_id"), workers=2)
    scene.send("r0", keys=[8] * 10)
    scene.stored(1, PROMPT[:2])
    decoding(scene, "load", 1, 30)
    assert dispatched(scene, "r1").worker_id == 0
    found = counters(scene)
    assert (found["decisions"], found["overlap_differs"]) == (3, 1)
    assert (found["non_max_overlap"], found["overlap_lost_blocks"]) == (1, 2)
    scene.finish("load")
    assert dispatched(scene, "r2").worker_id == 1
    found = counters(scene)
    assert (found["overlap_differs"], found["non_max_overlap"], found["overlap_lost_blocks"]) == (2, 1, 2)


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("announced", [True, False])
def test_a_worker_that_registers_again_starts_empty(announced: bool) -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.stored(0, PROMPT)
    scene.send("old", keys=PROMPT)
    if announced:
        scene.lost(0)
    scene.up(0, epoch=1)
    (c,) = dispatched(scene, "new").candidates
    assert (c.overlap_blocks, c.active_prefill_tokens, c.decode_blocks, c.active_requests) == (0, 0, 10, 0)
    scene.fail("old")
    scene.finish("new")
    assert counters(scene)["open_bookings"] == counters(scene)["unknown_free"] == 0


def test_after_a_drain_all_is_zero() -> None:
    scene = Scene(router("kv"), workers=3)
    for n in range(12):
        scene.send(f"r{n}", keys=[n % 4] * 10)
    scene.lost(2)
    for n in range(12):
        (scene.fail if scene.where[f"r{n}"] == 2 else scene.cancel if n % 2 else scene.finish)(f"r{n}")
    found = counters(scene)
    assert (found["open_bookings"], found["unknown_free"]) == (0, 0)
    scene.invariants.finish()


def test_an_engine_that_refuses_frees_the_booking() -> None:
    scene = Scene(router("kv", explain=True), workers=1)
    scene.send("r")
    scene.post(
        RequestRejected(at_s=scene.next_s, request_id=RequestId("r"), reason="13 of 10 blocks", worker_id=WorkerId(0))
    )
    (c,) = dispatched(scene, "s").candidates
    assert (c.active_prefill_tokens, c.active_requests) == (0, 0)


def test_refused_requests_were_never_booked() -> None:
    scene = Scene(router("kv"), workers=0)
    scene.arrive("r")
    assert counters(scene)["unknown_free"] == 0
    assert counters(scene)["rejected_no_endpoints"] == 1


def test_the_view_and_the_seats_change_together() -> None:
    scene = Scene(router("kv", tie_break="lowest_id"), workers=1)
    scene.send("a", keys=PROMPT)
    scene.up(1)
    assert scene.send("b", keys=[7] * 10) == 1
    assert BlocksStored in Kv.subscribes
