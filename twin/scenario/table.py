"""One table of a scenario file: typed reads, and one clear refusal for what is wrong with a key.

Every refusal names where, key, value and what it may be. Nothing here knows kinds of faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from policies.errors import ConfigError
from twin.config_schema import LONGEST_S
from twin.config_values import nearest
from twin.scenario.model import ANY


class Table:
    """One table of the file; every refusal names where, key, value and what it may be."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = dict(values)
        self.where = where

    def refuse(self, key: str, why: str) -> NoReturn:
        shown = f"{key} = {self.values[key]!r}" if key in self.values else key
        raise ConfigError(f"{self.where}: {shown}: {why}; see docs/faults.md")

    def only(self, known: tuple[str, ...], of: str = "") -> None:
        for key in self.values:
            if key not in known:
                near = nearest(key, known) or f"; known are {', '.join(known)}"
                raise ConfigError(f"{self.where}: there is no key {key}{f' {of}' if of else ''}{near}")

    def number(
        self, key: str, *, low: float | None = None, above: float | None = None, high: float | None = None
    ) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, "must be a number")
        if low is not None and value < low:
            self.refuse(key, f"must be {low} or more")
        if above is not None and value <= above:
            self.refuse(key, f"must be more than {above}")
        if high is not None and value > high:
            self.refuse(key, f"must be {high:g} or less")
        return float(value)

    def whole(self, key: str, *, low: int) -> int | None:
        if self.number(key, low=low) is None:
            return None
        value = self.values[key]
        if not isinstance(value, int):
            self.refuse(key, "must be a whole number")
        return value

    def seconds(self, key: str, *, low: float = 0, above: float | None = None) -> float | None:
        """A key in milliseconds, as seconds."""
        value = self.number(key, low=low, above=above, high=LONGEST_S * 1e3)
        return None if value is None else value / 1e3

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self.refuse(key, "must be text")
        if choices and value not in choices:
            self.refuse(key, f"must be {' or '.join(choices)}{nearest(value, choices)}")
        return value

    def names(self, key: str) -> tuple[str, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not _is_names(value):
            self.refuse(key, "must be a list of names")
        if len(set(value)) != len(value) or ANY in value:
            self.refuse(key, f"each name must be there once, and none may be {ANY!r}")
        return tuple(value)

    def limits(self, key: str) -> dict[str, float | None]:
        """Numbers by name, null where there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "must be a table of numbers by name")
        inner = Table(value, f"{self.where}: {key}")
        return {str(name): inner.number(str(name)) for name in value}

    def two_sets(self, key: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Two sets of names, each a name or a list of them."""
        value = self.values.get(key)
        if value is None:
            return None
        sets = [[one] if isinstance(one, str) else one for one in value] if isinstance(value, list) else []
        if len(sets) != 2 or not all(_is_names(one) for one in sets):
            self.refuse(key, "must be two sets of workers, each a name, a role, or a list of these")
        some, rest = (tuple(one) for one in sets)
        if set(some) & set(rest):
            self.refuse(key, f"{', '.join(sorted(set(some) & set(rest)))} is on both sides")
        return some, rest

    def tables(self, key: str) -> list[Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            self.refuse(key, "must be a list of tables")
        return [Table(entry, f"{self.where}: {key}[{at}]") for at, entry in enumerate(value)]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) and name for name in value)
