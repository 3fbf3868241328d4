"""Mode kv without block events, or ahead of them: examples A1 to A5 through the policy, and what it says of itself."""

from __future__ import annotations

import pytest
from builders import Scene, router, router_settings, worker

from policies.cluster.actions import Candidate, Dispatch, PublishBooking
from policies.cluster.events import BlocksCleared, BlocksRemoved, BlocksStored, PeerBooking, PrefillDone, RequestArrived
from policies.cluster.ids import Leg, RequestId, Role, WorkerId
from policies.cluster.state import ClusterView
from policies.errors import ConfigError
from policies.router.affinity import AffinitySettings
from policies.router.disaggregation import Disaggregated, DisaggregationSettings
from policies.router.fleet import Fleet, ReplicaSettings
from policies.router.kv import Kv

TEN = list(range(10))
LONGER = [*TEN, 99]
"""A prompt that has all of `TEN` before its last block, so that ten blocks of it can count."""


def scene(workers: int = 2, **changes: object) -> Scene:
    """Workers 1 and up under mode kv."""
    changes = {"explain": True, "use_kv_events": False, **changes}
    return Scene(router("kv", **changes), [worker(1 + n) for n in range(workers)])


def kv(scene: Scene) -> Kv:
    assert isinstance(scene.policy, Kv)
    return scene.policy


def sent(scene: Scene, name: str, at_s: float, keys: list[int] = TEN, hint: int | None = 1) -> Dispatch:
    """A prompt that arrives then, without what it may be thought to bring to open work: it ends at once."""
    scene.wait(at_s - scene.now_s - 0.001)
    action = scene.arrive(name, 64 * len(keys), keys, hint)
    assert isinstance(action, Dispatch)
    scene.finish(name)
    return action


def depth(scene: Scene, at_s: float, worker_id: int = 1) -> int:
    """Blocks of `LONGER` that the policy thinks a worker has; asking it leaves no trace."""
    scene.wait(at_s - scene.now_s)
    asked = RequestArrived(at_s=at_s, request_id=RequestId("?"), isl=704, blocks=scene.path(LONGER))
    told = kv(scene)._explain(asked, scene.view.live)
    return next(candidate.overlap_blocks for candidate in told if candidate.worker_id == worker_id) or 0


def candidate(action: Dispatch, worker_id: int) -> Candidate:
    return next(one for one in action.candidates if one.worker_id == worker_id)


@pytest.mark.parametrize(("at_s", "blocks"), [(119.9, 10), (120.0, 0)])
def test_a1_a_prompt_counts_until_it_expires(at_s: float, blocks: int) -> None:
    cluster = scene()
    start_s = cluster.now_s + 0.001
    sent(cluster, "r", start_s)
    assert depth(cluster, start_s + at_s) == blocks
    assert depth(cluster, start_s + at_s, worker_id=2) == 0


def test_a2_sent_again_it_counts_from_then() -> None:
    cluster = scene()
    sent(cluster, "r", 1.0)
    sent(cluster, "s", 101.0)
    assert [depth(cluster, at_s) for at_s in (220.9, 221.0)] == [10, 0]


def test_a3_only_what_is_sent_again_stays() -> None:
    cluster = scene()
    sent(cluster, "r", 1.0)
    sent(cluster, "s", 101.0, TEN[:5])
    assert [depth(cluster, at_s) for at_s in (120.9, 131.0)] == [10, 5]


def test_a4_a_lost_worker_holds_nothing_also_when_it_is_back() -> None:
    cluster = scene()
    sent(cluster, "r", 1.0)
    sent(cluster, "s", 2.0, hint=2)
    cluster.lost(1)
    assert kv(cluster).counters()["guessed_blocks"] == 10
    cluster.up(1, epoch=1)
    assert [depth(cluster, 52.0, worker_id) for worker_id in (1, 2)] == [0, 10]
    cluster.lost(1)
    cluster.lost(2)
    assert kv(cluster).counters()["guessed_blocks"] == 0


def test_a4_by_room_the_leaves_go_first() -> None:
    settings = {"use_kv_events": False, "index_policy": "lru", "explain": True}
    cluster = Scene(router("kv", **settings), [worker(1, total_blocks=8)])
    sent(cluster, "r", 1.0)
    assert depth(cluster, 1e6) == 8
    assert (kv(cluster).counters()["guessed_blocks"], kv(cluster).counters()["pruned_guesses"]) == (8, 2)
    sent(cluster, "s", 1e6 + 1, [0, 1, 50, 51])
    assert depth(cluster, 1e6 + 2) == 6


def test_a5_a_prediction_raises_what_events_tell_and_is_not_counted_as_cached() -> None:
    cluster = scene(use_kv_events=True, predicted_ttl_s=5.0)
    cluster.stored(1, TEN[:3])
    sent(cluster, "r", 1.0)
    assert [depth(cluster, at_s) for at_s in (5.0, 7.0)] == [10, 3]
    sent(cluster, "s", 10.0)
    chosen = sent(cluster, "t", 12.0, LONGER, hint=None)
    assert (chosen.worker_id, chosen.overlap_blocks, candidate(chosen, 1).overlap_blocks) == (1, 3, 10)
    assert "10 blocks cached or on their way (3 reported)" in chosen.reason
    later = sent(cluster, "u", 30.0, LONGER, hint=None)
    assert later.overlap_blocks == candidate(later, 1).overlap_blocks == 3
    assert "3 blocks cached, " in later.reason


def test_what_is_cached_by_events_is_never_lowered() -> None:
    cluster = scene(use_kv_events=True, predicted_ttl_s=5.0)
    cluster.stored(1, TEN[:7])
    sent(cluster, "r", 1.0, TEN[:2])
    assert depth(cluster, 2.0) == 7


