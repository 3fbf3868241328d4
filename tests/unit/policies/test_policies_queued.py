"""A router with a queue in front: when a request waits, when it goes, who is refused, and what is left at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import Scene, router, router_settings, worker

from policies.cluster.actions import Action, Dispatch, Enqueue, Reject
from policies.cluster.events import Hints, WorkerUp
from policies.cluster.ids import Role, WorkerId
from policies.errors import CapabilityError, ConfigError
from policies.router.affinity import AffinitySettings
from policies.router.base import Router
from policies.router.build import MODES, build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings
from policies.router.queued import Queued

ONE = QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=1000, order="fcfs", waits=True)
QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=1000,
    busy_worker_share=1.0,
    requests_per_worker=None,
    tokens_per_worker=None,
    max_wait_s=None,
    classes=(ONE,),
)


def queued(
    mode: str = "least-loaded",
    workers: int | list[WorkerUp] = 2,
    queue: QueueSettings = QUEUE,
    changes: dict[str, object] | None = None,
    **settings: object,
) -> Scene:
    policy = router(mode, tie_break="lowest_id", queue=replace(queue, **(changes or {})), **settings)  # type: ignore[arg-type]
    assert isinstance(policy, Queued)
    return Scene(policy, workers)


def fill(scene: Scene, workers: int = 2, isl: int = 1001) -> None:
    """One prompt on each worker, long enough to make it busy."""
    for n in range(workers):
        scene.send(f"fill{n}", isl=isl, hint=n)


def counters(scene: Scene) -> dict[str, int]:
    assert isinstance(scene.policy, Queued)
    return scene.policy.counters()


def test_a_request_waits_only_while_every_worker_is_busy() -> None:
    scene = queued()
    scene.send("a", isl=1000)  # 1000 is not more than 1000
    scene.send("b", isl=1001)
    scene.send("c", isl=1001, hint=0)
    assert isinstance(scene.arrive("d"), Enqueue)
    scene.first_token("b")  # the prompt of worker 1 is computed
    assert scene.where["d"] == 1


def test_it_says_why_it_waits() -> None:
    scene = queued()
    fill(scene)
    action = scene.arrive("d", isl=640, priority=7)
    assert action == Enqueue(
        request_id=action.request_id,  # type: ignore[attr-defined]
        policy_class="all",
        strict_priority=0,
        score=7 - scene.now_s,
        uncached_tokens=640,
        reason="every worker is busy with prompts; 1 wait",
    )


def test_where_a_share_of_the_workers_is_enough_it_says_that_not_all_are_busy() -> None:
    scene = queued(changes={"busy_worker_share": 0.3})
    scene.send("a", isl=8192)
    action = scene.arrive("b", isl=640)
    assert isinstance(action, Enqueue)
    assert action.reason == "at least 30% of the workers are busy with prompts; 1 wait"


def test_the_share_is_of_what_a_step_takes() -> None:
    scene = queued(changes={"prefill_busy_share": 0.5, "prefill_busy_tokens": None})
    fill(scene, isl=4096)
    scene.send("a", isl=1)
    assert isinstance(scene.arrive("b"), Dispatch)  # worker 1 is not above its half
    assert isinstance(scene.arrive("c"), Enqueue)


def test_a_budget_that_is_not_known_is_never_used_up() -> None:
    ups = [worker(n, max_batched_tokens=None) for n in range(2)]
    scene = queued(workers=ups, changes={"prefill_busy_share": 0.5, "prefill_busy_tokens": None})
    fill(scene, isl=1_000_000)
    assert isinstance(scene.arrive("a"), Dispatch)


def test_a_budget_like_the_pool_is_counted() -> None:
    ups = [worker(0), worker(1, max_batched_tokens=64_000)]
    scene = queued(workers=ups, changes={"prefill_busy_share": 1.0, "prefill_busy_tokens": None})
    assert counters(scene)["queue_budget_suspect"] == 1


def test_some_busy_workers_may_be_enough() -> None:
    for share, kind in ((0.5, Enqueue), (0.51, Dispatch)):
        scene = queued(changes={"busy_worker_share": share})
        fill(scene, workers=1)
        assert isinstance(scene.arrive("a"), kind)


def test_who_goes_first() -> None:
    scene = queued()
    fill(scene)
    for name, priority, strict in (("a", 0, 0), ("b", 60, 0), ("c", 0, 1)):
        hints = Hints(strict_priority=strict) if strict else None
        assert isinstance(scene.arrive(name, isl=1001, priority=priority, hints=hints), Enqueue)
    went = []
    for n in (0, 1):
        before = {*scene.where}
        scene.first_token(f"fill{n}")
        went += [*({*scene.where} - before)]
    assert went == ["c", "b"]


def test_a_newcomer_does_not_overtake_its_class() -> None:
    """The first is pinned to a worker that stays busy; another worker is free, and still the class waits."""
    scene = queued()
    fill(scene)
    assert isinstance(scene.arrive("pinned", hint=0), Enqueue)
    scene.first_token("fill1")
    assert isinstance(scene.arrive("later"), Enqueue)
    assert "later" not in scene.where
    scene.first_token("fill0")
    assert (scene.where["pinned"], scene.where["later"]) == (0, 1)


def test_another_class_goes_past_one_that_is_held_up() -> None:
    classes = (ONE, replace(ONE, name="long", min_tokens=5000))
    scene = queued(changes={"classes": classes})
    fill(scene)
    assert isinstance(scene.arrive("pinned", hint=0), Enqueue)
    scene.first_token("fill1")
    assert isinstance(scene.arrive("later", isl=6000), Dispatch)


def test_a_class_that_does_not_wait_goes_to_busy_workers() -> None:
    classes = (ONE, replace(ONE, name="urgent", family="urgent", waits=False))
    scene = queued(changes={"classes": classes})
    fill(scene)
    assert isinstance(scene.arrive("a"), Enqueue)
    assert isinstance(scene.arrive("b", hints=Hints(policy_class="urgent")), Dispatch)
    assert isinstance(scene.arrive("c", hints=Hints(family="urgent")), Dispatch)


def test_the_class_counts_what_is_not_cached_where_most_is() -> None:
    classes = (ONE, replace(ONE, name="long", min_tokens=400))
    scene = queued("kv", changes={"classes": classes, "prefill_busy_tokens": 100})
    fill(scene)
    scene.stored(1, list(range(8)))
    cached = scene.arrive("a", keys=list(range(10)))
    fresh = scene.arrive("b", keys=list(range(50, 60)))
    assert isinstance(cached, Enqueue)
    assert isinstance(fresh, Enqueue)
    assert (cached.policy_class, cached.uncached_tokens) == ("all", 640 - 8 * 64)
    assert (fresh.policy_class, fresh.uncached_tokens) == ("long", 640)


def test_q6_and_q7_a_pinned_prompt_counts_what_its_own_worker_has() -> None:
    """1,024 tokens in blocks of 16: worker 1 has 60 blocks of them, worker 0 one."""
    queue = replace(QUEUE, classes=(replace(ONE, order="wspt"),))
    policy = router("kv", tie_break="lowest_id", block_size=16, queue=queue)
    scene = Scene(policy, [worker(n, block_size=16) for n in range(2)], block_size=16)
    fill(scene)
    prompt = list(range(64))
    scene.stored(1, prompt[:60])
    scene.stored(0, prompt[:1])
    free = scene.arrive("free", isl=1024, keys=prompt)
    pinned = scene.arrive("pinned", isl=1024, keys=prompt, hint=0)
    fresh = scene.arrive("fresh", isl=512, keys=list(range(100, 132)))
    scores = [sent.score for sent in (free, pinned, fresh) if isinstance(sent, Enqueue)]
    assert scores == [1 / 64, 1 / 1008, 1 / 512]


def test_overlap_is_that_of_the_moment_it_goes() -> None:
    scene = queued("kv", changes={"prefill_busy_tokens": 100})
    prompt = list(range(10))
    scene.stored(0, prompt[:5])
    fill(scene)
    assert isinstance(scene.arrive("a", keys=prompt), Enqueue)
    scene.wait(11)
    scene.stored(1, prompt[:9])
    actions = went_on(scene, "fill1")
    assert [(a.worker_id, a.overlap_blocks) for a in actions] == [(1, 9)]


def went_on(scene: Scene, done: str) -> list[Dispatch]:
    """The dispatches that follow when the prompt of a request is computed."""
    sent: list[Dispatch] = []
    post = scene.post

    def watched(event: object) -> list[Action]:
        actions = post(event)  # type: ignore[arg-type]
        sent.extend(a for a in actions if isinstance(a, Dispatch))
        return actions

    scene.post = watched  # type: ignore[method-assign, assignment]
    scene.first_token(done)
    scene.post = post  # type: ignore[method-assign]
    return sent


def test_every_one_that_can_go_goes_at_once() -> None:
    scene = queued(workers=1)
    fill(scene, workers=1)
    for n in range(6):
        assert isinstance(scene.arrive(f"r{n}", isl=400), Enqueue)
    sent = went_on(scene, "fill0")
    assert [a.request_id for a in sent] == ["r0", "r1", "r2"]  # 1200 tokens make the worker busy again
    assert {a.worker_id for a in sent} == {0}
    assert counters(scene)["queue_peak"] == 6


# ---------------------------------------------------------------- refused


def test_d5_limits_of_the_queue() -> None:
    scene = queued(workers=3, changes={"requests_per_worker": 2})
    fill(scene, workers=3)
    codes = [scene.arrive(f"r{n}") for n in range(7)]
    assert all(isinstance(action, Enqueue) for action in codes[:6])
    assert isinstance(codes[6], Reject)
    assert (codes[6].code, counters(scene)["rejected_queue_limit"]) == ("queue_limit", 1)

    scene = queued(workers=1, changes={"tokens_per_worker": 5, "prefill_busy_tokens": 0})
    fill(scene, workers=1)
    assert isinstance(scene.arrive("twenty", isl=20), Enqueue)  # what waits is tested, not what comes
    refused = scene.arrive("one", isl=1)
    assert isinstance(refused, Reject)
    assert refused.code == "queue_limit"


def test_who_waits_too_long_is_refused_at_that_moment() -> None:
    scene = queued(changes={"max_wait_s": 2.0})
    fill(scene)
    asked_s = {}
    for name in ("a", "b", "c"):
        assert isinstance(scene.arrive(name), Enqueue)
        asked_s[name] = scene.now_s
        scene.wait(0.5)
    scene.cancel_waiting("a")
    scene.wait(asked_s["b"] + 2.0 - scene.now_s - 1e-6)
    assert {*scene.view.requests} == {"fill0", "fill1", "b", "c"}
    scene.wait(2e-6)
    assert {*scene.view.requests} == {"fill0", "fill1", "c"}
    scene.wait(1.0)
    assert {*scene.view.requests} == {"fill0", "fill1"}
    assert counters(scene)["rejected_queue_timeout"] == 2


def test_nobody_waits_for_workers_that_there_are_not() -> None:
    scene = queued()
    fill(scene)
    assert isinstance(scene.arrive("a"), Enqueue)
    scene.draining(1)
    assert "a" in scene.view.requests
    scene.draining(0)
    assert "a" not in scene.view.requests
    assert counters(scene)["rejected_all_fenced"] == 1
    scene.finish("fill0")
    scene.finish("fill1")
    scene.invariants.finish()


def test_no_worker_is_an_error_and_not_a_reason_to_wait() -> None:
    scene = queued(workers=0)
    refused = scene.arrive("a")
    assert isinstance(refused, Reject)
    assert refused.code == "no_endpoints"


def test_a_cancelled_request_is_not_sent_later() -> None:
    scene = queued()
    fill(scene)
    scene.arrive("a")
    scene.arrive("b", isl=1001)
    scene.cancel_waiting("a")
    scene.first_token("fill0")
    assert (scene.where.get("a"), scene.where["b"]) == (None, 0)


def test_overloaded_workers_are_waited_for_by_those_who_wait_already() -> None:
    """A newcomer is shed while all are overloaded; one that waits goes on waiting."""
    classes = (ONE, replace(ONE, name="urgent", family="urgent", waits=False))
    scene = queued(busy=BusySettings(engine_running=1, engine_queue=2), changes={"classes": classes})
    fill(scene)
    assert isinstance(scene.arrive("waits"), Enqueue)
    for n in range(4):
        assert isinstance(scene.arrive(f"x{n}", isl=1, hint=n % 2, hints=Hints(policy_class="urgent")), Dispatch)
    for n in (0, 1):
        scene.first_token(f"fill{n}")
    refused = scene.arrive("late")
    assert isinstance(refused, Reject)
    assert refused.code == "engine_limit"
    assert "waits" not in scene.where
    scene.finish("x1")
    assert scene.where["waits"] == 1


# ---------------------------------------------------------------- sessions and pins


def test_a_bound_session_waits_for_its_worker() -> None:
    affinity = AffinitySettings(bond="hard", ttl_s=10, sessions=10)
    scene = queued(affinity=affinity)
    assert scene.send("first", isl=1001, session_id="s") == 0
    waits = scene.arrive("second", session_id="s")
    assert isinstance(waits, Enqueue)
    scene.first_token("first")
    assert scene.where["second"] == 0


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("direct", "thunder")])
def test_every_mode_can_have_a_queue_and_leaves_nothing(mode: str) -> None:
    scene = queued(mode, workers=3)
    for n in range(40):
        scene.arrive(f"r{n}", isl=300 + 100 * (n % 7), keys=[n % 5] * 15)
        if n % 3 == 0:
            for name in [name for name in scene.where if name in scene.view.requests][:2]:
                scene.first_token(name)
                scene.finish(name)
    while scene.view.requests:
        name = next(name for name in scene.view.requests if name in scene.where)
        scene.finish(name)
    scene.invariants.finish()
    policy = scene.policy
    assert isinstance(policy, Queued)
    assert (len(policy._queue), policy._queue.tokens) == (0, 0)
    assert policy._inner._books is not None
    assert policy._inner._books.size == 0
    assert counters(scene)["queued"] > 5


def test_a_plugin_that_is_no_router_cannot_have_a_queue() -> None:
    class Other:
        subscribes: frozenset = frozenset()

        def __init__(self, settings: object) -> None: ...

        def decide(self, event: object, view: object) -> tuple[Action, ...]:
            return ()

    assert isinstance(build(router_settings("other"), {"other": Other}), Other)  # type: ignore[dict-item]
    with pytest.raises(CapabilityError, match="only a mode that is a Router can"):
        build(router_settings("other", queue=QUEUE), {"other": Other})  # type: ignore[dict-item]


def test_a_queue_that_nobody_would_ever_wait_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        replace(QUEUE, prefill_busy_tokens=None)


def test_queueing_is_nobody_elses_business() -> None:
    assert not isinstance(router("kv"), Queued)
    assert WorkerId(0) in Scene(router("kv"), 1).view.workers


# ---------------------------------------------------------------- two legs


def legs(order: str = "prefill_first", **settings: object) -> Scene:
    """Two prefill workers (0, 1) and one decode worker (2)."""
    prefill, decode = (
        build(leg) for leg in leg_settings(router_settings("least-loaded", tie_break="lowest_id", **settings))
    )
    assert isinstance(decode, Router)
    assert isinstance(prefill, Router | Queued)
    rules = DisaggregationSettings(order=order, conditional="off", busy_tokens=None)  # type: ignore[arg-type]
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    return Scene(Disaggregated(prefill, decode, rules), [worker(n, role=role) for n, role in enumerate(roles)])


def test_the_prefill_leg_waits_and_goes_when_a_prompt_is_computed() -> None:
    scene = legs(queue=QUEUE)
    for n in range(2):
        scene.send(f"fill{n}", isl=1001)
    assert isinstance(scene.arrive("a"), Enqueue)
    scene.prefill_done("fill1")
    assert (scene.where["fill1"], scene.where["a"]) == (2, 1)
    scene.prefill_done("a")
    assert scene.where["a"] == 2
    for name in ("fill1", "a"):
        scene.finish(name)
    scene.fail("fill0")
    scene.invariants.finish()


def test_a_leg_that_waits_goes_nowhere_when_its_client_leaves() -> None:
    scene = legs(queue=QUEUE)
    for n in range(2):
        scene.send(f"fill{n}", isl=1001)
    assert isinstance(scene.arrive("a"), Enqueue)
    scene.cancel_waiting("a")
    scene.prefill_done("fill0")
    assert "a" not in scene.where


def test_no_prompt_is_computed_for_decode_workers_that_are_overloaded() -> None:
    scene = legs(busy=BusySettings(engine_running=1, engine_queue=2))
    for n in range(3):
        scene.send(f"r{n}")
        scene.prefill_done(f"r{n}")
        assert scene.where[f"r{n}"] == 2
    refused = scene.arrive("late")
    assert isinstance(refused, Reject)
    assert refused.code == "engine_limit"
    scene.finish("r0")
    assert scene.send("next") in (0, 1)
