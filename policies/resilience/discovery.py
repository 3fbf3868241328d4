"""Who is there, by lease: heart-beats that end, and a store that may be down itself.

While the store is down nobody is removed: that a heart-beat was not heard says nothing then. Afterwards every lease is
judged anew, from the return of the store on. It never removes a worker that may be serving for want of a store.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from policies.errors import ConfigError

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker at an address, under an epoch."""

    address: str
    epoch: int


def newest(registrations: list[Registration]) -> list[Registration]:
    """One registration for each address: that of the highest epoch, in the order in which addresses came up."""
    found: dict[str, Registration] = {}
    for one in registrations:
        known = found.get(one.address)
        if known is None or one.epoch > known.epoch:
            found[one.address] = one
    return list(found.values())


class Leases(Generic[Name]):
    """Last heart-beats, and since when the store can be trusted. `stale`: it is down now, and the list is frozen."""

    __slots__ = ("_beats", "_trusted_s", "stale", "ttl_s")

    def __init__(self, ttl_s: float) -> None:
        if ttl_s < 0:
            raise ConfigError(f"lease_ttl_s is {ttl_s}, it must be 0 or more")
        self.ttl_s = ttl_s
        self.stale = False
        self._trusted_s = float("-inf")
        self._beats: dict[Name, float] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._beats

    def beat(self, name: Name, at_s: float) -> None:
        """A heart-beat was heard (at the latest: a worker that dies has beaten until then)."""
        self._beats[name] = at_s

    def forget(self, name: Name) -> None:
        self._beats.pop(name, None)

    def store_down(self) -> None:
        """The store cannot be reached: the list stays as it is."""
        self.stale = True

    def store_up(self, at_s: float) -> None:
        """It can be reached again; whoever lives has one lease's time to say so."""
        self.stale = False
        self._trusted_s = at_s

    def ends_s(self, name: Name) -> float | None:
        """When a lease ends unless a heart-beat comes; None while the store is down."""
        return None if self.stale else max(self._beats[name], self._trusted_s) + self.ttl_s

    def expired(self, now_s: float) -> list[Name]:
        """Whose lease has ended, in order of registration; nobody's while the store is down."""
        return [name for name in self._beats if (ends_s := self.ends_s(name)) is not None and ends_s <= now_s]
