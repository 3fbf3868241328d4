"""Counts rows that repeat an earlier one exactly. Such rows are reported, never dropped: only people know whether two
equal requests were one."""

from __future__ import annotations

import numpy as np

from traces.arrow import valid_flags
from traces.rows import Ints, Rows
from traces.schema import ARRIVAL, ISL, OSL, REQUEST_ID, SESSION_ID

_CARRIED = 4096
"""Rows of the latest arrival that are remembered from each chunk (and 16 times as many in all)."""

_Content = tuple[int, int, bytes]


class DuplicateCounter:
    """Rows without request and session id whose arrival, lengths and hash ids equal those of an earlier row.

    Rows come in order of arrival, so only rows of one arrival are compared.
    """

    def __init__(self) -> None:
        self._arrival: float | int | None = None
        self._carried: set[_Content] = set()

    def count(self, rows: Rows) -> int:
        """How many of these rows repeat one that came before."""
        arrival = rows.numbers[ARRIVAL]
        eligible = arrival.present()
        for name in (REQUEST_ID, SESSION_ID):
            if name in rows.texts and rows.texts[name].null_count < rows.count:
                eligible &= ~valid_flags(rows.texts[name])
        index = np.flatnonzero(eligible)
        if not len(index):
            return 0
        ticks = arrival.values[index]
        if self._arrival is not None and ticks[0] != self._arrival:
            self._carried.clear()
        found = self._repeats(rows, index)
        self._carry(rows, index, ticks)
        return found

    def _repeats(self, rows: Rows, index: Ints) -> int:
        ticks = rows.numbers[ARRIVAL].values[index]
        isl, osl = rows.numbers[ISL].values[index], rows.numbers[OSL].values[index]
        order = np.lexsort((osl, isl, ticks))
        same = np.ones(max(len(index) - 1, 0), np.bool_)
        for column in (ticks, isl, osl):
            same &= np.diff(column[order]) == 0
        alike = np.zeros(len(index), np.bool_)
        alike[order[1:]] = same
        alike[order[:-1]] |= same
        if self._carried:
            alike |= ticks == ticks[0]
        seen = {(self._arrival, *content) for content in self._carried}
        found = 0
        for at in np.flatnonzero(alike).tolist():
            key = (ticks[at], *_content(rows, int(index[at])))
            found += key in seen
            seen.add(key)
        return found

    def _carry(self, rows: Rows, index: Ints, ticks: Ints) -> None:
        self._arrival = ticks[-1]
        if ticks[0] != ticks[-1]:
            self._carried.clear()
        if len(self._carried) > 16 * _CARRIED:
            return
        first = int(np.searchsorted(ticks, ticks[-1]))
        self._carried.update(_content(rows, i) for i in index[max(first, len(index) - _CARRIED) :].tolist())


def _content(rows: Rows, i: int) -> _Content:
    ids = rows.ids
    listed = b"" if ids is None else ids.values[ids.offsets[i] : ids.offsets[i + 1]].tobytes()
    return int(rows.numbers[ISL].values[i]), int(rows.numbers[OSL].values[i]), listed
