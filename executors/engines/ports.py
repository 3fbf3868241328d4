"""The ports of one worker, found together: either all of them are free, or it fails and names the one that is not."""

from __future__ import annotations

import contextlib
import socket

from policies.errors import EngineError
from policies.frozen import frozen

LOOPBACK = "127.0.0.1"
_KINDS = ("http", "events", "replay", "side")
_TRIES = 100
_FIRST, _LAST = 20_000, 32_000
"""Where free ones are looked for: below those that Linux gives to outgoing connections (32768 and up)."""


@frozen
class Ports:
    """One worker's, on `host`: HTTP, and for each data-parallel rank one of KV events, of their repetition, and of KV
    transfers (vLLM's NIXL side channel, SGLang's bootstrap); those of rank n lie n above the first."""

    host: str
    http: int
    events: int
    replay: int
    side: int


def span(dp: int) -> int:
    """Ports that a worker of `dp` ranks takes."""
    return 1 + (len(_KINDS) - 1) * dp


def ports_at(first: int, dp: int = 1, host: str = LOOPBACK) -> Ports:
    """Those from `first` on. Raises EngineError with the name of one that is taken."""
    ports = Ports(host=host, http=first, events=first + 1, replay=first + 1 + dp, side=first + 1 + 2 * dp)
    with contextlib.ExitStack() as held:
        for port in range(first, first + span(dp)):
            kind = _KINDS[0] if port == first else _KINDS[1 + (port - first - 1) // dp]
            held.enter_context(_bound(host, port, kind))
    return ports


def free_ports(dp: int = 1, host: str = LOOPBACK, start: int = _FIRST) -> Ports:
    """The first that are free from `start` on. Raises EngineError when there are none."""
    for first in range(start, min(start + _TRIES * span(dp), _LAST), span(dp)):
        with contextlib.suppress(EngineError):
            return ports_at(first, dp, host)
    raise EngineError(f"no {span(dp)} free ports in a row on {host} from {start} on; give port_base")


def _bound(host: str, port: int, kind: str) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        one.bind((host, port))
    except OSError as error:
        one.close()
        raise EngineError(
            f"port {port} for {kind} on {host} is taken ({error.strerror}); give another port_base"
        ) from error
    return one
