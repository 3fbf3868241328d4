"""Mode thunder by hand: blocks of 64 tokens, pools of 100 blocks, so that a block is one per cent of a pool."""

from __future__ import annotations

import pytest
from builders import SETTINGS, Scene, router_settings, worker

from policies.cluster.actions import Dispatch, Enqueue, Reject
from policies.cluster.ids import WorkerId
from policies.errors import CapabilityError, ConfigError
from policies.router.build import build
from policies.router.programs import Phase, Program, ProgramSettings
from policies.router.queue import QueueClass, QueueSettings
from policies.router.thunder import Thunder

LIMITS = SETTINGS.programs
assert LIMITS is not None


def thunder(workers: int = 1, **changes: object) -> Scene:
    policy = build(router_settings("thunder", tie_break="lowest_id", **changes))
    return Scene(policy, [worker(n, total_blocks=100) for n in range(workers)])


def of(scene: Scene) -> Thunder:
    assert isinstance(scene.policy, Thunder)
    return scene.policy


def program(scene: Scene, session: str) -> Program:
    found = of(scene)._programs.of(session)
    assert found is not None
    return found


def held(scene: Scene, worker_id: int = 0) -> int:
    return of(scene)._programs.held_blocks(WorkerId(worker_id))


def counts(scene: Scene) -> dict[str, int]:
    return {name: n for name, n in of(scene).counters().items() if n and name != "decisions"}


def turn(scene: Scene, session: str, blocks: int, name: str | None = None) -> None:
    """A request of a program that comes, is answered with one block, and is over: its tools run from now on."""
    name = name or f"{session}-turn"
    scene.send(name, isl=64 * (blocks - 1), session_id=session)
    scene.finish(name, output_tokens=64)


# ---------------------------------------------------------------- phases, and where programs are


def test_a_program_reasons_while_a_request_is_open_and_acts_in_between() -> None:
    scene = thunder()
    scene.send("a1", isl=640, session_id="a")
    assert (program(scene, "a").phase, held(scene)) == (Phase.REASONING, 10)
    scene.finish("a1", output_tokens=65)
    assert (program(scene, "a").phase, held(scene)) == (Phase.ACTING, 12)
    scene.send("a2", isl=1280, session_id="a")
    assert (program(scene, "a").phase, held(scene)) == (Phase.REASONING, 20)


def test_a_program_stays_with_its_kv_and_new_ones_go_where_most_is_free() -> None:
    scene = thunder(2)
    assert scene.send("a1", isl=640, session_id="a") == 0
    assert scene.send("b1", isl=64, session_id="b") == 1
    scene.finish("a1")
    action = scene.arrive("a2", isl=1280, session_id="a")
    assert isinstance(action, Dispatch)
    assert (action.worker_id, action.rule) == (0, "program")
    assert scene.send("c1", isl=64, session_id="c") == 1


def test_a_request_without_a_session_takes_room_until_it_ends_and_never_waits() -> None:
    scene = thunder()
    turn(scene, "a", 94)
    assert scene.send("x", isl=6400) == 0
    assert held(scene) == 194
    scene.finish("x", output_tokens=64)
    assert held(scene) == 94


def test_a_program_that_has_not_been_heard_of_for_as_long_as_one_may_be_paused_is_forgotten() -> None:
    scene = thunder()
    turn(scene, "a", 40)
    scene.wait(1799)
    scene.send("x", isl=64)
    assert held(scene) == 41
    scene.wait(1)
    scene.send("y", isl=64)
    assert (held(scene), len(of(scene)._programs)) == (2, 0)


def test_what_a_lost_worker_had_is_forgotten_and_its_programs_begin_elsewhere() -> None:
    scene = thunder(2)
    turn(scene, "a", 40)
    scene.send("b1", isl=640, session_id="b")
    assert (held(scene, 0), held(scene, 1)) == (40, 10)
    scene.lost(0)
    assert held(scene, 0) == 0
    assert scene.send("a2", isl=64 * 40, session_id="a") == 1
    scene.lost(1)
    scene.fail("a2")
    scene.fail("b1")
    assert len(of(scene)._programs) == 0


# ---------------------------------------------------------------- pausing


@pytest.mark.parametrize(("last", "paused"), [(24, 0), (25, 1)])
def test_programs_are_paused_from_95_per_cent_down_to_80_those_that_act_for_longest_first(
    last: int, paused: int
) -> None:
    """40 + 30 + 25 are 95: pausing the first leaves 55, and no other has to be."""
    scene = thunder()
    for session, blocks in (("a", 40), ("b", 30), ("c", last)):
        turn(scene, session, blocks)
    scene.wait(4.9)
    assert counts(scene) == {}
    scene.wait(0.2)
    assert counts(scene) == ({"programs_paused": paused} if paused else {})
    assert [program(scene, name).paused for name in "abc"] == [bool(paused), False, False]
    assert held(scene) == (55 if paused else 94)


def test_one_that_reasons_is_paused_at_the_end_of_its_answer_only_where_acting_ones_are_not_enough() -> None:
    """Of 96 blocks the acting program has 10; pausing it leaves 86, so one that reasons is marked as well."""
    scene = thunder()
    scene.send("a1", isl=64 * 50, session_id="a")
    scene.send("b1", isl=64 * 36, session_id="b")
    turn(scene, "c", 10)
    scene.wait(5.1)
    assert [(program(scene, n).paused, program(scene, n).phase) for n in "abc"] == [
        (True, Phase.REASONING),
        (False, Phase.REASONING),
        (True, Phase.ACTING),
    ]
    assert held(scene) == 86  # nothing is taken from a request under way
    scene.finish("a1")
    assert held(scene) == 36
    assert counts(scene) == {"programs_paused": 2}


