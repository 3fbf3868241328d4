"""Sessions and their workers: hard and soft bonds, how long they last, how many there are, what undoes them."""

from __future__ import annotations

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Dispatch, Reject
from policies.cluster.events import Hints, RequestRejected
from policies.cluster.ids import RequestId, Role, WorkerId
from policies.errors import ConfigError
from policies.router.affinity import LONGEST_ID, Affinity, AffinitySettings
from policies.router.base import Router
from policies.router.build import build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings
from policies.router.overload import BusySettings

HARD = AffinitySettings(bond="hard", ttl_s=10.0, sessions=100)
SOFT = AffinitySettings(bond="soft", ttl_s=10.0, sessions=100)


def bound(bond: AffinitySettings = HARD, mode: str = "round-robin", workers: int = 3, **more: object) -> Scene:
    return Scene(router(mode, affinity=bond, tie_break="lowest_id", **more), workers)


def turn(scene: Scene, name: str, session: str = "s") -> int:
    """One request of a session, from its arrival to its end."""
    at = scene.send(name, session_id=session)
    scene.first_token(name)
    scene.finish(name)
    return at


@pytest.mark.parametrize("bond", [HARD, SOFT])
def test_a_session_stays_where_its_first_request_went(bond: AffinitySettings) -> None:
    scene = bound(bond)
    assert [turn(scene, f"a{n}", "a") for n in range(3)] == [0, 0, 0]
    assert [turn(scene, f"b{n}", "b") for n in range(3)] == [1, 1, 1]
    assert scene.send("other") == 2
    sent = scene.arrive("a3", session_id="a")
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.rule) == (0, "affinity")


def test_requests_without_a_session_are_bound_to_nobody() -> None:
    scene = bound()
    assert [turn(scene, f"r{n}", "") for n in range(3)] == [0, 1, 2]
    assert [scene.send(f"x{n}", session_id="s" * (LONGEST_ID + 1)) for n in range(3)] == [0, 1, 2]
    assert [scene.send(f"y{n}", session_id="a\nb") for n in range(3)] == [0, 1, 2]


def test_a_bond_lasts_from_the_end_of_the_last_request() -> None:
    scene = bound()
    scene.send("long", session_id="s")
    scene.wait(100)  # it is still open
    assert turn(scene, "b") == 0
    scene.finish("long")
    scene.wait(9.9)
    assert turn(scene, "c") == 0
    scene.wait(10.0)
    assert turn(scene, "d") == 1


@pytest.mark.parametrize("bond", [HARD, SOFT])
def test_a_worker_that_is_fenced_has_no_sessions(bond: AffinitySettings) -> None:
    scene = bound(bond)
    assert turn(scene, "a") == 0
    scene.draining(0)
    assert turn(scene, "b") == 2  # round robin over workers 1 and 2, at its second turn
    scene.lost(2)
    assert turn(scene, "c") == 1
    assert scene.policy.counters()["sessions_rebound"] == 2  # type: ignore[attr-defined]


def test_a_worker_that_comes_back_is_another_one() -> None:
    scene = bound(workers=2)
    assert turn(scene, "a") == 0
    scene.lost(0)
    scene.up(0, epoch=1)
    assert turn(scene, "b") == 1


def test_hard_waits_for_no_other_worker_and_soft_does() -> None:
    limits = BusySettings(engine_running=1, engine_queue=2)
    for bond, kind in ((HARD, Reject), (SOFT, Dispatch)):
        scene = bound(bond, busy=limits)
        for n in range(3):
            assert scene.send(f"s{n}", session_id="s") == 0
        action = scene.arrive("late", session_id="s")
        assert isinstance(action, kind)
        if isinstance(action, Reject):
            assert action.code == "engine_limit"
            assert action.reason == "the session is bound to worker 0, which is full: 3 requests there"
        scene.finish("s0")
        assert scene.send("again", session_id="s") == 0  # soft keeps its bond as well


