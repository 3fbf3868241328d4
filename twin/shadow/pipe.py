"""Messages between a live cluster and its shadow: a pickle behind its length, four bytes big-endian.

Both ends are ours and of one version: the live side starts the other as its own child, and nobody else has the pipes.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any, Final

LENGTH: Final = struct.Struct(">I")


def pack(message: tuple[Any, ...]) -> bytes:
    """With its length."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    return pickle.loads(body)


def receive(stream: IO[bytes]) -> Any:
    """The next message, waited for; None where the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return unpack(body) if len(body) == length else None
