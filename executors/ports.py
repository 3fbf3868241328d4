"""Ports of a worker, taken together: HTTP, KV events and their replay, side channel or bootstrap, each by data-parallel
rank where the engine counts on from the first one.

A port is tried by listening on it, and kept from other allocators of this user on this machine by a lock file for as
long as its worker lives, since an engine may take minutes to listen itself. Whoever else takes it in the meantime is
not prevented. Ports are taken from below the range that the kernel gives away by itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen

LOOPBACK: Final = "127.0.0.1"
LOWEST, HIGHEST = 20_000, 32_767
"""Linux gives ports from 32,768 up to whoever does not ask for one."""


def bracketed(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


@frozen
class PortNeed:
    """`span` ports in a row (one for each data-parallel rank), called `name`; the first is `port` if that is given."""

    name: str
    span: int = 1
    port: int | None = None


class PortAllocator:
    """Ports of this host, by worker; all of a worker's needs are met, or none."""

    def __init__(self, host: str = LOOPBACK, lowest: int = LOWEST, highest: int = HIGHEST) -> None:
        self._host = host
        self._lowest, self._highest = lowest, highest
        self._next = lowest
        self._locks: dict[str, list[int]] = {}

    def take(self, worker: str, needs: Sequence[PortNeed]) -> Mapping[str, int]:
        """The first port of each need, by name. Raises ConfigError for a port that was asked for and is taken,
        CapabilityError where none is left."""
        if worker in self._locks:
            raise ConfigError(f"worker {worker} has ports already; release them first")
        locks: list[int] = []
        try:
            found = {need.name: self._find(worker, need, locks) for need in needs}
        except BaseException:
            _unlock(locks)
            raise
        self._locks[worker] = locks
        return found

    def release(self, worker: str) -> None:
        """This worker's process is gone: its ports may be had by others. Nothing happens where it has none."""
        _unlock(self._locks.pop(worker, []))

    def close(self) -> None:
        """Release everything."""
        for worker in list(self._locks):
            self.release(worker)

    def _find(self, worker: str, need: PortNeed, locks: list[int]) -> int:
        if need.port is not None:
            for port in range(need.port, need.port + need.span):
                self._lock_asked_for(worker, need, port, locks)
            return need.port
        for first in self._candidates(need.span):
            row: list[int] = []
            if all(self._lock(port, row) is None for port in range(first, first + need.span)):
                locks.extend(row)
                self._next = first + need.span
                return first
            _unlock(row)
        raise CapabilityError(
            f"worker {worker}: no {need.span} free ports in a row for {need.name} between {self._lowest} and "
            f"{self._highest} on {self._host}; give it one, or stop what listens there"
        )

    def _candidates(self, span: int) -> Iterator[int]:
        """Every port that `span` ports fit behind, once, from where the last search ended."""
        last = self._highest - span + 1
        yield from range(self._next, last + 1)
        yield from range(self._lowest, min(self._next, last + 1))

    def _lock_asked_for(self, worker: str, need: PortNeed, port: int, locks: list[int]) -> None:
        why = self._lock(port, locks, reuse=True)
        if why is not None:
            raise ConfigError(
                f"worker {worker}: port {port} for {need.name} on {self._host} is not free ({why}); "
                "choose another one, or leave it out"
            )

    def _lock(self, port: int, locks: list[int], *, reuse: bool = False) -> str | None:
        """Keep `port` from other allocators, if nobody has it: None, and its lock is in `locks`; else who has it.

        `reuse`: connections that ended a minute ago are no owner. Servers see it so, but not all that engines bind.
        """
        lock = os.open(lock_folder("ports") / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _try(self._host, port, reuse)
        except BlockingIOError:
            os.close(lock)
            return "another worker of ours has it"
        except OSError as error:
            os.close(lock)
            return (error.strerror or str(error)).lower()
        locks.append(lock)
        return None


def _try(host: str, port: int, reuse: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        probe.bind((host, port))
        probe.listen(1)


def lock_folder(of: str) -> Path:
    """Where this user's processes on this machine keep from each other what they have; made where it is not there."""
    folder = Path(tempfile.gettempdir()) / f"dynatwin-{of}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not a folder of this user; remove it, or set TMPDIR to another place")
    return folder


def _unlock(locks: list[int]) -> None:
    for lock in locks:
        os.close(lock)
