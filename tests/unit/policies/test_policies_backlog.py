"""When a refused client may come again, by hand: what is ahead, over how fast such work went in the last 10 s."""

from __future__ import annotations

import pytest
from builders import Scene, router_settings

from policies.cluster.actions import Reject
from policies.router.backlog import Pace, Work, retry_after_s
from policies.router.build import build
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings

ONE = QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=1000, order="fcfs", waits=True)
QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=800,
    busy_worker_share=1.0,
    requests_per_worker=2,
    tokens_per_worker=None,
    max_wait_s=5.0,
    classes=(ONE,),
)


@pytest.mark.parametrize(
    ("ahead", "rate", "seconds"),
    [(900, 450, 2), (901, 450, 3), (10, 450, 1), (0, 450, 1), (100_000, 450, 60), (900, 0, 60), (0, 0, 60)],
)
def test_the_formula(ahead: float, rate: float, seconds: float) -> None:
    assert retry_after_s(ahead, rate) == seconds


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    pace = Pace()
    pace.begin(2.0)
    pace.gone(3.0, 400, 1)
    pace.gone(5.5, 800, 0)
    assert pace.rate(6.0) == Work(300.0, 0.25), "4 s since work was first sent"
    assert pace.rate(13.0) == Work(120.0, 0.1), "a window of 10 s"
    assert pace.rate(15.5) == Work(80 / 1.05, 0.0), "what went in second 3 is behind the window, which begins at 5 s"
    assert pace.rate(40.0) == Work(0.0, 0.0)


def _refused(scene: Scene, name: str, isl: int = 100, **more: object) -> Reject:
    action = scene.arrive(name, isl, **more)  # type: ignore[arg-type]
    assert isinstance(action, Reject)
    return action


@pytest.mark.parametrize("mode", ["least-loaded", "kv"])
def test_too_many_prompts_are_counted_in_tokens(mode: str) -> None:
    """900 tokens computed in the first second; 900 more are ahead at 2 s: 900 / (900 / 2 s) = 2 s."""
    scene = Scene(build(router_settings(mode, busy=BusySettings(prefill_tokens=800))), 1, step_s=0.5)
    scene.send("a", 900)
    assert _refused(scene, "b").retry_after_s == 60, "nothing has gone yet"
    scene.first_token("a")
    scene.send("c", 900)
    refused = _refused(scene, "d")  # at 2.5 s, 2 s after the first was sent
    assert (refused.code, refused.retry_after_s) == ("all_busy", 2)


def test_a_full_engine_is_counted_in_requests() -> None:
    """Three are open at 3.5 s and one has ended since the first was sent at 0.5 s: 3 / (1 / 3 s) = 9 s."""
    scene = Scene(
        build(router_settings("least-loaded", busy=BusySettings(engine_running=1, engine_queue=2))), 1, step_s=0.5
    )
    for name in ("a", "b", "c"):
        scene.send(name)
    scene.finish("a")
    scene.send("d")
    scene.first_token("b")
    refused = _refused(scene, "e")
    assert (refused.code, refused.retry_after_s) == ("engine_limit", 9)


def test_what_waits_is_ahead_too() -> None:
    """900 tokens gone in 1 s; 900 are sent and 2 x 300 wait: 1500 / (900 / 2.5 s) = 4.17, so 5 s."""
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE)), 1, step_s=0.5)
    scene.send("a", 900)
    scene.first_token("a")
    scene.send("b", 900)
    scene.arrive("c", 300)
    scene.arrive("d", 300)
    refused = _refused(scene, "e")
    assert (refused.code, refused.retry_after_s) == ("queue_limit", 5)


def test_a_refusal_for_another_reason_has_no_time() -> None:
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE)), 1, step_s=0.5)
    assert _refused(scene, "a", hint=7).retry_after_s is None
    scene.lost(0)
    refused = _refused(scene, "b")
    assert (refused.code, refused.retry_after_s) == ("no_endpoints", None)
