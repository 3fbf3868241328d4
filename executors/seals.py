"""What every copy of a KV block carries behind its bytes: who it is, and a checksum of them.

Damage, a torn write, another block's bytes and another model's are all told by the same comparison.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from policies.cluster.ids import BlockHash

MAGIC: Final = b"DTKV\x00\x00\x00\x01"
_FIELDS: Final = struct.Struct(">8sQQQ16s16x")
"""Magic with version, chain hash, hash of the namespace, bytes, xxh3-128 seeded with the chain hash."""
SEAL_BYTES: Final = _FIELDS.size


class Sealer:
    """`namespace` names all that makes two blocks of equal tokens differ: model, layout, dtype, tenant's salt."""

    def __init__(self, namespace: str, block_bytes: int) -> None:
        self.namespace = xxhash.xxh3_64_intdigest(namespace.encode())
        self.block_bytes = block_bytes

    @property
    def slot_bytes(self) -> int:
        """What one block takes with its seal."""
        return self.block_bytes + SEAL_BYTES

    def write(self, slot: memoryview, block: BlockHash, payload: bytes | memoryview) -> None:
        """Put a block and its seal into a slot. Raises ValueError for one of another length."""
        if len(payload) != self.block_bytes:
            raise ValueError(f"a block of {len(payload)} bytes; here they have {self.block_bytes}")
        slot[: self.block_bytes] = payload
        slot[self.block_bytes :] = self._seal(block, payload)

    def blank(self, slot: memoryview) -> None:
        """Make sure that the slot holds no block, before one is read into it: a mover may say "done" of a read that
        brought nothing, and what was there before must not be taken for it."""
        slot[self.block_bytes :] = bytes(SEAL_BYTES)

    def read(self, slot: memoryview, block: BlockHash) -> bytes | None:
        """The bytes of that block; None where the slot holds anything else."""
        payload = bytes(slot[: self.block_bytes])
        return payload if slot[self.block_bytes :] == self._seal(block, payload) else None

    def _seal(self, block: BlockHash, payload: bytes | memoryview) -> bytes:
        checksum = xxhash.xxh3_128_digest(payload, seed=block)
        return _FIELDS.pack(MAGIC, block, self.namespace, len(payload), checksum)
