"""Adapters: a request goes only to workers that serve its adapter, in every mode, on both legs, after a migration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import BLOCK_SIZE, Scene, router, router_settings, worker

from policies.cluster.actions import Action, Dispatch, Reject
from policies.cluster.events import (
    PrefillDone,
    RequestArrived,
    RequestInterrupted,
    RequestMigrated,
    WorkerUp,
)
from policies.cluster.ids import Leg, RequestId, Role, WorkerId
from policies.cluster.journal import Encoder, Header, decode, encode_header
from policies.cluster.state import Cluster
from policies.errors import InvariantError
from policies.router.base import Router
from policies.router.build import build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings

MODES = ["round-robin", "random", "least-loaded", "power-of-two", "kv"]


def mixed(mode: str, *, explain: bool = False) -> Scene:
    """Workers 0 and 1 serve adapter a, worker 1 also b, worker 2 none."""
    served: list[tuple[str, ...]] = [("a",), ("a", "b"), ()]
    return Scene(router(mode, explain=explain), [worker(i, loras=loras) for i, loras in enumerate(served)])


def ask(scene: Scene, request_id: str, lora: str | None, **more: object) -> Action:
    arrived = RequestArrived(at_s=scene.next_s, request_id=RequestId(request_id), isl=640, lora=lora)
    (action,) = scene.post(replace(arrived, **more))  # type: ignore[arg-type]
    return action


def sent(action: Action) -> int:
    assert isinstance(action, Dispatch), action
    return action.worker_id


def refused(action: Action) -> tuple[str, str]:
    assert isinstance(action, Reject), action
    return action.code, action.reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("lora", "where"), [("a", {0, 1}), ("b", {1}), (None, {0, 1, 2}), ("", {0, 1, 2})])
def test_every_mode_chooses_among_the_workers_that_serve_the_adapter(
    mode: str, lora: str | None, where: set[int]
) -> None:
    scene = mixed(mode)
    assert {sent(ask(scene, f"r{n}", lora)) for n in range(40)} == where


def test_turns_of_an_adapter_are_its_own_so_that_no_pattern_of_the_demand_leaves_a_worker_out() -> None:
    scene = mixed("round-robin")
    sent_to = [sent(ask(scene, f"r{n}", "a" if n % 2 else None)) for n in range(12)]
    assert sent_to[0::2] == [0, 1, 2, 0, 1, 2]
    assert sent_to[1::2] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_that_nobody_serves_is_refused_by_name(mode: str) -> None:
    code, reason = refused(ask(mixed(mode), "r", "c"))
    assert code == "unknown_lora"
    assert reason == "no worker serves adapter 'c'; there are a, b"


def test_workers_that_list_nothing_serve_whatever_is_asked_for() -> None:
    scene = Scene(router(), 3)
    assert [sent(ask(scene, f"r{n}", f"adapter-{n}")) for n in range(3)] == [0, 1, 2]


def test_a_refusal_names_a_few_adapters_of_many() -> None:
    scene = Scene(router(), [worker(0, loras=tuple(f"l{n}" for n in range(9)))])
    assert refused(ask(scene, "r", "x"))[1] == "no worker serves adapter 'x'; there are l0, l1, l2, l3, l4, ..."


def test_who_serves_it_but_drains_is_another_refusal_than_nobody() -> None:
    scene = mixed("round-robin")
    scene.draining(1)
    assert refused(ask(scene, "r0", "b"))[0] == "all_fenced"
    scene.lost(1)
    assert refused(ask(scene, "r1", "b"))[0] == "unknown_lora"
    scene.up(1, epoch=1, loras=("b",))
    assert sent(ask(scene, "r2", "b")) == 1


def test_a_pin_does_not_bypass_the_adapter() -> None:
    scene = mixed("round-robin")
    assert sent(ask(scene, "r0", "b", worker_hint=WorkerId(1))) == 1
    code, reason = refused(ask(scene, "r1", "b", worker_hint=WorkerId(0)))
    assert code == "pinned_not_allowed"
    assert reason == "worker 0 was asked for and is not one that serves adapter 'b'"


def test_an_explanation_says_who_does_not_serve_it() -> None:
    action = ask(mixed("kv", explain=True), "r", "b")
    assert isinstance(action, Dispatch)
    assert [candidate.why_not for candidate in action.candidates] == [
        "not one that serves adapter 'b'",
        None,
        "not one that serves adapter 'b'",
    ]


def test_a_request_that_is_sent_again_stays_with_those_who_serve_it() -> None:
    scene = mixed("least-loaded")
    first = sent(ask(scene, "r", "a"))
    interrupted = RequestInterrupted(
        at_s=scene.next_s, request_id=RequestId("r"), worker_id=WorkerId(first), emitted_tokens=3, reason="x"
    )
    scene.post(interrupted)
    # the order to send it again comes from another policy; here the event alone is looked at
    again = RequestMigrated(
        at_s=scene.next_s,
        request_id=RequestId("r"),
        isl=643,
        lora="a",
        attempt=1,
        emitted_tokens=3,
        excluded=(WorkerId(first),),
    )
    policy = scene.policy
    assert isinstance(policy, Router)
    assert sent(policy.route(again, scene.view)) == 1 - first
    both = replace(again, excluded=(WorkerId(0), WorkerId(1)))
    assert refused(policy.route(both, scene.view)) == ("no_endpoints", "no worker takes new work")


# ---------------------------------------------------------------- two legs


def legs(ups: list[WorkerUp], order: str = "prefill_first", **settings: object) -> Scene:
    prefill, other = (build(leg) for leg in leg_settings(router_settings("kv")))
    assert isinstance(prefill, Router)
    assert isinstance(other, Router)
    usual = DisaggregationSettings(order=order, conditional="off", busy_tokens=None)  # type: ignore[arg-type]
    return Scene(Disaggregated(prefill, other, replace(usual, **settings)), ups)  # type: ignore[arg-type]


def leg_workers(prefill: list[tuple[str, ...]], others: list[tuple[str, ...]], **changes: object) -> list[WorkerUp]:
    roles = [Role.PREFILL] * len(prefill) + [Role.DECODE] * len(others)
    return [
        worker(i, role=role, loras=loras, **changes)
        for i, (role, loras) in enumerate(zip(roles, prefill + others, strict=True))
    ]


def prefilled(scene: Scene, request_id: str, worker_id: int) -> Action:
    done = PrefillDone(at_s=scene.next_s, request_id=RequestId(request_id), worker_id=WorkerId(worker_id))
    (action,) = scene.post(done)
    return action


def test_both_legs_go_to_workers_that_serve_the_adapter() -> None:
    scene = legs(leg_workers([("b",), ("a",)], [("b",), ("a", "b")]))
    for n in range(5):
        first = ask(scene, f"r{n}", "a")
        assert isinstance(first, Dispatch)
        assert (first.worker_id, first.leg) == (1, Leg.PREFILL)
        then = prefilled(scene, f"r{n}", 1)
        assert isinstance(then, Dispatch)
        assert (then.worker_id, then.leg) == (3, Leg.DECODE)


def test_an_adapter_without_prefill_workers_runs_whole_where_it_is_decoded() -> None:
    action = ask(legs(leg_workers([("b",)], [("b",), ("a",)])), "r", "a")
    assert isinstance(action, Dispatch)
    assert (action.worker_id, action.leg) == (2, Leg.AGG)


@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
def test_an_adapter_without_decode_workers_is_refused_before_its_prompt_is_computed(order: str) -> None:
    code, reason = refused(ask(legs(leg_workers([("a",)], [("b",)]), order), "r", "a"))
    assert (code, reason) == ("unknown_lora", "no decode worker serves adapter 'a'; there are b")


# ---------------------------------------------------------------- the cluster and its journal


def test_the_cluster_itself_refuses_a_dispatch_to_a_worker_without_the_adapter() -> None:
    cluster = Cluster()
    cluster.fold(worker(0, loras=("b",)))
    cluster.fold(RequestArrived(at_s=1.0, request_id=RequestId("r"), isl=BLOCK_SIZE, lora="a"))
    with pytest.raises(InvariantError, match="worker 0 does not serve adapter 'a'"):
        cluster.apply(Dispatch(request_id=RequestId("r"), worker_id=WorkerId(0), rule="x", reason="x"))


@pytest.mark.parametrize("loras", [None, (), ("a", "b c", "ä")])
def test_the_journal_keeps_the_set_of_a_worker(loras: tuple[str, ...] | None) -> None:
    header = encode_header(Header(versions={}, config={}, seed=0, policies=()))
    line = Encoder().entry(0, worker(0, loras=loras), ())
    (entry,) = decode([header, line])
    assert entry.event == worker(0, loras=loras)


def test_a_journal_from_before_there_were_sets_is_still_read() -> None:
    header = encode_header(Header(versions={}, config={}, seed=0, policies=()))
    line = Encoder().entry(0, worker(0), ()).replace(',"loras":null', "")
    assert "loras" not in line
    (entry,) = decode([header, line])
    assert isinstance(entry.event, WorkerUp)
    assert entry.event.serves("anything")
