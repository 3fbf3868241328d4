"""What a table of the configuration is made of: fields with a default, a meaning and limits, and how to list them.

A table is a frozen dataclass whose fields are made by `key`. Nothing here knows which tables there are.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, NamedTuple

LARGEST = 2**31 - 1  # the largest count and length in the trace schema (int32)
LARGEST_SEED = 2**63 - 1
LONGEST_S = 10**9  # the longest time that can be given, 31 years


class Limits(NamedTuple):
    """What a key means and may be; `absent` says what leaving it out means."""

    meaning: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    absent: str = ""
    plugins: str = ""  # an entry-point group whose names are choices as well


NAMES = "tuple[str, ...]"
"""The kind of a key that is a list of names."""


class Entry(NamedTuple):
    """One key of a table; `kind` is int, float, bool, str, Path or NAMES."""

    name: str
    limits: Limits
    default: Any
    kind: str


def keys_of(table: type) -> tuple[Entry, ...]:
    """The keys of a dataclass of the schema, in order; fields that hold a table are left out."""
    found = _KEYS.get(table)
    if found is None:
        found = _KEYS[table] = tuple(
            Entry(f.name, f.metadata["limits"], f.default, str(f.type).removesuffix(" | None"))
            for f in fields(table)
            if "limits" in f.metadata
        )
    return found


_KEYS: dict[type, tuple[Entry, ...]] = {}


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """A field of a table: its default, and its `Limits`."""
    return field(default=default, metadata={"limits": Limits(meaning, **limits)})
