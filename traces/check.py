"""The rules that every row of every format must keep, and the one error or the counts that tell of rows that do not.

Rules run on whole columns, so a clean chunk costs a few vector operations; words are made only for rows at fault. No
rule repairs a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from traces.errors import TraceError
from traces.options import ReadOptions
from traces.rows import Flags, Ints, NumberArray, Numbers, Rows
from traces.schema import (
    ARRIVAL,
    DELAY,
    HASH_IDS,
    ISL,
    MAX_TOKENS,
    OSL,
    PRIORITY,
    SESSION_ID,
    SPAN_LIMIT_S,
    TOKENS_LIMIT,
)

_SHOWN = 8
"""Rows at fault that an error spells out; further ones are counted."""

_SKIP_HINT = "leave such rows out and count them with --on-bad-row skip"
_HINTS: Mapping[str, str] = {
    "osl missing": "give rows without an output length one with --default-osl N",
    "arrival_s goes back": "put the rows in order with --sort",
    "arrival_s too far": "check the time unit (--time-unit s, ms, us or ns)",
    "hash_ids too short": "check the tokens per id (--hash-block-tokens N)",
}


class Fault(NamedTuple):
    """Rows (by index) that break one rule: a reason in few words to count under, and what to say of one of them."""

    reason: str
    rows: Ints
    say: Callable[[int], str]


class Clock(NamedTuple):
    """How to read arrival ticks: their number per second, and whether they are nanoseconds of the calendar."""

    ticks_per_s: float
    dated: bool = False

    def show(self, ticks: float | int) -> str:
        """The tick as the file has it."""
        return str(np.datetime64(int(ticks), "ns")) if self.dated else plain(ticks)


class Tally(NamedTuple):
    """What one reading of a trace left out (`skipped`) and what it kept but is worth a word (`remarks`): counts."""

    skipped: dict[str, int]
    remarks: dict[str, int]

    def skip(self, reason: str, by: int = 1) -> None:
        """Count rows left out."""
        if by:
            self.skipped[reason] = self.skipped.get(reason, 0) + by

    def remark(self, what: str, by: int = 1) -> None:
        """Count rows kept."""
        if by:
            self.remarks[what] = self.remarks.get(what, 0) + by


@dataclass(slots=True)
class _Turns:
    """What was found about rows with sessions, by index; `back` gives the latest arrival before the row."""

    far: list[int] = field(default_factory=list)
    back: dict[int, float | int] = field(default_factory=dict)
    orphans: list[int] = field(default_factory=list)
    undelayed: list[int] = field(default_factory=list)
    untimed: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)


class RowChecker:
    """Checks the rows of one reading of one file, chunk by chunk, in file order.

    `fields` gives the file's own name of a canonical column. With `ordered` false, arrivals may go back.
    """

    def __init__(
        self,
        path: Path,
        options: ReadOptions,
        tally: Tally,
        *,
        fields: Mapping[str, str],
        clock: Clock,
        hash_block_tokens: int | None,
        ordered: bool,
    ) -> None:
        self._path = path
        self._options = options
        self._tally = tally
        self._fields = fields
        self._clock = clock
        self._block = hash_block_tokens
        self._ordered = ordered
        self._first: float | int | None = None
        self._latest: float | int | None = None
        self._sessions: set[str] = set()

    def check(self, rows: Rows) -> Rows:
        """The good rows. Raises TraceError for bad ones, unless they are to be skipped."""
        for reason, count in rows.left_out.items():
            self._tally.skip(reason, count)
        for what, count in rows.remarks.items():
            self._tally.remark(what, count)
        self._fill_osl(rows)
        rows = self._leave_out_zero_output(rows)
        faults = self._row_faults(rows)
        bad = _flags(rows.count, faults)
        faults += self._turn_faults(rows, bad) if _has_turns(rows) else self._order_faults(rows, bad)
        if faults and self._options.on_bad_row == "error":
            raise self._error(rows, faults)
        if faults:
            reasons = _reasons(faults)
            for reason in reasons.values():
                self._tally.skip(reason)
            rows = rows.take(np.flatnonzero(~_flags(rows.count, faults)))
        self._remember_sessions(rows)
        return rows

    # ---------------------------------------------------------------- before the rules

    def _fill_osl(self, rows: Rows) -> None:
        osl, default = rows.numbers[OSL], self._options.default_osl
        if osl.missing is None or default is None:
            return
        filled = osl.missing.copy()
        filled[list(rows.unreadable)] = False
        osl.values = np.where(filled, default, osl.values)
        osl.missing = osl.missing & ~filled
        self._tally.remark("osl taken from the default", int(filled.sum()))

    def _leave_out_zero_output(self, rows: Rows) -> Rows:
        osl = rows.numbers[OSL]
        zero = (osl.values == 0) & osl.present()
        zero[list(rows.unreadable)] = False
        if self._options.keep_zero_output or not zero.any():
            return rows
        self._tally.skip("no output tokens", int(zero.sum()))
        kept = np.flatnonzero(~zero)
        moved = {int(np.searchsorted(kept, i)): said for i, said in rows.unreadable.items()}
        rows = rows.take(kept)
        rows.unreadable = moved
        return rows

    # ---------------------------------------------------------------- rules

    def _row_faults(self, rows: Rows) -> list[Fault]:
        faults: list[Fault] = []
        if rows.unreadable:
            said = rows.unreadable
            faults.append(Fault("unreadable", np.array(sorted(said), np.int64), lambda i: said[i]))
        numbers, name = rows.numbers, self._name
        untimed = SESSION_ID in rows.texts
        faults += number_faults(ARRIVAL, name(ARRIVAL), numbers[ARRIVAL], low=0, optional=untimed)
        faults += token_faults(ISL, name(ISL), numbers[ISL], low=1)
        faults += token_faults(OSL, name(OSL), numbers[OSL], low=0)
        for column, low in ((MAX_TOKENS, 1), (PRIORITY, -TOKENS_LIMIT - 1)):
            if column in numbers:
                faults += token_faults(column, name(column), numbers[column], low=low, optional=True)
        if DELAY in numbers:
            faults += number_faults(DELAY, name(DELAY), numbers[DELAY], low=0, high=SPAN_LIMIT_S, optional=True)
        if rows.ids is not None and len(rows.ids.values):
            faults += self._id_faults(rows, rows.ids.lengths())
        return faults

    def _id_faults(self, rows: Rows, lengths: Ints) -> list[Fault]:
        if self._block is None:
            raise TraceError(
                f"{self._path}: there are hash ids, but nothing says how many tokens one stands for; "
                "give it with --hash-block-tokens N"
            )
        block, isl, ids_name, isl_name = self._block, rows.numbers[ISL].values, self._name(HASH_IDS), self._name(ISL)
        short = np.flatnonzero((lengths > 0) & (lengths * block < isl))

        def say(i: int) -> str:
            covered = f"{lengths[i]} {ids_name} of {block} tokens cover {lengths[i] * block} tokens"
            return f"{covered}, and {isl_name} is {plain(isl[i])}"

        return [Fault("hash_ids too short", short, say)] if len(short) else []

    def _order_faults(self, rows: Rows, bad: Flags) -> list[Fault]:
        """Arrivals that go back, or lie too far from the first, where every row has an arrival of its own."""
        arrival = rows.numbers[ARRIVAL]
        index = np.flatnonzero(arrival.present() & ~bad)
        if not len(index):
            return []
        ticks = arrival.values[index]
        if self._first is None:
            self._first = ticks[0]
        far = np.abs(ticks - self._first) > SPAN_LIMIT_S * self._clock.ticks_per_s
        faults = [self._too_far(arrival.values, index[far])] if far.any() else []
        index, ticks = index[~far], ticks[~far]
        if self._ordered and len(index):
            before = np.maximum.accumulate(ticks)
            if self._latest is not None:
                before = np.maximum(before, self._latest)
            self._latest = before[-1]
            back = ticks < before
            if back.any():
                latest = dict(zip(index[back].tolist(), before[back], strict=True))
                faults.append(self._goes_back(arrival.values, latest))
        return faults

    def _turn_faults(self, rows: Rows, bad: Flags) -> list[Fault]:
        """The same with turns of sessions among the rows, one row after the other: whether a row may lack an arrival
        hangs on the rows before it. A delay replaces the arrival of a later turn and means nothing on a first one."""
        arrival, delay = rows.numbers[ARRIVAL], rows.numbers.get(DELAY)
        timed, ticks = arrival.present().tolist(), arrival.values.tolist()
        delayed = [False] * rows.count if delay is None else delay.present().tolist()
        turns = _Turns()
        for i, name in enumerate(rows.texts[SESSION_ID].to_pylist()):
            if bad[i]:
                continue
            later = name is not None and name in self._sessions
            if later and delayed[i]:
                if timed[i]:
                    turns.untimed.append(i)
            elif not timed[i]:
                (turns.undelayed if later else turns.orphans).append(i)
            elif self._in_order(ticks[i], i, turns):
                if delayed[i]:
                    turns.firsts.append(i)
                if name is not None:
                    self._sessions.add(name)
        self._clear(arrival, turns.untimed, "recorded arrivals of later turns give way to their delays")
        if delay is not None:
            self._clear(delay, turns.firsts, "delays of first turns have nothing to follow")
        return self._say_turns(arrival.values, turns)

    def _in_order(self, tick: float | int, i: int, turns: _Turns) -> bool:
        if self._first is None:
            self._first = tick
        if abs(tick - self._first) > SPAN_LIMIT_S * self._clock.ticks_per_s:
            turns.far.append(i)
            return False
        if self._ordered and self._latest is not None and tick < self._latest:
            turns.back[i] = self._latest
            return False
        self._latest = tick
        return True

    def _say_turns(self, ticks: NumberArray, turns: _Turns) -> list[Fault]:
        arrival, delay = self._name(ARRIVAL), self._name(DELAY)
        faults = []
        if turns.far:
            faults.append(self._too_far(ticks, np.array(turns.far)))
        if turns.back:
            faults.append(self._goes_back(ticks, turns.back))
        if turns.orphans:
            faults.append(Fault("arrival_s missing", np.array(turns.orphans), lambda _: f"{arrival} is missing"))
        if turns.undelayed:
            said = f"{arrival} and {delay} are missing, a later turn needs one of them"
            faults.append(Fault("delay_s missing", np.array(turns.undelayed), lambda _: said))
        return faults

    def _clear(self, column: Numbers, index: list[int], remark: str) -> None:
        if index:
            column.missing = ~column.present()
            column.missing[index] = True
            self._tally.remark(remark, len(index))

    def _too_far(self, ticks: NumberArray, index: Ints) -> Fault:
        name, show, first = self._name(ARRIVAL), self._clock.show, self._first or 0
        limit = f"more than {SPAN_LIMIT_S:.0f} s away from the first, {show(first)}"
        return Fault("arrival_s too far", index, lambda i: f"{name} is {show(ticks[i])}, {limit}")

    def _goes_back(self, ticks: NumberArray, latest: Mapping[int, float | int]) -> Fault:
        name, show = self._name(ARRIVAL), self._clock.show
        index = np.array(list(latest))
        return Fault(
            "arrival_s goes back", index, lambda i: f"{name} goes back from {show(latest[i])} to {show(ticks[i])}"
        )

    # ---------------------------------------------------------------- bookkeeping

    def _remember_sessions(self, rows: Rows) -> None:
        sessions = rows.texts.get(SESSION_ID)
        if sessions is not None and sessions.null_count < rows.count:
            self._sessions.update(name for name in sessions.to_pylist() if name is not None)

    def _name(self, column: str) -> str:
        return self._fields.get(column, column)

    def _error(self, rows: Rows, faults: Sequence[Fault]) -> TraceError:
        """One error for all rows at fault in this chunk: the first few in words, then how many more."""
        reasons = _reasons(faults)
        index = sorted(reasons)
        places = tuple(rows.place(i) for i in index)
        said = [next(fault.say(i) for fault in faults if i in fault.rows) for i in index[:_SHOWN]]
        text = f"{self._path}:{places[0]}: {said[0]}"
        if len(said) > 1:
            text += "; also " + ", ".join(f"{p} ({s})" for p, s in zip(places[1:], said[1:], strict=False))
        if len(places) > len(said):
            text += f" and {len(places) - len(said)} more"
        hints = [hint for reason, hint in _HINTS.items() if reason in reasons.values()]
        return TraceError(f"{text}; correct the file, or {', or '.join([*hints, _SKIP_HINT])}", rows=places)


def number_faults(
    column: str, name: str, numbers: Numbers, *, low: float, high: float | None = None, optional: bool = False
) -> list[Fault]:
    """Values that are missing, not finite, or outside `low` to `high`. `name` is what the file calls the column."""
    values, present = numbers.values, numbers.present()
    faults = []

    def note(reason: str, flags: Flags, say: Callable[[int], str]) -> None:
        index = np.flatnonzero(flags)
        if len(index):
            faults.append(Fault(f"{column} {reason}", index, say))

    if not optional:
        note("missing", ~present, lambda _: f"{name} is missing")
    if values.dtype.kind == "f":
        note("not finite", present & ~np.isfinite(values), lambda i: f"{name} is {values[i]}, not a finite number")
    note(
        f"below {low:g}",
        present & (values < low),
        lambda i: f"{name} is {plain(values[i])}, at least {low:g} is needed",
    )
    if high is not None:
        above = present & (values > high) & (values < np.inf)
        note("too large", above, lambda i: f"{name} is {plain(values[i])}, the limit is {high:.0f}")
    return faults


def token_faults(column: str, name: str, numbers: Numbers, *, low: int, optional: bool = False) -> list[Fault]:
    """Values that are no whole number from `low` to the token limit."""
    faults = number_faults(column, name, numbers, low=low, high=TOKENS_LIMIT, optional=optional)
    values = numbers.values
    if values.dtype.kind == "f":
        index = np.flatnonzero(numbers.present() & np.isfinite(values) & (values != np.floor(values)))
        if len(index):
            said = Fault(f"{column} not whole", index, lambda i: f"{name} is {plain(values[i])}, not a whole number")
            faults.insert(0, said)
    return faults


def plain(value: float | int) -> str:
    """A number as a person writes it: no exponent and no `.0` where it is whole."""
    number = float(value)
    if isinstance(value, int | np.integer):
        return str(int(value))
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _has_turns(rows: Rows) -> bool:
    """Whether any row lacks an arrival or has a delay, so that sessions matter."""
    delay = rows.numbers.get(DELAY)
    if SESSION_ID not in rows.texts:
        return False
    return not rows.numbers[ARRIVAL].present().all() or (delay is not None and bool(delay.present().any()))


def _flags(count: int, faults: Sequence[Fault]) -> Flags:
    flags = np.zeros(count, np.bool_)
    for fault in faults:
        flags[fault.rows] = True
    return flags


def _reasons(faults: Sequence[Fault]) -> dict[int, str]:
    """Per row at fault the first rule that it breaks."""
    reasons: dict[int, str] = {}
    for fault in faults:
        for i in fault.rows.tolist():
            reasons.setdefault(i, fault.reason)
    return reasons
