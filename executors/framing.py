"""Messages between us and a helper process: JSON behind its length, four bytes big-endian.

Standard library only: the helper runs in environments that have nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from policies.errors import EngineError

Message: TypeAlias = dict[str, Any]

LONGEST_BYTES: Final = 4 << 20
"""A transfer of 10,000 blocks is described in half a megabyte."""
_LENGTH: Final = struct.Struct(">I")


def pack(message: Mapping[str, object]) -> bytes:
    """The message with its length. Raises EngineError for one that nobody would read."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > LONGEST_BYTES:
        raise EngineError(f"a message of {len(text)} bytes; the limit is {LONGEST_BYTES}: move fewer blocks at once")
    return _LENGTH.pack(len(text)) + text


class Unpacker:
    """Messages out of bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises EngineError for bytes that are none."""
        self._bytes += more
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            _check(length)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            text = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield _parse(text)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None where the other side is gone. Raises EngineError for bytes that are none."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        _check(length)
        return _parse(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _check(length: int) -> None:
    if length > LONGEST_BYTES:
        raise EngineError(f"a message of {length} bytes is announced; the limit is {LONGEST_BYTES}: not one of ours")


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise EngineError(f"a message that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise EngineError(f"a message that is no table: {type(message).__name__}")
    return message
