"""The way to an engine: a request is under way for a while, and whatever happens meanwhile leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulate import Seen, engine_settings, simulate, trace_row

from policies.cluster.ids import RequestId, WorkerId
from twin.mocker.clock import Order
from twin.mocker.wires import FRONTEND, Wires
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
PATH_S = 0.02
ROWS = [trace_row(0, 0.0, 100, 5), trace_row(1, 0.01, 100, 5)]


def seen(path_s: float, before: Callable[[MockWorld], None] = lambda world: None) -> Seen:
    def both(world: MockWorld) -> None:
        if path_s:
            world.wires.paths[WorkerId(0)] = path_s
        before(world)

    settings = engine_settings(chunked_prefill=False, exclusive_prefill=True)
    return simulate(ROWS, [(settings, TOY)], before=both, strict=True)


def test_first_tokens_come_later_by_the_way_and_gaps_stay() -> None:
    near, far = seen(0.0), seen(PATH_S)
    for when in ("first_token_s", "last_token_s", "admit_s"):
        later = [b - a for a, b in zip(near.ms(when), far.ms(when), strict=True)]
        assert later == pytest.approx([1e3 * PATH_S] * 2)
    assert far.ms("first_token_s") == pytest.approx([120.0, 210.0])


def test_a_client_that_leaves_meanwhile_is_cancelled_and_frees_its_engine() -> None:
    """The engine is told of both, in their order; `simulate` checks that nothing is left in it."""
    at_s = 0.5 * PATH_S

    def leave(world: MockWorld) -> None:
        world.call(at_s, int(Order.FAULT), lambda: world.churn.cancel(RequestId("0")) and None)

    ended = seen(PATH_S, leave).ended
    assert [status for _, (_, status) in sorted(ended.items())] == ["cancelled", "completed"]
    first, _ = ended[0]
    assert first.sequence is not None
    assert first.sequence.first_token_s is None


def test_messages_keep_their_order_and_are_lost_with_their_worker() -> None:
    due: list[tuple[float, Callable[[], None]]] = []
    wires, heard = Wires(lambda delay_s, what: due.append((delay_s, what))), []
    wires.paths[WorkerId(1)] = PATH_S
    for name in "abc":
        wires.send(FRONTEND, WorkerId(1), lambda name=name: heard.append(name))
    wires.send(FRONTEND, WorkerId(0), lambda: heard.append("near"))
    wires.send(WorkerId(1), FRONTEND, lambda: heard.append("back"))
    assert heard == ["near", "back"]
    assert [delay_s for delay_s, _ in due] == [PATH_S] * 3
    assert (wires.owes(WorkerId(1)), wires.owes(WorkerId(0))) == (True, False)
    for _, what in due[:2]:
        what()
    wires.forget(WorkerId(1))
    due[2][1]()
    assert heard == ["near", "back", "a", "b"]
    assert not wires.owes(WorkerId(1))