def test_nothing_ticks_while_no_pool_is_too_full() -> None:
    scene = thunder()
    turn(scene, "a", 90)
    assert scene._timers == {}
    turn(scene, "b", 5)
    assert list(scene._timers) == ["thunder-tick"]
    scene.wait(10)
    assert scene._timers == {}


# ---------------------------------------------------------------- waiting and going on


def pressed(paused_blocks: int) -> Scene:
    """Program a is paused; 55 blocks are taken up, 30 of them by a request that is open."""
    scene = thunder()
    turn(scene, "a", 40)
    scene.send("b1", isl=64 * 30, session_id="b")
    turn(scene, "c", 25)
    scene.wait(5.1)
    assert (program(scene, "a").paused, held(scene)) == (True, 55)
    scene.arrive("a2", isl=64 * paused_blocks, session_id="a")
    return scene


@pytest.mark.parametrize(("blocks", "goes"), [(30, True), (31, False)])
def test_a_paused_program_goes_on_where_it_leaves_ten_points_below_95(blocks: int, goes: bool) -> None:
    scene = pressed(blocks)
    assert ("a2" in scene.where) is goes
    assert program(scene, "a").paused is not goes


def test_a_worker_with_nothing_to_compute_is_never_kept_from_one_that_waits() -> None:
    scene = pressed(40)
    assert "a2" not in scene.where
    scene.finish("b1")
    assert scene.where["a2"] == 0
    assert counts(scene) == {"programs_paused": 1, "programs_resumed": 1, "queued": 1, "queue_peak": 1}


def test_who_waits_goes_on_after_half_an_hour_whatever_is_taken_up() -> None:
    scene = pressed(60)
    scene.wait(1795)
    assert "a2" not in scene.where
    scene.wait(10)
    assert scene.where["a2"] == 0
    assert counts(scene)["programs_forced"] == 1


def test_a_new_program_waits_where_it_would_fill_the_pool() -> None:
    scene = thunder()
    scene.send("a1", isl=64 * 60, session_id="a")
    assert scene.send("b1", isl=64 * 35, session_id="b") == 0
    action = scene.arrive("c1", isl=64, session_id="c")
    assert isinstance(action, Enqueue)
    assert (action.policy_class, action.reason) == ("programs", "a new program, 95% of the pool in use; 1 wait")


def test_a_decision_tells_of_the_worker_that_has_no_room() -> None:
    scene = thunder(2, explain=True)
    scene.send("a1", isl=90 * 64, session_id="a")
    sent = scene.arrive("b1", isl=20 * 64, session_id="b")
    assert isinstance(sent, Dispatch)
    assert [(c.worker_id, c.why_not) for c in sent.candidates] == [(0, "without room for it now"), (1, None)]


def test_a_request_that_waits_for_a_pool_at_80_per_cent_counts_as_come_two_seconds_later() -> None:
    """The first finds 90 blocks taken up, the second 70: when 60 are left, 30 more fit once."""
    scene = thunder()
    scene.send("long", isl=64 * 60)
    scene.send("x", isl=64 * 20)
    scene.send("y", isl=64 * 10)
    first = scene.arrive("first", isl=64 * 30, session_id="first")
    assert isinstance(first, Enqueue)
    assert first.score == pytest.approx(-(scene.now_s + 2.0))
    scene.finish("x")
    scene.wait(1.0)
    second = scene.arrive("second", isl=64 * 30, session_id="second")
    assert isinstance(second, Enqueue)
    assert second.score == pytest.approx(-scene.now_s)
    scene.finish("y")
    assert ("second" in scene.where, "first" in scene.where) == (True, False)
    assert counts(scene)["demoted"] == 1


def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    scene = pressed(40)
    scene.cancel_waiting("a2")
    assert of(scene)._waiting == {}


def test_one_that_waits_is_refused_when_the_last_worker_goes() -> None:
    scene = pressed(40)
    scene.fail("b1")  # what was there is over, and a2 goes
    scene = pressed(40)
    scene.draining(0)
    assert "a2" not in scene.where
    assert "a2" not in scene.view.requests
    assert counts(scene)["rejected_all_fenced"] == 1


def test_pins_go_where_they_say_whatever_is_taken_up() -> None:
    scene = thunder(2)
    scene.send("a1", isl=6400, session_id="a")
    assert scene.send("b1", isl=6400, session_id="b", hint=0) == 0
    assert isinstance(scene.arrive("c1", isl=64, session_id="c", hint=7), Reject)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pause_down_to": 0.96}, "pause_down_to is 0.96, more than pause_at"),
        ({"hysteresis": 0.99}, "hysteresis is 0.99, more than pause_at"),
        ({"pause_at": 1.5}, "thunder.pause_at"),
        ({"tick_s": 0.0}, "thunder.tick_s"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(change: dict[str, float], text: str) -> None:
    usual = {name: getattr(LIMITS, name) for name in ProgramSettings.__dataclass_fields__}
    with pytest.raises(ConfigError, match=text):
        ProgramSettings(**(usual | change))


def test_it_keeps_a_queue_of_its_own() -> None:
    one = QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=1, order="fcfs", waits=True)
    queue = QueueSettings(
        prefill_busy_share=0.5,
        prefill_busy_tokens=None,
        busy_worker_share=1.0,
        requests_per_worker=None,
        tokens_per_worker=None,
        max_wait_s=None,
        classes=(one,),
    )
    with pytest.raises(CapabilityError, match="thunder cannot have a queue in front of it"):
        build(router_settings("thunder", queue=queue))


def test_it_needs_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"router\.thunder"):
        build(router_settings("thunder", programs=None))
