"""Who goes next: requests in classes, ordered within a class, the classes served by deficit round robin.

A class is owed `quantum_tokens` of prompt in each round and spends them on its requests, so that long prompts of one
class cannot starve another. Nothing here knows workers: the caller says which requests cannot go now, and a request
that cannot go holds up its own class alone. After every request has gone, or was taken out, nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, get_args

from policies.cluster.events import RequestArrived
from policies.cluster.ids import RequestId
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.router.checks import one_of, within

Order = Literal["fcfs", "lcfs", "wspt"]

DEFAULT_FAMILY = "default"


@frozen
class QueueClass:
    """One class of requests: those of a `family` with `min_tokens` or more of prompt to compute, or that name it.

    `order` within it; `waits` False: its requests never wait, they go to a busy worker at once.
    """

    name: str
    family: str
    min_tokens: int
    quantum_tokens: int
    order: Order
    waits: bool

    def __post_init__(self) -> None:
        within("classes.min_tokens", self.min_tokens, 0)
        within("classes.quantum_tokens", self.quantum_tokens, 1)
        one_of("classes.order", self.order, get_args(Order))


@frozen
class QueueSettings:
    """When requests wait in the router, and how many may (`classes`: in which order they go).

    A worker is busy with prompts when more than `prefill_busy_share` of what a step takes, or more than
    `prefill_busy_tokens`, is dispatched there and not computed; requests wait while `busy_worker_share` of the workers
    that they may go to are. At most `requests_per_worker` and `tokens_per_worker` wait, times those workers, none
    longer than `max_wait_s`. None: that limit does not exist.
    """

    prefill_busy_share: float | None
    prefill_busy_tokens: float | None
    busy_worker_share: float
    requests_per_worker: int | None
    tokens_per_worker: int | None
    max_wait_s: float | None
    classes: tuple[QueueClass, ...]

    def __post_init__(self) -> None:
        if self.prefill_busy_share is None and self.prefill_busy_tokens is None:
            raise ConfigError(
                "router.queue: without prefill_busy_share and prefill_busy_tokens no worker is ever busy, and nothing "
                "would wait; give one of them"
            )
        within("queue.prefill_busy_share", self.prefill_busy_share, 0)
        within("queue.prefill_busy_tokens", self.prefill_busy_tokens, 0)
        within("queue.busy_worker_share", self.busy_worker_share, 0, 1)
        within("queue.requests_per_worker", self.requests_per_worker, 0)
        within("queue.tokens_per_worker", self.tokens_per_worker, 0)
        within("queue.max_wait_s", self.max_wait_s, 0)
        Classes(self.classes)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that waits: as it arrived, since when, and its place within its class."""

    event: RequestArrived
    queue_class: QueueClass
    strict_priority: int
    score: float
    seq: int
    uncached_tokens: int
    since_s: float

    @property
    def request_id(self) -> RequestId:
        return self.event.request_id


def score(order: Order, arrival_s: float, jump_s: float, uncached_tokens: int) -> float:
    """The place of a request among those of one class and strict priority: the highest goes first."""
    jump_s = max(jump_s, 0.0)
    if order == "fcfs":
        return jump_s - arrival_s
    if order == "lcfs":
        return jump_s + arrival_s
    return (1.0 + jump_s) / max(1, uncached_tokens)


class Classes:
    """Which class a request belongs to."""

    __slots__ = ("_by_name", "_families", "all")

    def __init__(self, classes: Sequence[QueueClass]) -> None:
        self.all = tuple(classes)
        self._by_name = {c.name: c for c in classes}
        self._families: dict[str, list[QueueClass]] = {}
        if len(self._by_name) != len(self.all) or not self.all:
            raise ConfigError("router.classes: there must be at least one class, each with a name of its own")
        for one in sorted(classes, key=lambda c: -c.min_tokens):
            self._families.setdefault(one.family, []).append(one)
        for family, members in self._families.items():
            steps = [one.min_tokens for one in members]
            if len({*steps}) != len(steps) or steps[-1] != 0:
                raise ConfigError(
                    f"router.classes: family {family!r} has classes from {', '.join(map(str, reversed(steps)))} tokens "
                    "on; each must begin elsewhere, and one at min_tokens = 0"
                )
        if DEFAULT_FAMILY not in self._families:
            raise ConfigError(f"router.classes: no class has family {DEFAULT_FAMILY!r}, for requests that name none")

    @property
    def by_length(self) -> bool:
        """Whether the class of a request depends on what is left to compute of its prompt."""
        return len(self._families) < len(self.all)

    def of(self, named: str | None, family: str | None, uncached_tokens: int) -> QueueClass:
        """The class named, else that of the family whose bucket the prompt falls into; unknown names count as none."""
        if named is not None and named in self._by_name:
            return self._by_name[named]
        members = self._families.get(family or DEFAULT_FAMILY) or self._families[DEFAULT_FAMILY]
        return next(one for one in members if one.min_tokens <= uncached_tokens)


