"""Values of a file as columns: JSON values and text to numbers, dates to ticks, lists to ids.

The clean case is a few calls over a whole column. A value that does not fit is noted with its row, under the name that
the file gives the column; it is never bent until it fits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from types import NoneType

import numpy as np
import pyarrow as pa

from traces import arrow
from traces.rows import IdLists, Ints, Numbers

NS_PER_S = 1e9
TICKS_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": NS_PER_S}
"""Ticks per second of the units that `--time-unit` takes."""

_INT64 = (-(2**63), 2**63)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|z|UTC|[+-]\d\d(?::?\d\d)?)?")
_FIRST_YEAR, _LAST_YEAR = 1970, 2261
"""Nanoseconds since 1970 fit into 64 bits within these years."""

Notes = dict[int, str]
"""What is wrong with a row, by index; the first thing found is kept."""


# ---------------------------------------------------------------- numbers


def json_numbers(values: Sequence[object], name: str, notes: Notes) -> Numbers:
    """Numbers as JSON has them; null is missing, anything but a number is noted."""
    kinds = set(map(type, values))
    if kinds <= {int, float}:
        return Numbers(_number_array(values))
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    if kinds <= {int, float, NoneType}:
        return Numbers(_number_array([0 if value is None else value for value in values]), missing)
    kept: list[object] = []
    for i, value in enumerate(values):
        fits = type(value) in (int, float)
        if not fits and value is not None:
            notes.setdefault(i, f"{name} is {_short(value)}, not a number")
            missing[i] = True
        kept.append(value if fits else 0)
    return Numbers(_number_array(kept), missing)


def text_numbers(values: Sequence[str], name: str, notes: Notes) -> Numbers:
    """Numbers as text; blank is missing, anything but a number is noted."""
    try:
        return Numbers(_number_array(list(map(int, values))))
    except ValueError:
        pass
    try:
        return Numbers(np.array(list(map(float, values)), np.float64))
    except ValueError:
        pass
    missing = np.zeros(len(values), np.bool_)
    kept: list[object] = [0] * len(values)
    for i, value in enumerate(values):
        stripped = value.strip()
        if not stripped:
            missing[i] = True
            continue
        number = _number(stripped)
        if number is None:
            notes.setdefault(i, f"{name} is {_short(stripped)}, not a number")
            missing[i] = True
        else:
            kept[i] = number
    return Numbers(_number_array(kept), missing)


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _number_array(values: Sequence[object]) -> np.ndarray[tuple[int], np.dtype[np.int64] | np.dtype[np.float64]]:
    """int64 if all are whole and fit, else float64, in which what is too large becomes infinite."""
    try:
        array = np.array(values)
        if array.dtype == np.int64 or array.dtype == np.float64:
            return array
    except OverflowError:
        pass
    return np.array([_float(value) for value in values], np.float64)


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # callers hand in numbers only
    except OverflowError:
        return np.inf if value > 0 else -np.inf  # type: ignore[operator]


# ---------------------------------------------------------------- dates


def looks_like_date(text: str) -> bool:
    """Whether a text begins like a calendar date with a time of day."""
    return re.match(r"\s*\d{4}-\d\d-\d\d[ T]\d", text) is not None


def dates(values: Sequence[str | None], name: str, notes: Notes) -> Numbers:
    """Dates with a time of day as nanoseconds since 1970 UTC.

    Up to nine decimals count, further ones are cut. A zone is taken into account, no zone is read as UTC.
    """
    missing = np.zeros(len(values), np.bool_)
    plain: list[str] = ["1970-01-01T00:00:00"] * len(values)
    shift_s = np.zeros(len(values), np.int64)
    for i, value in enumerate(values):
        if value is None or not value.strip():
            missing[i] = True
            continue
        found = _DATE.fullmatch(value.strip())
        if found is None or not _FIRST_YEAR <= int(found[1][:4]) <= _LAST_YEAR:
            missing[i] = True
            notes.setdefault(i, f"{name} is {_short(value)}, not a date as in 2024-02-03 10:00:00.25+00:00")
            continue
        day, time, fraction, zone = found.groups()
        plain[i] = f"{day}T{time}.{fraction or '0'}"
        if zone and zone[0] in "+-":
            shift_s[i] = _zone_s(zone)
    return Numbers(_nanoseconds(plain, name, notes, missing) - shift_s * 10**9, missing if missing.any() else None)


def _zone_s(zone: str) -> int:
    digits = zone[1:].replace(":", "").ljust(4, "0")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


def _nanoseconds(
    plain: list[str], name: str, notes: Notes, missing: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Ints:
    try:
        return np.array(plain, "M8[ns]").astype(np.int64)
    except ValueError:  # a date that is none, such as the 31st of February
        for i, text in enumerate(plain):
            try:
                np.datetime64(text, "ns")
            except ValueError:
                notes.setdefault(i, f"{name} is {_short(text)}, which is no date of the calendar")
                plain[i], missing[i] = "1970-01-01T00:00:00", True
        return np.array(plain, "M8[ns]").astype(np.int64)


# ---------------------------------------------------------------- ids, texts


def id_lists(values: Sequence[object], name: str, notes: Notes) -> IdLists:
    """Lists of whole 64-bit numbers; unsigned ones keep their bits (two's complement). Null and [] are unknown."""
    lists: list[list[object]] = values if set(map(type, values)) == {list} else _lists(values, name, notes)  # type: ignore[assignment]
    flat = list(chain.from_iterable(lists))
    array = _int64(flat)
    if array is None:
        lists = [_checked(ids, i, name, notes) for i, ids in enumerate(lists)]
        array = np.array([_signed(each) for each in chain.from_iterable(lists)], np.int64)
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
    return IdLists(offsets, array)


def text_id_lists(values: Sequence[str], name: str, notes: Notes) -> IdLists:
    """The same from text: a JSON list, or numbers separated by blanks or semicolons."""
    lists: list[object] = []
    for i, value in enumerate(values):
        text = value.strip()
        try:
            found = (
                json.loads(text) if text.startswith("[") else [int(part) for part in re.split(r"[\s;]+", text) if part]
            )
        except ValueError:
            notes.setdefault(i, f"{name} is {_short(text)}, not a list of whole numbers")
            found = None
        lists.append(found)
    return id_lists(lists, name, notes)


def _lists(values: Sequence[object], name: str, notes: Notes) -> list[list[object]]:
    lists: list[list[object]] = []
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, list):
            notes.setdefault(i, f"{name} is {_short(value)}, not a list")
        lists.append(value if isinstance(value, list) else [])
    return lists


def _int64(flat: list[object]) -> Ints | None:
    if set(map(type, flat)) <= {int}:
        for kind in (np.int64, np.uint64):
            try:
                return np.array(flat, kind).view(np.int64)
            except OverflowError:
                continue
    return None


def _checked(ids: list[object], i: int, name: str, notes: Notes) -> list[object]:
    for each in ids:
        if type(each) is not int or not _INT64[0] <= each < 2 * _INT64[1]:
            notes.setdefault(i, f"{name} holds {_short(each)}, not a whole 64-bit number")
            return []
    return ids


def _signed(value: object) -> int:
    assert isinstance(value, int)
    return value - 2**64 if value >= _INT64[1] else value


def texts(values: Sequence[object]) -> pa.Array:
    """Names as strings; null and blank are null, numbers are written out."""
    if set(map(type, values)) <= {str, NoneType}:
        named = [value.strip() or None if value else None for value in values]  # type: ignore[attr-defined]
    else:
        named = [None if value is None else str(value).strip() or None for value in values]
    return arrow.strings(named)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
