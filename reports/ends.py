"""Who ended without completing, and why: requests by status and reason, with their share and what they were like.

Reasons that differ only in their numbers count under the first of them, so that ten thousand rejections do not make ten
thousand lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from reports.columns import F64, I64, Columns, distinct
from reports.record import STATUSES
from reports.report import EndFigures

_CODED: Final = re.compile(r"([a-z]+(?:_[a-z]+)+): ")
ENGINE_CODE: Final = "engine"
"""What a worker's engine refuses has no code of a policy."""


def end_figures(requests: Columns, status: I64) -> tuple[EndFigures, ...]:
    """One entry per status and kind of reason, the most frequent first; `status` as places in STATUSES."""
    codes, labels = requests.codes("reason")
    if labels in ([], [None]):
        return ()
    kinds, firsts = _kinds(labels)
    kind = np.array(kinds, dtype=np.int64)[codes]
    isl, arrival, again = (requests.floats(name) for name in ("isl", "arrival_s", "retry_after_s"))
    ends = []
    for pair in distinct(kind * len(STATUSES) + status).tolist():
        place, at = divmod(pair, len(STATUSES))
        reason = firsts[place]
        if reason is None:
            continue
        rows = np.flatnonzero((kind == place) & (status == at))
        when = arrival[rows][~np.isnan(arrival[rows])]
        ends.append(
            EndFigures(
                status=STATUSES[at],
                code=_code(reason, STATUSES[at]),
                reason=reason,
                requests=len(rows),
                share=len(rows) / requests.rows,
                prompt_tokens_mean=float(isl[rows].mean()),
                first_s=float(when.min()) if len(when) else None,
                last_s=float(when.max()) if len(when) else None,
                retry_after_mean_s=_mean(again[rows]),
            )
        )
    return tuple(sorted(ends, key=lambda end: (-end.requests, end.status, end.reason)))


def _mean(values: F64) -> float | None:
    """The mean of those that are there; None where none is."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


def _kinds(labels: Sequence[str | None]) -> tuple[list[int], list[str | None]]:
    """The kind of each label, and per kind its first label, marked where there are others like it."""
    places: dict[str | None, int] = {}
    kinds: list[int] = []
    firsts: list[str | None] = []
    several: set[int] = set()
    for label in labels:
        key = None if label is None else re.sub(r"\d+", "#", label)
        place = places.setdefault(key, len(firsts))
        if place == len(firsts):
            firsts.append(label)
        else:
            several.add(place)
        kinds.append(place)
    return kinds, [f"{first} (and like it)" if at in several else first for at, first in enumerate(firsts)]


def _code(reason: str, status: str) -> str | None:
    found = _CODED.match(reason)
    if found:
        return found.group(1)
    return ENGINE_CODE if status == "rejected" else None
