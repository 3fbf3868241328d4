"""The life of a block in one tier as a transition table, and how many blocks stand where.

`TRANSITIONS[state][cause]` is the next state; what is not in the table must not happen, and says so. The counts of all
states of a tier add up to its capacity at every step, because blocks only ever move from one count to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from policies.errors import InvariantError


class BlockState(Enum):
    """Where a physical block of a tier stands."""

    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    COMPLETE = "complete"
    LOADING = "loading"  # bytes are on their way in: not to be found yet
    REGISTERED = "registered"  # can be found, and somebody uses it
    INACTIVE = "inactive"  # can be found, and nobody uses it: may be evicted


class Cause(Enum):
    """What moves a block on."""

    RESERVE = "reserve"
    WRITE = "first write"
    FULL = "block full"
    REGISTER = "register"
    DUPLICATE = "duplicate rejected"
    RELEASE = "last strong reference dropped"
    MATCH = "match"
    EVICT = "evict"
    LOAD = "load started"
    LANDED = "load ok"
    LOAD_FAILED = "load failed"
    LOAD_CANCELLED = "load cancelled"
    REQUEST_ENDS = "request ends"


_S, _C = BlockState, Cause

TRANSITIONS: Mapping[BlockState, Mapping[Cause, BlockState]] = MappingProxyType(
    {
        _S.FREE: MappingProxyType({_C.RESERVE: _S.RESERVED}),
        _S.RESERVED: MappingProxyType(
            {_C.WRITE: _S.FILLING, _C.LOAD: _S.LOADING, _C.LOAD_CANCELLED: _S.FREE, _C.REQUEST_ENDS: _S.FREE}
        ),
        _S.FILLING: MappingProxyType({_C.FULL: _S.COMPLETE, _C.REQUEST_ENDS: _S.FREE}),
        _S.COMPLETE: MappingProxyType({_C.REGISTER: _S.REGISTERED, _C.DUPLICATE: _S.FREE, _C.REQUEST_ENDS: _S.FREE}),
        _S.LOADING: MappingProxyType(
            {
                _C.LANDED: _S.REGISTERED,
                _C.DUPLICATE: _S.FREE,
                _C.LOAD_FAILED: _S.FREE,
                _C.LOAD_CANCELLED: _S.FREE,
            }
        ),
        _S.REGISTERED: MappingProxyType({_C.RELEASE: _S.INACTIVE}),
        _S.INACTIVE: MappingProxyType({_C.MATCH: _S.REGISTERED, _C.EVICT: _S.FREE}),
    }
)

_STORY_MOVES = 16
"""How many of the last moves an error tells."""


class Gauges:
    """How many blocks of a tier of `capacity` blocks are in each state. All are free at first."""

    __slots__ = ("_counts", "_story", "capacity", "name")

    def __init__(self, capacity: int, name: str = "tier") -> None:
        self.capacity = capacity
        self.name = name
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = capacity
        self._story: deque[tuple[int, BlockState, Cause]] = deque(maxlen=_STORY_MOVES)

    def __getitem__(self, state: BlockState) -> int:
        return self._counts[state]

    def move(self, blocks: int, state: BlockState, cause: Cause) -> BlockState:
        """`blocks` of them leave `state`; returns where they are now. Raises InvariantError, with what went before."""
        after = TRANSITIONS[state].get(cause)
        if after is None or blocks < 0 or blocks > self._counts[state]:
            raise InvariantError(self._complaint(blocks, state, cause))
        self._story.append((blocks, state, cause))
        self._counts[state] -= blocks
        self._counts[after] += blocks
        return after

    def check(self) -> None:
        """All states together are the whole tier. Raises InvariantError."""
        total = sum(self._counts.values())
        if total != self.capacity or min(self._counts.values()) < 0:
            shown = " + ".join(f"{n} {state.value}" for state, n in self._counts.items())
            raise InvariantError(f"{self.name}: {shown} = {total} of {self.capacity} blocks")

    def _complaint(self, blocks: int, state: BlockState, cause: Cause) -> str:
        story = "; ".join(f"{n} {s.value}: {c.value}" for n, s, c in self._story) or "nothing yet"
        if cause not in TRANSITIONS[state]:
            allowed = ", ".join(c.value for c in TRANSITIONS[state])
            return f"{self.name}: {cause.value!r} cannot follow {state.value!r} (possible: {allowed}); before: {story}"
        return f"{self.name}: {blocks} blocks of {self._counts[state]} that are {state.value}: {cause.value}; {story}"
