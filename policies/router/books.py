"""The books: what each worker was sent and has not finished, as the router itself knows it.

A request is booked when it is dispatched, its prompt tokens count until its first token, and everything is freed at its
end or when the worker is lost; any of these may come late or twice. Blocks of prompts that share a prefix count once
per worker (per rank, where ranks are chosen among). Nothing is ever freed by age, and after a drain everything is zero.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import ClassVar

from policies.cluster.blocks import NO_BLOCKS, BlockPath, Branch
from policies.cluster.ids import Place, RequestId
from policies.errors import InvariantError
from policies.router.walk import Ends, depths

_AFTER_S = 1e-6
"""How much later one looks, so that rounding leaves no load a hair above its limit."""


class Load:
    """What one worker has open: distinct KV `blocks`, `prefill_tokens` still to compute, `requests`.

    `spared_blocks` are what answers that are known to end soon take off the blocks, where their length is known.
    """

    __slots__ = ("_ends", "blocks", "place", "prefill_tokens", "requests", "spared_blocks")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.blocks = 0
        self.prefill_tokens = 0
        self.requests = 0
        self.spared_blocks = 0.0
        self._ends: dict[Branch, list[int]] = {}  # per branch: where each open request leaves it, ascending

    def __repr__(self) -> str:
        return f"Load({self.place}: {self.prefill_tokens} tokens, {self.blocks} blocks, {self.requests} requests)"


class _Booking:
    """One open request: where it is (None once that worker was lost) and what it holds there."""

    __slots__ = ("emitted_tokens", "load", "osl_tokens", "own_blocks", "path", "prefill_tokens")

    def __init__(self, load: Load, path: BlockPath, own_blocks: int, prefill_tokens: int) -> None:
        self.load: Load | None = load
        self.path = path
        self.own_blocks = own_blocks
        self.prefill_tokens = prefill_tokens
        self.emitted_tokens = 0
        self.osl_tokens: int | None = None

    @property
    def spared_blocks(self) -> float:
        """The share of its own blocks that an answer of known length has behind it."""
        if not self.osl_tokens:
            return 0.0
        return self.own_blocks * min(self.emitted_tokens / self.osl_tokens, 1.0)


class Books:
    """Open work of every worker. `unknown_frees` counts ends of requests that were not booked."""

    __slots__ = ("_block_size", "_bookings", "_ends", "_loads", "unknown_frees")
    decays: ClassVar[bool] = False
    """Whether `prefill_tokens` of a load is less than what its prompts count in full."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ends: Ends = {}
        self._loads: dict[Place, Load] = {}
        self._bookings: dict[RequestId, _Booking] = {}
        self.unknown_frees = 0

    def __len__(self) -> int:
        """Requests booked and not ended."""
        return len(self._bookings)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._bookings

    @property
    def loads(self) -> Mapping[Place, Load]:
        return self._loads

    @property
    def size(self) -> int:
        """Entries of all tables but the list of workers, a measure of memory: 0 when nothing is open."""
        per_worker = sum(len(load._ends) for load in self._loads.values())
        return len(self._bookings) + len(self._ends) + per_worker

    def load(self, place: Place) -> Load:
        """The open work of a worker, which is empty for one not seen before."""
        load = self._loads.get(place)
        if load is None:
            load = self._loads[place] = Load(place)
        return load

    def depths(self, path: BlockPath) -> dict[Place, int]:
        """Leading blocks of `path` that open requests of each worker already use; none: left out."""
        return depths(self._ends, path)

    def prefill_tokens(self, place: Place) -> float:
        """Prompt tokens that a worker has still to compute."""
        load = self._loads.get(place)
        return load.prefill_tokens if load is not None else 0

    def prompt_tokens_of(self, request_id: RequestId) -> int:
        """Prompt tokens of one request that are still to be computed; 0 for one that is not booked."""
        booking = self._bookings.get(request_id)
        return booking.prefill_tokens if booking is not None and booking.load is not None else 0

    def prefills(self, places: Iterable[Place]) -> list[float]:
        """The same for several workers."""
        return [self.prefill_tokens(place) for place in places]

    def book(
        self,
        request_id: RequestId,
        place: Place,
        path: BlockPath | None,
        own_blocks: int,
        prefill_tokens: int,
    ) -> None:
        """A request was sent to a worker: `path` are blocks that others may share, `own_blocks` are further ones."""
        earlier = self._bookings.get(request_id)
        if earlier is not None and earlier.load is not None:
            raise InvariantError(f"request {request_id!r} is booked already; free it before it is sent again")
        load = self.load(place)
        booking = _Booking(load, path or NO_BLOCKS, own_blocks, prefill_tokens)
        self._bookings[request_id] = booking
        load.requests += 1
        load.prefill_tokens += prefill_tokens
        load.blocks += own_blocks + self._enter(load, booking.path)

    def prefill_done(self, request_id: RequestId) -> None:
        """The prompt is computed; a repetition, or a request that is not booked, changes nothing."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.load is not None:
            booking.load.prefill_tokens -= booking.prefill_tokens
            booking.prefill_tokens = 0

    def expect(self, request_id: RequestId, osl_tokens: int | None) -> None:
        """How long the answer will be: the request's own blocks weigh less the more of it is made."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            booking.osl_tokens = osl_tokens

    def emit(self, request_id: RequestId, tokens: int) -> None:
        """Further output tokens: one more own block at each multiple of the block size."""
        booking = self._bookings.get(request_id)
        if booking is None or booking.load is None:
            return
        load, before, spared = booking.load, booking.emitted_tokens // self._block_size, booking.spared_blocks
        booking.emitted_tokens += tokens
        grown = booking.emitted_tokens // self._block_size - before
        booking.own_blocks += grown
        load.blocks += grown
        load.spared_blocks += booking.spared_blocks - spared

    def free(self, request_id: RequestId) -> None:
        """A request ended, however; of one that is not booked only the count is kept."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            self.unknown_frees += 1
            return
        load = booking.load
        if load is not None:
            load.requests -= 1
            load.prefill_tokens -= booking.prefill_tokens
            load.blocks -= booking.own_blocks + self._leave(load, booking.path)
            if booking.osl_tokens:  # exactly nothing once nobody is there, whatever was rounded on the way
                load.spared_blocks = load.spared_blocks - booking.spared_blocks if load.requests else 0.0

    def interrupt(self, request_id: RequestId) -> None:
        """A request has lost its worker: its work is freed at once, its end may still come."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.load is not None:
            self.free(request_id)
            booking.load = None
            booking.path = NO_BLOCKS
            self._bookings[request_id] = booking

    def lose(self, place: Place) -> None:
        """A worker is gone: its work is freed at once, the ends of its requests may still come."""
        load = self._loads.pop(place, None)
        if load is None:
            return
        for branch in load._ends:
            self._forget(branch, place)
        for booking in self._bookings.values():
            if booking.load is load:
                booking.load = None
                booking.path = NO_BLOCKS

    # ------------------------------------------------------------ distinct blocks
    # Every path enters a branch at its start, so the distinct blocks of a worker in a branch are those up to the
    # farthest end.

    def _enter(self, load: Load, path: BlockPath) -> int:
        """Count a path in; returns how many of its blocks are new on that worker."""
        grown = 0
        for branch, end in path.pieces:
            ends = load._ends.get(branch)
            if ends is None:
                load._ends[branch] = [end]
                grown += end - branch.start
            elif end > ends[-1]:
                grown += end - ends[-1]
                ends.append(end)
            else:
                insort(ends, end)
                continue
            here = self._ends.get(branch)
            if here is None:
                here = self._ends[branch] = {}
            here[load.place] = end
        return grown

    def _leave(self, load: Load, path: BlockPath) -> int:
        """Count a path out; returns how many blocks nobody on that worker uses any more."""
        shrunk = 0
        for branch, end in path.pieces:
            ends = load._ends[branch]
            if len(ends) == 1:
                del load._ends[branch]
                shrunk += end - branch.start
                self._forget(branch, load.place)
            elif end == ends[-1]:
                ends.pop()
                shrunk += end - ends[-1]
                self._ends[branch][load.place] = ends[-1]
            else:
                del ends[bisect_left(ends, end)]
        return shrunk

    def _forget(self, branch: Branch, place: Place) -> None:
        here = self._ends[branch]
        del here[place]
        if not here:
            del self._ends[branch]


