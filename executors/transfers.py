"""Moves of KV blocks between host memory and files, objects or another process: what every mover does alike.

A transfer ends in exactly one of TransferDone and TransferFailed. One that is late has failed, but its memory is not
free: bytes may still be moving, and `settled` says when they no longer do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from policies.frozen import frozen


class Op(Enum):
    """Which way, seen from our host memory."""

    READ = "READ"
    WRITE = "WRITE"


class FileMove(NamedTuple):
    """`nbytes` bytes between the pool at `at` and an open file (its number, given by `add_file`) at `offset`."""

    at: int
    file: int
    offset: int
    nbytes: int


class ObjectMove(NamedTuple):
    """The same with the whole of an object."""

    at: int
    key: str
    nbytes: int


class PeerMove(NamedTuple):
    """The same with the pool of another process, at `offset` of it."""

    at: int
    peer: str
    offset: int
    nbytes: int


Moves: TypeAlias = Sequence[FileMove] | Sequence[ObjectMove] | Sequence[PeerMove]


@frozen
class TransferDone:
    """All bytes are where they should be."""

    transfer_id: int
    op: Op
    backend: str
    bytes: int
    seconds: float


@frozen
class TransferFailed:
    """They are not, or not in time (`late`); any part of them may have moved. `bytes` is what was asked for."""

    transfer_id: int
    op: Op
    backend: str
    bytes: int
    seconds: float
    reason: str
    late: bool = False


TransferEnd: TypeAlias = TransferDone | TransferFailed


class Transfer:
    """One under way. `settled` ends when nothing touches its memory any more, whatever `end` has said before."""

    def __init__(self, transfer_id: int, op: Op, backend: str, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.transfer_id = transfer_id
        self.op = op
        self.backend = backend
        self.nbytes = nbytes
        self.settled: asyncio.Future[TransferEnd] = loop.create_future()
        self._started_s = loop.time()
        self._end: TransferEnd | None = None

    async def end(self, deadline_s: float) -> TransferEnd:
        """How it ends, at the latest after `deadline_s` seconds; the same answer ever after."""
        if self._end is None:
            done, _ = await asyncio.wait({self.settled}, timeout=deadline_s)
            late = f"not finished after {deadline_s:g} s"
            self._end = self._end or (self.settled.result() if done else self._failed(late, late=True))
        return self._end

    def succeed(self, seconds: float) -> None:
        """The mover's side: it is over, and all is well. `seconds` as the mover measured them."""
        self._settle(
            TransferDone(
                transfer_id=self.transfer_id, op=self.op, backend=self.backend, bytes=self.nbytes, seconds=seconds
            )
        )

    def fail(self, reason: str) -> None:
        """The mover's side: it is over, and failed."""
        self._settle(self._failed(reason))

    def _settle(self, end: TransferEnd) -> None:
        if not self.settled.done():
            self.settled.set_result(end)

    def _failed(self, reason: str, *, late: bool = False) -> TransferFailed:
        return TransferFailed(
            transfer_id=self.transfer_id,
            op=self.op,
            backend=self.backend,
            bytes=self.nbytes,
            seconds=asyncio.get_running_loop().time() - self._started_s,
            reason=reason,
            late=late,
        )


class Mover(Protocol):
    """What moves blocks of one pool."""

    async def add_file(self, path: Path, nbytes: int) -> int:
        """Open a file of that size for moves; its number. Raises EngineError."""
        ...

    def move(self, op: Op, moves: Moves) -> Transfer:
        """Begin. Failures are told by the transfer, never raised."""
        ...

    async def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are there. Raises EngineError where that cannot be told."""
        ...

    async def close(self) -> None:
        """End what is under way, as failed, and let go of everything. May be called twice."""
        ...
