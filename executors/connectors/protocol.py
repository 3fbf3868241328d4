"""What every connector does alike: it takes how many workers of each group there are to be, and says when it is so.

A connector knows counts, never workers: who goes is the platform's choice. It starts no process, sends no request, and
decides nothing; orders and their ends are the business of `scaling`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Protocol

from executors.clock import Clock, Order
from policies.cluster.ids import Role
from policies.frozen import frozen

Live = Callable[[str], int]
"""How many workers of a group take work now, as discovery has them."""


class ConnectorError(Exception):
    """A decision cannot be carried out, and why; the next one may."""


class Rehearsed(ConnectorError):
    """A dry run: it was said what would be done, and nothing was."""


@frozen
class Seen:
    """What the platform says: whether all that was last written is so, and if not, what it waits for. `targets`: by
    group, how many there are to be by now, where somebody else may have set that."""

    confirmed: bool
    waits_for: str = ""
    targets: Mapping[str, int] = field(default_factory=dict)


class Connector(Protocol):
    """Counts by group. Its calls come one after the other. `roles`: the role of each group that it can scale.

    It is asked every `poll_s` seconds how far it is, and a decision is given up after `timeout_s`. `watches`: it wants
    to be asked while no decision is open too.
    """

    name: str
    roles: Mapping[str, Role]
    poll_s: float
    timeout_s: float
    watches: bool

    async def open(self) -> None:
        """Make sure that it can be written to. Raises ConfigError, with what to do, where it never will be."""
        ...

    async def settled(self) -> None:
        """Until nothing that was ordered before, by whomever, is in the way of a new decision."""
        ...

    async def asked(self) -> Mapping[str, int | None]:
        """How many there are to be, by group; None: nobody has said, so that those count which there are. Raises
        ConnectorError."""
        ...

    async def write(self, change: Mapping[str, int], base: Mapping[str, int]) -> Mapping[str, int]:
        """Have so many more (or fewer) than `base`, which has every group; what was written, for each group that
        changes. Raises ConnectorError."""
        ...

    async def rehearse(self, change: Mapping[str, int], base: Mapping[str, int]) -> str:
        """What `write` would do, which is not done. Raises ConnectorError where the platform would refuse it."""
        ...

    async def look(self) -> Seen:
        """How far what was last written is. Raises ConnectorError where the platform does not answer."""
        ...

    async def give_up(self, undo: Mapping[str, int]) -> None:
        """The last decision took too long: nobody waits any more for what is left of it, which is `undo` by group."""
        ...

    async def close(self) -> None: ...


async def pause(clock: Clock, seconds: float, wake: asyncio.Event | None = None) -> None:
    """So long on the world's clock, or until somebody sets `wake`."""
    woken = wake or asyncio.Event()
    timer = clock.call_at(clock.now() + seconds, Order.TIMER, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()
