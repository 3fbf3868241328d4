"""How events of a run become the bytes of an API: what all writers have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from executors.engines.protocol import Logprob
from executors.frontend.errors import ApiError
from executors.frontend.run import Done, Run, Text
from policies.frozen import frozen

DONE: Final = b"data: [DONE]\n\n"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@frozen
class Result:
    """One whole answer."""

    text: str
    logprobs: tuple[Logprob, ...]
    done: Done


class Writer:
    """Makes chunks of a stream, or one body. One writer serves one run."""

    prefix: ClassVar[str]
    """Of the ids that clients see."""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.id = f"{self.prefix}{run.id}"

    def start(self) -> bytes:
        """Before the first event."""
        return b""

    def text(self, event: Text) -> bytes:
        raise NotImplementedError

    def done(self, event: Done) -> bytes:
        """`run.open` is what is open after it."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Behind the last event."""
        raise NotImplementedError

    def error(self, error: ApiError) -> bytes:
        """Instead of what is left; the stream ends with it."""
        raise NotImplementedError

    def body(self, results: Sequence[Result]) -> Mapping[str, object]:
        raise NotImplementedError


def dump(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def frame(value: object) -> bytes:
    """One SSE event without a name."""
    return b"data: " + dump(value) + b"\n\n"


def named(event: Mapping[str, object]) -> bytes:
    """One SSE event with the name of its type."""
    return f"event: {event['type']}\n".encode() + frame(event)


def comment(name: str, value: object) -> bytes:
    """What a stock client passes over."""
    return f": {name} ".encode() + dump(value) + b"\n\n"
