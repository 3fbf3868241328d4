"""The queue alone: examples Q1 to Q9 and D1 to D4, classes by name, family and length, and what is left at the end."""

from __future__ import annotations

import pytest

from policies.cluster.events import RequestArrived
from policies.cluster.ids import RequestId
from policies.errors import ConfigError
from policies.router.queue import Classes, Queue, QueueClass, score


def one_class(name: str = "all", **changes: object) -> QueueClass:
    usual: dict = {"family": "default", "min_tokens": 0, "quantum_tokens": 1000, "order": "fcfs", "waits": True}
    return QueueClass(name=name, **(usual | changes))


def arrived(name: str, at_s: float = 0.0, priority: int = 0, isl: int = 100) -> RequestArrived:
    return RequestArrived(at_s=at_s, request_id=RequestId(name), isl=isl, priority=priority)


def drained(queue: Queue) -> list[str]:
    order = []
    while (entry := queue.pop(lambda _: False)) is not None:
        order.append(str(entry.request_id))
    return order


def order_of(order: str, *asked: tuple[str, float, int, int, int]) -> list[str]:
    """Requests as (name, arrival, priority, strict priority, uncached tokens), in the order in which they go."""
    only = one_class(order=order)
    queue = Queue([only])
    for name, at_s, priority, strict, uncached in asked:
        queue.add(arrived(name, at_s, priority), only, strict, uncached)
    return drained(queue)


def test_q1_first_come_first_served() -> None:
    assert order_of("fcfs", ("a", 0, 0, 0, 1), ("b", 1, 0, 0, 1), ("c", 2, 0, 0, 1)) == ["a", "b", "c"]


def test_q2_a_jump_of_fifty_seconds() -> None:
    assert order_of("fcfs", ("a", 0, 0, 0, 1), ("b", 5, 50, 0, 1)) == ["b", "a"]


def test_q3_nobody_jumps_backwards() -> None:
    assert order_of("fcfs", ("a", 0, -100, 0, 1), ("b", 1, 0, 0, 1)) == ["a", "b"]


def test_q4_last_come_first_served() -> None:
    assert order_of("lcfs", ("a", 0, 0, 0, 1), ("b", 1, 0, 0, 1), ("c", 2, 0, 0, 1)) == ["c", "b", "a"]


def test_q5_the_shortest_first() -> None:
    asked = (("long", 0, 0, 0, 1000), ("short", 0, 0, 0, 100), ("middle", 0, 0, 0, 512))
    assert order_of("wspt", *asked) == ["short", "middle", "long"]


def test_q6_what_is_cached_does_not_count() -> None:
    assert score("wspt", 0, 0, 1024 - 60 * 16) == 1 / 64
    assert score("wspt", 0, 0, 512) == 1 / 512


def test_q7_and_q8_a_prompt_has_at_least_one_token_to_compute() -> None:
    assert score("wspt", 0, 0, 1024 - 16) == 1 / 1008
    assert score("wspt", 0, 0, 512 - 1024) == 1


def test_q9_strict_priority_before_all_and_ties_in_order_of_arrival() -> None:
    assert order_of("fcfs", ("low", 0, 1000, 0, 1), ("high", 1000, 0, 1, 1)) == ["high", "low"]
    assert order_of("fcfs", ("a", 3, 0, 0, 1), ("b", 3, 0, 0, 1), ("c", 3, 0, 0, 1)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("quanta", "costs", "popped"),
    [
        ((100, 50), ([100] * 4, [100] * 4), "a0 a1 b0 a2 a3 b1 b2 b3"),  # D1
        ((100, 100), ([300] * 2, [100] * 4), "b0 b1 a0 b2 b3 a1"),  # D2
        ((200, 100), ([50] * 5, [50] * 3), "a0 a1 a2 a3 b0 b1 a4 b2"),  # D3: what is left is spent first
        ((1, 1), ([4000], [1000]), "b0 a0"),  # D4
    ],
)
def test_d1_to_d4_classes_take_turns_by_what_they_are_owed(
    quanta: tuple[int, int], costs: tuple[list[int], list[int]], popped: str
) -> None:
    classes = [one_class(name, quantum_tokens=quantum) for name, quantum in zip("ab", quanta, strict=True)]
    queue = Queue(classes)
    for queue_class, mine in zip(classes, costs, strict=True):
        for n, cost in enumerate(mine):
            queue.add(arrived(f"{queue_class.name}{n}"), queue_class, 0, cost)
    assert drained(queue) == popped.split()


def test_a_head_that_cannot_go_holds_up_its_own_class_alone() -> None:
    a, b = one_class("a"), one_class("b")
    queue = Queue([a, b])
    for name, queue_class in (("a0", a), ("a1", a), ("b0", b)):
        queue.add(arrived(name), queue_class, 0, 10)
    first = queue.pop(lambda entry: entry.request_id == "a0")
    assert first is not None
    assert first.request_id == "b0"
    assert queue.pop(lambda entry: entry.request_id == "a0") is None
    assert drained(queue) == ["a0", "a1"]


def test_waiting_for_nothing_earns_nothing() -> None:
    """A class whose head is held up is given no quantum: it would overtake afterwards."""
    a, b = one_class("a", quantum_tokens=10), one_class("b", quantum_tokens=10)
    queue = Queue([a, b])
    for n in range(3):
        queue.add(arrived(f"a{n}"), a, 0, 10)
        queue.add(arrived(f"b{n}"), b, 0, 10)
    for _ in range(50):
        assert queue.pop(lambda _: True) is None
    assert drained(queue) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_who_is_taken_out_is_gone_and_leaves_nothing() -> None:
    only = one_class()
    queue = Queue([only])
    for n in range(100):
        queue.add(arrived(f"r{n}"), only, 0, 10)
    for n in range(100):
        if n % 3:
            assert queue.remove(RequestId(f"r{n}")) is not None
    assert queue.remove(RequestId("r1")) is None
    assert (len(queue), queue.backlog(only), queue.tokens) == (34, 34, 3400)
    assert drained(queue) == [f"r{n}" for n in range(0, 100, 3)]
    assert (len(queue), queue.backlog(only), queue.tokens) == (0, 0, 0)


# ---------------------------------------------------------------- classes

CLASSES = Classes(
    [
        one_class("short"),
        one_class("long", min_tokens=4000),
        one_class("batch", family="batch"),
        one_class("huge", min_tokens=50_000),
    ]
)


@pytest.mark.parametrize(
    ("named", "family", "uncached", "expected"),
    [
        (None, None, 3999, "short"),
        (None, None, 4000, "long"),
        (None, None, 60_000, "huge"),
        (None, "batch", 60_000, "batch"),
        (None, "nobody", 5000, "long"),
        ("huge", None, 10, "huge"),
        ("nobody", "batch", 10, "batch"),
    ],
)
def test_the_class_of_a_request(named: str | None, family: str | None, uncached: int, expected: str) -> None:
    assert CLASSES.of(named, family, uncached).name == expected


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([], "at least one class"),
        ([one_class("a"), one_class("a", min_tokens=5)], "a name of its own"),
        ([one_class("a"), one_class("b")], "from 0, 0 tokens on"),
        ([one_class("a", min_tokens=5)], "one at min_tokens = 0"),
        ([one_class("a", family="x")], "no class has family 'default'"),
    ],
)
def test_classes_that_leave_a_request_without_one_are_refused(classes: list[QueueClass], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Classes(classes)


@pytest.mark.parametrize("change", [{"quantum_tokens": 0}, {"min_tokens": -1}, {"order": "random"}])
def test_a_class_has_limits(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"router\.classes"):
        one_class("a", **change)
