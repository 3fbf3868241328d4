"""Host memory for KV blocks, cut into slots: one owner, shared with the helper that moves them.

The memory has no name in any file system: who gets its descriptor has it, and it is gone with the last of them.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from policies.errors import ConfigError, InvariantError

PAGE_BYTES: Final = 4096


class HostPool:
    """`slots` slots of `slot_bytes` bytes each. A slot is taken, and given back when nothing moves in it any more."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(f"a pool of {slots} slots of {slot_bytes} bytes; both are at least 1")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = -(-slots * slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.fd = os.memfd_create("dynatwin-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self._view = memoryview(self._memory)
        self._free = list(range(slots - 1, -1, -1))
        self._taken = [False] * slots

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot that nobody else has; None where all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        """Nobody reads or writes this slot any more. Raises InvariantError for one that is not taken."""
        if not self._taken[slot]:
            raise InvariantError(f"slot {slot} is given back twice")
        self._taken[slot] = False
        self._free.append(slot)

    def offset(self, slot: int) -> int:
        """Where a slot begins, in bytes from the start of the memory."""
        return slot * self.slot_bytes

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, to read and write."""
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def span(self, offset: int, nbytes: int) -> memoryview:
        """Bytes anywhere in the memory."""
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Let the memory go. No view of it may be left."""
        self._view.release()
        self._memory.close()
        os.close(self.fd)
