"""Token ids to text as they come: no piece ever ends within a character, or within what may become a stop string.

However the tokens are cut into deltas, the pieces joined are the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

UNREADABLE: Final = "\ufffd"
_KEPT_TOKENS: Final = 8
"""Tokens before a new one that say how it is written (with or without a space in front)."""
_HELD_TOKENS: Final = 64
"""More tokens than this never make one character: they are shown as they are."""


class Detokenizer:
    """`decode` makes text of token ids, and of bytes that are no character makes U+FFFD."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that have been given out."""
        self._held = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        self._held += len(token_ids)
        certain = text if self._held > _HELD_TOKENS else text.rstrip(UNREADABLE)
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(certain) == len(text):
            self._settle()
        return piece

    def flush(self) -> str:
        """What is left, though it ends within a character."""
        piece = self._decode(self._window)[self._shown :]
        self._settle()
        return piece

    def _settle(self) -> None:
        self._window = self._window[-_KEPT_TOKENS:]
        self._shown = len(self._decode(self._window))
        self._held = 0


class Found(NamedTuple):
    """Text up to a stop string, and which (None: none so far)."""

    text: str
    stop: str | None


class StopStrings:
    """Looks for the first of `stops` to be complete; of those that end at one place, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Found:
        """Text that can be shown: all before a stop string, or what cannot be the beginning of one."""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            self._held = ""
            return Found(text[:at], stop)
        keep = max((_beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return Found(text[: len(text) - keep], None)

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