class _Prompts:
    """Prompts that one worker has to compute, the oldest first, and since when that one is computed."""

    __slots__ = ("since_s", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[RequestId, int] = {}
        self.since_s = 0.0


class DecayingBooks(Books):
    """Books in which the oldest prompt of each worker shrinks at `tokens_per_s` while it is computed.

    `now_s` is to be set before anything is noted or asked; the next prompt begins to shrink when the one before is.
    """

    __slots__ = ("_prompts", "_where", "now_s", "tokens_per_s")
    decays = True

    def __init__(self, block_size: int, tokens_per_s: float) -> None:
        super().__init__(block_size)
        self.tokens_per_s = tokens_per_s
        self.now_s = 0.0
        self._prompts: dict[Place, _Prompts] = {}
        self._where: dict[RequestId, Place] = {}

    @property
    def size(self) -> int:
        return super().size + len(self._prompts) + len(self._where)

    def prefill_tokens(self, place: Place) -> float:
        line = self._prompts.get(place)
        if line is None:
            return 0
        computed = self.tokens_per_s * (self.now_s - line.since_s)
        return super().prefill_tokens(place) - min(next(iter(line.tokens.values())), max(computed, 0.0))

    def falls_s(self, place: Place, at_s: float, limit_tokens: float) -> float | None:
        """When `prefill_tokens` of a worker, now above a limit, falls to it with time alone; None: it does not."""
        line = self._prompts.get(place)
        self.now_s = at_s
        if line is None or self.prefill_tokens(place) <= limit_tokens:
            return None
        over_tokens = super().prefill_tokens(place) - limit_tokens
        if over_tokens > next(iter(line.tokens.values())):
            return None  # more than the prompt that shrinks
        return max(line.since_s + over_tokens / self.tokens_per_s, at_s) + _AFTER_S

    def book(
        self,
        request_id: RequestId,
        place: Place,
        path: BlockPath | None,
        own_blocks: int,
        prefill_tokens: int,
    ) -> None:
        super().book(request_id, place, path, own_blocks, prefill_tokens)
        if not prefill_tokens:
            return
        line = self._prompts.get(place)
        if line is None:
            line = self._prompts[place] = _Prompts()
            line.since_s = self.now_s
        line.tokens[request_id] = prefill_tokens
        self._where[request_id] = place

    def prefill_done(self, request_id: RequestId) -> None:
        super().prefill_done(request_id)
        self._computed(request_id)

    def free(self, request_id: RequestId) -> None:
        super().free(request_id)
        self._computed(request_id)

    def lose(self, place: Place) -> None:
        super().lose(place)
        line = self._prompts.pop(place, None)
        for request_id in line.tokens if line is not None else ():
            del self._where[request_id]

    def _computed(self, request_id: RequestId) -> None:
        place = self._where.pop(request_id, None)
        if place is None:
            return
        line = self._prompts[place]
        if next(iter(line.tokens)) == request_id:
            line.since_s = self.now_s
        del line.tokens[request_id]
        if not line.tokens:
            del self._prompts[place]
