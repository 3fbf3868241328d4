"""Laws of the queue on random programs: nothing is lost, nothing overtakes its class, turns are fair, nothing stays."""

from __future__ import annotations

from dataclasses import replace

from builders import Scene, router_settings, worker
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.actions import Enqueue
from policies.cluster.events import Hints, RequestArrived
from policies.cluster.ids import RequestId
from policies.router.affinity import AffinitySettings
from policies.router.build import build
from policies.router.overload import BusySettings
from policies.router.queue import Queue, QueueClass, QueueSettings
from policies.router.queued import Queued

CLASSES = (
    QueueClass(name="a", family="default", min_tokens=0, quantum_tokens=300, order="fcfs", waits=True),
    QueueClass(name="b", family="default", min_tokens=500, quantum_tokens=1000, order="wspt", waits=True),
    QueueClass(name="c", family="own", min_tokens=0, quantum_tokens=7, order="lcfs", waits=True),
)
QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=800,
    busy_worker_share=1.0,
    requests_per_worker=None,
    tokens_per_worker=None,
    max_wait_s=None,
    classes=CLASSES,
)


# ---------------------------------------------------------------- the queue alone


@st.composite
def stocks(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Quanta of some classes, and the costs of the requests in each."""
    quanta = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=4))
    costs = [draw(st.lists(st.integers(1, 3000), max_size=12)) for _ in quanta]
    return quanta, costs


def filled(quanta: list[int], costs: list[list[int]]) -> tuple[Queue, list[QueueClass]]:
    classes = [replace(CLASSES[0], name=str(n), quantum_tokens=quantum) for n, quantum in enumerate(quanta)]
    queue = Queue(classes)
    for one, mine in zip(classes, costs, strict=True):
        for n, cost in enumerate(mine):
            arrived = RequestArrived(at_s=float(n), request_id=RequestId(f"{one.name}.{n}"), isl=cost)
            queue.add(arrived, one, 0, cost)
    return queue, classes


@examples(300)
@given(stocks())
def test_everybody_goes_once_and_each_class_in_its_order(stock: tuple[list[int], list[list[int]]]) -> None:
    queue, classes = filled(*stock)
    went = []
    while (entry := queue.pop(lambda _: False)) is not None:
        went.append(entry.request_id)
    assert sorted(went) == sorted(f"{n}.{k}" for n, mine in enumerate(stock[1]) for k in range(len(mine)))
    for one in classes:
        mine = [int(name.split(".")[1]) for name in went if name.split(".")[0] == one.name]
        assert mine == sorted(mine)
    assert (len(queue), queue.tokens) == (0, 0)


@examples(300)
@given(stocks(), st.integers(1, 20))
def test_while_two_classes_wait_neither_is_far_ahead_of_its_share(
    stock: tuple[list[int], list[list[int]]], pops: int
) -> None:
    """Deficit round robin: tokens served per quantum differ by at most what one round and one request can hold."""
    queue, classes = filled(*stock)
    served = {one.name: 0 for one in classes}
    waited = {one.name for one in classes if queue.backlog(one)}
    for _ in range(pops):
        entry = queue.pop(lambda _: False)
        if entry is None:
            break
        served[entry.queue_class.name] += entry.uncached_tokens
        waited &= {one.name for one in classes if queue.backlog(one)}
    shares = [(served[one.name], one.quantum_tokens) for one in classes if one.name in waited]
    largest = max((cost for mine in stock[1] for cost in mine), default=0)
    for tokens, quantum in shares:
        for other_tokens, other_quantum in shares:
            bound = 2 + largest / quantum + largest / other_quantum
            assert tokens / quantum - other_tokens / other_quantum <= bound + 1e-9


# ---------------------------------------------------------------- a router with a queue

MOVES = st.lists(
    st.tuples(st.sampled_from(["ask"] * 6 + ["first"] * 4 + ["end", "end", "leave", "lose", "drain", "up", "wait"]),
              st.integers(0, 2**16)),
    max_size=60,
)  # fmt: skip


def settings_of(kind: str) -> dict[str, object]:
    return {
        "plain": {},
        "short": {"queue": replace(QUEUE, max_wait_s=0.02, requests_per_worker=3, tokens_per_worker=4000)},
        "busy": {"busy": BusySettings(engine_running=1, engine_queue=2, decode_blocks_share=0.05)},
        "bound": {"affinity": AffinitySettings(bond="hard", ttl_s=1.0, sessions=3)},
    }[kind]


@examples(300)
@given(
    st.sampled_from(["kv", "round-robin", "least-loaded"]), st.sampled_from(["plain", "short", "busy", "bound"]), MOVES
)
def test_nobody_is_forgotten(mode: str, kind: str, moves: list[tuple[str, int]]) -> None:
    """Whatever happens, every request ends, nobody waits while a worker that could take it is idle, nothing stays."""
    policy = build(router_settings(mode, tie_break="lowest_id", **({"queue": QUEUE} | settings_of(kind))))
    assert isinstance(policy, Queued)
    scene = Scene(policy, [worker(n) for n in range(3)])
    for n, (move, drawn) in enumerate(moves):
        step(scene, move, drawn, n)
        idle = scene.view.live and all(not w.in_flight for w in scene.view.live)
        assert not (idle and waiting(scene)), f"{waiting(scene)} wait for idle workers"
    finish(scene)
    scene.invariants.finish()
    inner = policy._inner
    assert inner._books is not None
    assert (len(policy._queue), policy._queue.tokens, inner._books.size) == (0, 0, 0)


def waiting(scene: Scene) -> list[str]:
    return [name for name, seen in scene.view.requests.items() if seen.state.value == "queued"]


def step(scene: Scene, move: str, drawn: int, n: int) -> None:
    sent = [name for name, seen in scene.view.requests.items() if seen.worker_id is not None]
    fresh = [name for name in sent if scene.view.requests[name].state.value == "dispatched"]  # type: ignore[index]
    at = drawn % 3
    if move == "ask":
        hints = Hints(family="own", strict_priority=drawn % 2) if drawn % 7 == 0 else None
        pin = at if drawn % 11 == 0 else None
        scene.arrive(f"r{n}", 1 + drawn % 1500, None, pin, hints=hints, session_id=f"s{drawn % 5}", priority=drawn % 4)
    elif move == "first" and fresh:
        scene.first_token(fresh[drawn % len(fresh)])
    elif move == "end" and sent:
        scene.finish(sent[drawn % len(sent)])
    elif move == "leave" and scene.view.requests:
        name = list(scene.view.requests)[drawn % len(scene.view.requests)]
        (scene.cancel if name in sent else scene.cancel_waiting)(name)
    elif move == "wait":
        scene.wait((drawn % 40) / 1000)
    else:
        churn(scene, move, at, n)


def churn(scene: Scene, move: str, at: int, n: int) -> None:
    seen = scene.view.workers.get(at)  # type: ignore[call-overload]
    if move == "up" and seen is None:
        scene.up(at, epoch=n + 1)
    elif move == "drain" and seen is not None and not seen.draining:
        scene.draining(at)
    elif move == "lose" and seen is not None:
        for name in [name for name, request in scene.view.requests.items() if request.worker_id == at]:
            scene.fail(name)
        if seen.in_flight == 0:
            scene.lost(at)


def finish(scene: Scene) -> None:
    while scene.view.requests:
        sent = [name for name, seen in scene.view.requests.items() if seen.worker_id is not None]
        if sent:
            scene.finish(sent[0])
            continue
        assert not scene.view.live or scene.wait(1.0), "time alone lets nobody go"
        if not any(seen.worker_id is not None for seen in scene.view.requests.values()):
            assert not waiting(scene), f"{waiting(scene)} wait with nothing open"


def test_the_programs_do_let_requests_wait() -> None:
    scene = Scene(build(router_settings("kv", queue=QUEUE)), 1)
    scene.send("a", isl=900)
    assert isinstance(scene.arrive("b"), Enqueue)
