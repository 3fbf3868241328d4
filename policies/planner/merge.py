"""Several proposals about one role, made into one.

SET says how many, AT_LEAST and AT_MOST bound it, REJECT ends the tick. Of several SET that of the smallest rank counts;
smaller rank wins everywhere. AT_MOST beats AT_LEAST.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from policies.frozen import frozen


class Kind(Enum):
    """What a proposal does."""

    SET = "set"
    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    REJECT = "reject"


@frozen
class Proposal:
    """By whom, of which rank; `workers` means nothing with REJECT."""

    kind: Kind
    workers: int = 0
    by: str = ""
    rank: int = 0


def merged(proposals: Sequence[Proposal], current: int) -> int | None:
    """How many workers the proposals come to; `current` where none says SET; None where one of them rejects."""
    if any(p.kind is Kind.REJECT for p in proposals):
        return None
    said = min((p for p in proposals if p.kind is Kind.SET), key=lambda p: p.rank, default=None)
    result = current if said is None else said.workers
    result = max([result, *(p.workers for p in proposals if p.kind is Kind.AT_LEAST)])
    return min([result, *(p.workers for p in proposals if p.kind is Kind.AT_MOST)])


class TimeBudget:
    """Leaves a plug-in alone for a while that was too slow three times in a row. Times are told, never measured here.

    `most_s` is what one answer may take, `rest_s` how long it is left alone.
    """

    def __init__(self, most_s: float = 1.0, strikes: int = 3, rest_s: float = 60.0) -> None:
        self._most_s, self._strikes, self._rest_s = most_s, strikes, rest_s
        self._slow: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def asks(self, name: str, now_s: float) -> bool:
        """Whether this plug-in is asked now."""
        return now_s >= self._until_s.get(name, float("-inf"))

    def took(self, name: str, seconds: float, now_s: float) -> None:
        """It has answered, after so long."""
        self._slow[name] = self._slow.get(name, 0) + 1 if seconds > self._most_s else 0
        if self._slow[name] >= self._strikes:
            self._slow[name] = 0
            self._until_s[name] = now_s + self._rest_s
