"""What proves that a message between routers comes from one that has the same key, now, and is meant for us.

A sealed message is `mark | origin | to | count | HMAC-SHA-256 | text`: numbers of 8 bytes, big-endian, and a code of
all the rest. `to` is the number of the router that it is for, new in every life of a process, so what was recorded
before a restart is worth nothing after it; `count` rises with every message of an origin, so nothing is taken twice.
Who does not know the other's number yet writes 0, and may only ask who it is. It says who speaks, and hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
import struct
from pathlib import Path
from typing import Final, NamedTuple

from policies.errors import ConfigError

MARK: Final = b"dynatwin-sealed-1"
LEAST_BYTES: Final = 16
"""Of a key: fewer could be found by trying."""
_HEAD: Final = struct.Struct(">QQQ")
_CODE_BYTES: Final = hashlib.sha256().digest_size


class Refused(ValueError):
    """A message that nobody with our key has sealed for us, or one that was here before."""


class Opened(NamedTuple):
    """`text` of a message of router `origin` (None: it is not sealed); `to_us`: its sender knows who we are."""

    text: bytes
    origin: int | None
    to_us: bool


def read_key(file: Path) -> bytes:
    """The shared secret of a file, without white space around it. Raises ConfigError where there is none, it is short,
    or others may read it."""
    try:
        key, mode = file.read_bytes().strip(), file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--peer-key {file}: cannot be read: {error.strerror or error}") from None
    if len(key) < LEAST_BYTES:
        raise ConfigError(
            f"--peer-key {file}: {len(key)} bytes, and a key needs {LEAST_BYTES} or more; make one with: "
            "openssl rand -hex 32"
        )
    if mode & stat.S_IROTH:
        raise ConfigError(f"--peer-key {file}: everybody on this host may read it; chmod o-r {file}")
    return key


class Seal:
    """Of router `origin`; without a key nothing is sealed, and nothing that is sealed is taken."""

    def __init__(self, key: bytes | None, origin: int) -> None:
        self._key = key
        self._origin = origin
        self._count = 0
        self._last: dict[int, int] = {}
        """The highest count that was taken, by origin."""

    @property
    def is_on(self) -> bool:
        return self._key is not None

    def close(self, text: bytes, to: int | None) -> bytes:
        """A message for router `to` (None: its number is not known)."""
        if self._key is None:
            return text
        self._count += 1
        head = MARK + _HEAD.pack(self._origin, to or 0, self._count)
        return head + _code(self._key, head, text) + text

    def open(self, message: bytes) -> Opened:
        """What `close` closed. Raises Refused."""
        sealed = message.startswith(MARK)
        if self._key is None:
            if sealed:
                raise Refused("it is sealed, and there is no --peer-key here")
            return Opened(message, None, True)
        body = len(MARK) + _HEAD.size
        if not sealed or len(message) < body + _CODE_BYTES:
            raise Refused("it is not sealed; give every frontend the same --peer-key")
        head, code, text = message[:body], message[body : body + _CODE_BYTES], message[body + _CODE_BYTES :]
        if not hmac.compare_digest(code, _code(self._key, head, text)):
            raise Refused("it was sealed with another key, or changed on its way")
        origin, to, count = _HEAD.unpack_from(head, len(MARK))
        if to not in (0, self._origin):
            raise Refused("it is for another router, or for one that was here before")
        if count <= self._last.get(origin, 0):
            raise Refused("it was here before")
        self._last[origin] = count
        return Opened(text, origin, to == self._origin)


def _code(key: bytes, head: bytes, text: bytes) -> bytes:
    return hmac.digest(key, head + text, "sha256")