def test_a_burst_with_one_prefix_stays_together_with_a_prediction_only() -> None:
    """Before the first block is reported, events alone see two idle workers that have nothing."""
    told: dict[float | None, set[int]] = {}
    for ttl_s in (None, 5.0):
        changes = {"predicted_ttl_s": ttl_s, "track_active_blocks": False, "track_prefill_tokens": True}
        cluster = scene(use_kv_events=True, **changes)
        told[ttl_s] = {sent(cluster, f"r{n}", 1.0 + n / 10, [*TEN, 100 + n], hint=None).worker_id for n in range(12)}
    assert len(told[None]) == 2
    assert len(told[5.0]) == 1


def test_a_guess_is_called_one() -> None:
    cluster = scene()
    first = sent(cluster, "r", 1.0, hint=None)
    again = sent(cluster, "s", 2.0, LONGER, hint=None)
    assert (again.worker_id, again.overlap_blocks) == (first.worker_id, 10)
    assert "0 blocks cached by guess" in first.reason
    assert "10 blocks cached by guess" in again.reason


def test_the_last_block_of_a_prompt_is_computed_always() -> None:
    cluster = scene(workers=1)
    assert [sent(cluster, name, at_s).overlap_blocks for name, at_s in (("r", 1.0), ("s", 2.0))] == [0, 9]


def test_block_events_are_not_asked_for() -> None:
    plain, guessing = router("kv"), router("kv", use_kv_events=False)
    news = {BlocksStored, BlocksRemoved, BlocksCleared}
    assert plain.subscribes - guessing.subscribes == news
    assert not router("kv", use_kv_events=False, track_output_blocks=True).subscribes & news
    bond = AffinitySettings(bond="soft", ttl_s=1.0, sessions=8)
    assert not router("kv", use_kv_events=False, affinity=bond).subscribes & news
    assert news <= router("kv", predicted_ttl_s=1.0).subscribes


def test_an_index_that_is_not_asked_for_is_not_called_empty() -> None:
    counts = []
    for use in (True, False):
        cluster = scene(use_kv_events=use)
        for n in range(101):
            sent(cluster, f"r{n}", 1.0 + n)
        counts.append(kv(cluster).counters()["kv_index_empty"])
    assert counts == [1, 0]


def test_what_is_too_old_goes_without_another_prompt() -> None:
    cluster = scene(approximate_ttl_s=1.0)
    cluster.send("long", keys=TEN, hint=1)
    sent(cluster, "r", 1.5, TEN[:2])
    cluster.wait(60.0)
    cluster.finish("long")
    assert kv(cluster).counters()["guessed_blocks"] == 0


def test_prompts_without_content_leave_no_guess() -> None:
    cluster = scene()
    cluster.send("r")
    assert kv(cluster).counters()["guessed_blocks"] == 0


def test_room_that_is_not_known_is_refused_by_name() -> None:
    policy = router("kv", use_kv_events=False, index_policy="lru")
    with pytest.raises(ConfigError, match=r"worker 1 \(w1\) does not say how many KV blocks .* take ttl"):
        Scene(policy, [worker(1, total_blocks=None)])
    Scene(router("kv", use_kv_events=False), [worker(1, total_blocks=None)])


def test_a_peer_that_is_heard_of_is_guessed_from_too() -> None:
    settings = router_settings("kv", use_kv_events=False)
    routers = [Kv(settings), Kv(settings)]
    fleet = ReplicaSettings(count=2, spread="round-robin", seed=1, sync=True, batch_s=0.0, kv_lag_s=0.0)
    cluster = Scene(Fleet(routers, fleet), 2)
    path = cluster.path(TEN)
    arrived = RequestArrived(at_s=cluster.next_s, request_id=RequestId("r"), isl=640, blocks=path)
    (news,) = [action for action in cluster.post(arrived) if isinstance(action, PublishBooking)]
    assert [one.counters()["guessed_blocks"] for one in routers] == [10, 0]
    heard = PeerBooking(at_s=cluster.next_s, origin=0, dest=1, seq=news.seq, kind=news.kind, ops=news.ops)
    cluster.post(heard)
    assert [one.counters()["guessed_blocks"] for one in routers] == [10, 10]


def test_the_decode_leg_is_guessed_from_the_time_it_is_sent() -> None:
    """A prompt that took its time to be computed reaches its decode worker late, and counts there from then."""
    decode = Kv(router_settings("kv", use_kv_events=False, approximate_ttl_s=10.0))
    prefill = Kv(router_settings("kv", use_kv_events=False, approximate_ttl_s=10.0))
    settings = DisaggregationSettings(order="prefill_first", conditional="off", busy_tokens=None)
    workers = [worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE)]
    cluster = Scene(Disaggregated(prefill, decode, settings), workers)
    assert cluster.send("r", keys=TEN) == 1
    cluster.wait(8.0)
    done = PrefillDone(at_s=cluster.next_s, request_id=RequestId("r"), worker_id=WorkerId(1))
    (action,) = cluster.post(done)
    assert isinstance(action, Dispatch)
    assert (action.worker_id, action.leg) == (2, Leg.DECODE)
    assert _held(decode, cluster.view, cluster, cluster.now_s + 8.0) == 10
    assert _held(prefill, cluster.view, cluster, cluster.now_s + 8.0) == 0


def _held(policy: Kv, view: ClusterView, cluster: Scene, at_s: float) -> int:
    asked = RequestArrived(at_s=at_s, request_id=RequestId("?"), isl=704, blocks=cluster.path(LONGER))
    return policy.best_overlap(asked, view)[1]