def test_no_bond_goes_past_a_filter() -> None:
    scene = Scene(router(affinity=HARD), [worker(0, loras=("a",)), worker(1, loras=("b",), taints=("x",))])
    assert turn(scene, "a") == 0
    assert scene.send("adapter", session_id="s", lora="b") == 1
    assert scene.send("taint", session_id="s", hints=Hints(required_taints=("x",))) == 1
    assert scene.send("plain", session_id="s") == 0  # the bond is what it was


def test_a_pin_is_stronger_than_a_bond_and_does_not_move_it() -> None:
    scene = bound()
    assert turn(scene, "a") == 0
    assert scene.send("pinned", session_id="s", hint=2) == 2
    assert turn(scene, "b") == 0


def test_a_refusal_by_the_engine_binds_nothing() -> None:
    scene = bound()
    assert scene.send("too long", session_id="s") == 0
    refused = RequestRejected(
        at_s=scene.next_s, request_id=RequestId("too long"), reason="13 of 10 blocks", worker_id=WorkerId(0)
    )
    scene.post(refused)
    assert turn(scene, "b") == 1


def test_as_many_sessions_as_fit_the_least_recent_goes() -> None:
    scene = bound(AffinitySettings(bond="hard", ttl_s=10.0, sessions=2))
    assert [turn(scene, f"{name}0", name) for name in "ab"] == [0, 1]
    assert turn(scene, "a1", "a") == 0
    assert turn(scene, "c0", "c") == 2  # b is forgotten
    assert turn(scene, "b1", "b") == 0  # and with it c or a, whoever was longest away: a
    assert turn(scene, "c1", "c") == 2
    assert scene.policy.counters()["sessions_dropped"] == 2  # type: ignore[attr-defined]


def test_a_dropped_session_that_still_has_a_request_open_leaves_nothing() -> None:
    table = Affinity(AffinitySettings(bond="hard", ttl_s=10.0, sessions=1))
    table.sent(RequestId("r1"), "a", WorkerId(0))
    table.sent(RequestId("r2"), "b", WorkerId(1))
    table.over(RequestId("r1"), 1.0)
    table.over(RequestId("r2"), 1.0)
    table.over(RequestId("r2"), 1.0)
    assert table.worker_of("a", 2.0) is None
    assert table.worker_of("b", 2.0) == 1
    assert table.worker_of("b", 11.0) is None
    assert (len(table), table._requests) == (0, {})


@pytest.mark.parametrize("change", [{"ttl_s": 0.5}, {"ttl_s": 31_536_001}, {"sessions": 0}, {"bond": "firm"}])
def test_settings_have_limits(change: dict[str, object]) -> None:
    usual: dict[str, object] = {"bond": "hard", "ttl_s": 10.0, "sessions": 5}
    with pytest.raises(ConfigError, match=r"router\.affinity"):
        AffinitySettings(**(usual | change))  # type: ignore[arg-type]


def test_both_legs_have_bonds_of_their_own() -> None:
    from builders import router_settings

    legs = [build(leg) for leg in leg_settings(router_settings("round-robin", affinity=HARD))]
    assert isinstance(legs[0], Router)
    assert isinstance(legs[1], Router)
    settings = DisaggregationSettings(order="prefill_first", conditional="off", busy_tokens=None)
    roles = [Role.PREFILL] * 2 + [Role.DECODE] * 2
    scene = Scene(Disaggregated(*legs, settings), [worker(n, role=role) for n, role in enumerate(roles)])
    went = []
    for n, session in enumerate("abab"):
        name = f"r{n}"
        prefill = scene.send(name, session_id=session)
        scene.prefill_done(name)
        went.append((prefill, scene.where[name]))
        scene.first_token(name)
        scene.finish(name)
    assert went == [(0, 2), (1, 3), (0, 2), (1, 3)]
    scene.lost(0)
    assert scene.send("r9", session_id="a") == 1
    scene.prefill_done("r9")
    assert scene.where["r9"] == 2  # the other leg's bond stands
