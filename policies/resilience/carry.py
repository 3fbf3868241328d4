"""What a client keeps while its answer moves from worker to worker: one stream, one account.

    carry        the next attempt's prompt, budget and sampling state, from what has been delivered
    stop_tail    the end of the text so far that may be the beginning of a stop string
    Stream       tokens in order, none twice; what a dead attempt says late is dropped and counted

Nothing here decides whether a request goes on; it never invents a token, and never charges the client for one twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.errors import InvariantError
from policies.frozen import frozen


@frozen
class Carried:
    """The next attempt of a request: `isl` prompt tokens, of which the last `emitted_tokens` are the client's answer so
    far; `max_tokens` is what is left of its budget. The same number of tokens has been drawn from a seeded sampler
    (`seed_offset`), and counts for penalties and for a draft model's state (`history_tokens`).
    """

    isl: int
    emitted_tokens: int
    max_tokens: int | None
    seed_offset: int
    history_tokens: int


@frozen
class Usage:
    """What the client is charged for: its own prompt, and every token that it was given, however often it was sent."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def carry(prompt_tokens: int, max_tokens: int | None, emitted_tokens: int) -> Carried:
    """What goes to the next worker. `prompt_tokens` and `max_tokens` are the client's own, from the first attempt."""
    return Carried(
        isl=prompt_tokens + emitted_tokens,
        emitted_tokens=emitted_tokens,
        max_tokens=None if max_tokens is None else max_tokens - emitted_tokens,
        seed_offset=emitted_tokens,
        history_tokens=emitted_tokens,
    )


def stop_tail(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that begins one of `stops` without being all of it; it was held back from the client.

    The next worker must look for the rest of it: a stop string may lie across the join.
    """
    longest = max((len(stop) for stop in stops), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return tail
    return ""


class Stream:
    """The tokens of one answer, whichever attempt they come from. Counts what is dropped (`late_tokens`)."""

    __slots__ = ("_attempt", "_base", "delivered", "late_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.delivered = 0
        self.late_tokens = 0
        self._attempt = 0
        self._base = 0

    def begin(self, attempt: int) -> None:
        """From now on tokens of this attempt count, which starts behind what has been delivered."""
        if attempt <= self._attempt:
            raise InvariantError(f"attempt {attempt} begins after attempt {self._attempt}; attempts only go up")
        self._attempt = attempt
        self._base = self.delivered

    def take(self, attempt: int, first: int, count: int) -> int:
        """Tokens `first` .. `first + count - 1` of an attempt have come; returns how many of them the client gets.

        Those of an earlier attempt, and those that it has, are dropped. A hole raises InvariantError: nothing may be
        skipped in an answer.
        """
        if attempt != self._attempt:
            self.late_tokens += count
            return 0
        start = self._base + first
        if start > self.delivered:
            raise InvariantError(f"token {start} came and {self.delivered} have been delivered: {start} leaves a hole")
        new = max(start + count - self.delivered, 0)
        self.late_tokens += count - new
        self.delivered += new
        return new

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.delivered)