class _Line:
    """The requests of one class, the next one first; those taken out leave when they reach the front."""

    __slots__ = ("deficit_tokens", "heap", "queue_class", "size")

    def __init__(self, queue_class: QueueClass) -> None:
        self.queue_class = queue_class
        self.heap: list[tuple[int, float, int, Waiting]] = []
        self.size = 0
        self.deficit_tokens = 0


class Queue:
    """All requests that wait. Order of the classes is that of `classes`."""

    __slots__ = ("_carry", "_cursor", "_lines", "_place", "_seq", "_waiting", "tokens")

    def __init__(self, classes: Sequence[QueueClass]) -> None:
        self._lines = [_Line(one) for one in classes]
        self._place = {one.name: at for at, one in enumerate(classes)}
        self._waiting: dict[RequestId, Waiting] = {}
        self._cursor = 0
        self._carry: _Line | None = None
        self._seq = 0
        self.tokens = 0  # prompt tokens of all that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def backlog(self, queue_class: QueueClass) -> int:
        """Requests of one class that wait."""
        return self._lines[self._place[queue_class.name]].size

    def add(
        self, event: RequestArrived, queue_class: QueueClass, strict_priority: int, uncached_tokens: int
    ) -> Waiting:
        """Let a request wait. `uncached_tokens` is what its class is charged for it."""
        cost_tokens = max(1, uncached_tokens)
        place = score(queue_class.order, event.at_s, event.priority, cost_tokens)
        entry = Waiting(event, queue_class, strict_priority, place, self._seq, cost_tokens, event.at_s)
        self._seq += 1
        line = self._lines[self._place[queue_class.name]]
        heappush(line.heap, (-strict_priority, -place, entry.seq, entry))
        line.size += 1
        self._waiting[event.request_id] = entry
        self.tokens += event.isl
        return entry

    def remove(self, request_id: RequestId) -> Waiting | None:
        """Take a request out; None when it does not wait."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            line = self._lines[self._place[entry.queue_class.name]]
            self._leave(line, entry)
            if len(line.heap) > 2 * line.size + 8:
                line.heap = [item for item in line.heap if self._waits(item[3])]
                heapify(line.heap)
        return entry

    def pop(self, blocked: Callable[[Waiting], bool]) -> Waiting | None:
        """The next request that can go, taken out; None when no class has one at its front."""
        ready = [(line, head) for line in self._in_turn() if (head := self._head(line)) and not blocked(head)]
        if not ready:
            return None
        carry = self._carry
        for line, head in ready:
            if line is carry and head.uncached_tokens <= line.deficit_tokens:
                return self._take(line, head)
        taken = self._go_round(ready)
        if taken is None:
            rounds = min(
                -(-(head.uncached_tokens - line.deficit_tokens) // line.queue_class.quantum_tokens)
                for line, head in ready
            )
            for line, _ in ready:
                line.deficit_tokens += rounds * line.queue_class.quantum_tokens
            taken = self._go_round(ready)
        assert taken is not None
        return taken

    def _in_turn(self) -> list[_Line]:
        return self._lines[self._cursor :] + self._lines[: self._cursor]

    def _go_round(self, ready: Sequence[tuple[_Line, Waiting]]) -> Waiting | None:
        """The first whose class can pay for it, each class being given one quantum where it falls short."""
        for line, head in ready:
            if head.uncached_tokens > line.deficit_tokens:
                line.deficit_tokens += line.queue_class.quantum_tokens
            if head.uncached_tokens <= line.deficit_tokens:
                return self._take(line, head)
        return None

    def _take(self, line: _Line, head: Waiting) -> Waiting:
        heappop(line.heap)
        del self._waiting[head.request_id]
        line.deficit_tokens -= head.uncached_tokens
        self._carry = line if line.deficit_tokens > 0 else None
        self._cursor = (self._place[line.queue_class.name] + 1) % len(self._lines)
        self._leave(line, head)
        return head

    def _leave(self, line: _Line, entry: Waiting) -> None:
        line.size -= 1
        self.tokens -= entry.event.isl
        if not line.size:
            line.heap.clear()
            line.deficit_tokens = 0
            if self._carry is line:
                self._carry = None

    def _head(self, line: _Line) -> Waiting | None:
        heap = line.heap
        while heap:
            entry = heap[0][3]
            if self._waits(entry):
                return entry
            heappop(heap)
        return None

    def _waits(self, entry: Waiting) -> bool:
        return self._waiting.get(entry.request_id) is entry
