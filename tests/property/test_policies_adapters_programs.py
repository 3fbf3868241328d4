"""Random clusters that come and go under random demand: no mode ever sends a request where its adapter is missing.

`Scene` watches every invariant at every event; here it is said besides when a request must be refused, and with what.
"""

from __future__ import annotations

from builders import Scene, router_settings, worker
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.actions import Dispatch, Reject
from policies.cluster.events import PrefillDone, RequestArrived, RequestFinished
from policies.cluster.ids import Leg, RequestId, Role, WorkerId
from policies.router.base import Router
from policies.router.build import build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings

MODES = ["round-robin", "random", "least-loaded", "power-of-two", "kv"]
LORAS = st.sampled_from([None, "", "a", "b", "c"])
SETS = st.none() | st.lists(st.sampled_from(["a", "b"]), unique=True, max_size=2).map(tuple)


def serving(scene: Scene, lora: str | None, role: Role) -> set[int]:
    """The workers of a role that take new work and serve an adapter, straight from what they registered with."""
    return {
        worker_id
        for worker_id, seen in scene.view.workers.items()
        if not seen.draining and seen.up.role is role and (not lora or seen.up.loras is None or lora in seen.up.loras)
    }


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, int, object]]:
    kinds = st.sampled_from(["ask"] * 6 + ["lose", "drain", "up"])
    return [
        (kind, draw(st.integers(0, 5)), draw(LORAS if kind == "ask" else SETS))
        for kind in draw(st.lists(kinds, min_size=1, max_size=30))
    ]


@examples(300)
@given(st.sampled_from(MODES), st.lists(SETS, min_size=1, max_size=4), moves())
def test_a_request_is_sent_to_one_who_serves_it_and_refused_if_there_is_none(
    mode: str, sets: list[tuple[str, ...] | None], program: list[tuple[str, int, object]]
) -> None:
    scene = Scene(build(router_settings(mode)), [worker(i, loras=loras) for i, loras in enumerate(sets)])
    for n, (kind, at, what) in enumerate(program):
        if churn(scene, kind, at, what, Role.MIXED):
            continue
        assert what is None or isinstance(what, str)
        can = serving(scene, what, Role.MIXED)
        arrived = RequestArrived(at_s=scene.next_s, request_id=RequestId(f"r{n}"), isl=640, lora=what)
        (action,) = scene.post(arrived)
        if isinstance(action, Dispatch):
            assert action.worker_id in can
        else:
            assert isinstance(action, Reject)
            assert not can
            known = [seen for seen in scene.view.workers.values() if seen.up.serves(what)]
            nobody = "unknown_lora" if what else "no_endpoints"
            assert action.code == ("all_fenced" if known else nobody)


@examples(300)
@given(st.sampled_from(MODES), st.lists(SETS, min_size=2, max_size=6), moves())
def test_no_leg_goes_where_the_adapter_is_missing(
    mode: str, sets: list[tuple[str, ...] | None], program: list[tuple[str, int, object]]
) -> None:
    legs = [build(leg) for leg in leg_settings(router_settings(mode))]
    assert isinstance(legs[0], Router)
    assert isinstance(legs[1], Router)
    settings = DisaggregationSettings(order="prefill_first", conditional="off", busy_tokens=None)
    roles = [Role.PREFILL, Role.DECODE]
    ups = [worker(i, role=roles[i % 2], loras=loras) for i, loras in enumerate(sets)]
    scene = Scene(Disaggregated(legs[0], legs[1], settings), ups)
    for n, (kind, at, what) in enumerate(program):
        if churn(scene, kind, at, what, roles[at % 2]):
            continue
        assert what is None or isinstance(what, str)
        first, then = serving(scene, what, Role.PREFILL), serving(scene, what, Role.DECODE)
        request_id = RequestId(f"r{n}")
        (action,) = scene.post(RequestArrived(at_s=scene.next_s, request_id=request_id, isl=640, lora=what))
        if not isinstance(action, Dispatch):
            assert not then
            continue
        if action.leg is Leg.PREFILL:
            assert action.worker_id in first
            done = PrefillDone(at_s=scene.next_s, request_id=request_id, worker_id=action.worker_id)
            (action,) = scene.post(done)
            if not isinstance(action, Dispatch):
                assert not then
                continue
        assert action.worker_id in then
        finished = RequestFinished(
            at_s=scene.next_s, request_id=request_id, worker_id=action.worker_id, output_tokens=1
        )
        scene.post(finished)


def churn(scene: Scene, kind: str, at: int, what: object, role: Role) -> bool:
    """Let a worker go, drain or come, if that is the move and it can be made."""
    seen = scene.view.workers.get(WorkerId(at))
    if kind == "ask":
        return False
    if kind == "up" and seen is None:
        scene.up(at, role=role, loras=what, epoch=1)
    elif kind == "drain" and seen is not None and not seen.draining:
        scene.draining(at)
    elif kind == "lose" and seen is not None and not seen.in_flight:
        scene.lost(at)
    return True
