"""Who has which blocks outside this worker: a registry of shared tiers and of what peers would share, under leases.

An entry is a hint: the read that follows may still fail. It holds no bytes and asks nobody; a world carries its answers
over a network, and calls a look-up that took too long a miss.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from policies.cluster.ids import Tier, WorkerId

LEASE_S = 60.0
RENEW_S = 20.0
LOOK_UP_TIMEOUT_S = 0.020
"""A look-up without an answer by then is a miss; worlds apply it."""


class Location(NamedTuple):
    """Where a block lies. `owner` is the worker whose memory it is; None in a tier that all share."""

    tier: Tier
    owner: WorkerId | None = None


class Entry(NamedTuple):
    """A block on record: its `fingerprint` tells contents of differently laid out engines apart."""

    location: Location
    bytes: int
    fingerprint: int
    until_s: float


class Registry:
    """Entries by content key. `holds_longest_s` is how long a reader may hold what it found: a lease that is shorter
    would let memory be reused under it, and `lease_is_short` says so."""

    __slots__ = ("_entries", "_lease_s", "_missing", "_missing_s", "lease_is_short")

    def __init__(self, *, lease_s: float = LEASE_S, missing_s: float = 1.0, holds_longest_s: float = 0.0) -> None:
        self._entries: dict[Hashable, Entry] = {}
        self._lease_s = lease_s
        self._missing: dict[Hashable, float] = {}
        self._missing_s = missing_s
        self.lease_is_short = lease_s < holds_longest_s

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Hashable, location: Location, bytes_: int, fingerprint: int, now_s: float) -> None:
        """A write was committed: the block can be found until its lease ends."""
        self._entries[key] = Entry(location, bytes_, fingerprint, now_s + self._lease_s)
        self._missing.pop(key, None)

    def look_up(self, keys: Sequence[Hashable], fingerprint: int, now_s: float) -> list[Location]:
        """Where the first keys are, up to the first one that nobody has in this layout."""
        found = []
        for key in keys:
            if self._missing.get(key, now_s) > now_s:
                break
            entry = self._entries.get(key)
            if entry is None or entry.until_s <= now_s or entry.fingerprint != fingerprint:
                if entry is None or entry.until_s <= now_s:
                    self._entries.pop(key, None)
                    self._missing[key] = now_s + self._missing_s
                break
            found.append(entry.location)
        return found

    def renew(self, owner: WorkerId | None, now_s: float) -> int:
        """The owner (None: whoever keeps the shared tiers) is still there; returns how many leases go on."""
        mine = [key for key, entry in self._entries.items() if entry.location.owner == owner and entry.until_s > now_s]
        for key in mine:
            self._entries[key] = self._entries[key]._replace(until_s=now_s + self._lease_s)
        return len(mine)

    def drop(self, key: Hashable) -> None:
        """The block is there no longer; saying so twice does no harm."""
        self._entries.pop(key, None)

    def owner_lost(self, owner: WorkerId) -> int:
        """A worker is gone, and its memory with it; what it put into shared tiers stays."""
        gone = [key for key, entry in self._entries.items() if entry.location.owner == owner]
        for key in gone:
            del self._entries[key]
        return len(gone)

    def expire(self, now_s: float) -> int:
        """Forget what is over; returns how many entries that were."""
        gone = [key for key, entry in self._entries.items() if entry.until_s <= now_s]
        for key in gone:
            del self._entries[key]
        self._missing = {key: until_s for key, until_s in self._missing.items() if until_s > now_s}
        return len(gone)
