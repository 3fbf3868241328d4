"""GPUs of a worker: each has its own, or two engines would take the first one's memory twice.

A GPU is kept from other allocators of this user on this machine by a lock file for as long as its worker lives, as
ports are. Which ones there are, CUDA_VISIBLE_DEVICES says where it is set, else the device files; nothing is imported.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from executors.ports import lock_folder
from policies.errors import CapabilityError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def gpus_here(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """The GPUs that engines started here may have, by what CUDA calls them; none where there are none, or of a kind
    without these files: then engines look for themselves."""
    if VISIBLE in environment:
        return tuple(name for part in environment[VISIBLE].split(",") if (name := part.strip()) and name != "-1")
    numbers = sorted(int(path.name[6:]) for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdigit())
    return tuple(map(str, numbers))


class GpuAllocator:
    """Some of `gpus` for each worker, in their order; all that it needs, or none."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._locks: dict[str, list[int]] = {}

    def take(self, worker: str, count: int) -> tuple[str, ...]:
        """The GPUs of this worker; none where none are known. Raises CapabilityError where too few are free."""
        if not self._gpus or not count:
            return ()
        locks: list[int] = []
        found: list[str] = []
        for gpu in self._gpus:
            if len(found) < count and (lock := _lock(gpu)) is not None:
                locks.append(lock)
                found.append(gpu)
        if len(found) < count:
            _unlock(locks)
            raise CapabilityError(
                f"worker {worker} needs {count} GPUs, and {len(found)} of the {len(self._gpus)} here are free; start "
                f"fewer workers, or stop whoever has them ({VISIBLE} names those that may be used)"
            )
        self._locks[worker] = locks
        return tuple(found)

    def release(self, worker: str) -> None:
        """This worker's process is gone. Nothing happens where it has none."""
        _unlock(self._locks.pop(worker, []))

    def close(self) -> None:
        """Release everything."""
        for worker in list(self._locks):
            self.release(worker)


def _lock(gpu: str) -> int | None:
    """Keep a GPU from other allocators; None where one has it."""
    lock = os.open(lock_folder("gpus") / gpu.replace("/", "_"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _unlock(locks: Sequence[int]) -> None:
    for lock in locks:
        os.close(lock)
