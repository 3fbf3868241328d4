"""Reads the TOML tables of this room and users' files of the same shape. Checks types and names; never fills a gap.

Errors name the file, the entry, the key, the value and what is allowed there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.errors import ConfigError
from twin.perf.names import unknown

Table = Mapping[str, object]

DATA = Path(__file__).parent / "data"


def shipped(name: str) -> dict[str, object]:
    """One of the tables in `twin/perf/data`."""
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def from_file(path: Path) -> dict[str, object]:
    """A user's TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One table of a file, with the place it came from, for errors."""

    where: str
    values: Table

    @classmethod
    def of(cls, where: str, value: object, known: Iterable[str]) -> Entry:
        """`value` as a table whose keys are all among `known`."""
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a table, found {value!r}")
        known = set(known)
        for key in value:
            if key not in known:
                raise unknown(f"{where}: key", str(key), known)
        return cls(where, value)

    def _value(self, key: str) -> object:
        if key not in self.values:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self.values[key]

    def number(self, key: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        """A finite number >= `at_least`; `default` if absent (None: it must be there)."""
        if default is not None and key not in self.values:
            return default
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a finite number")
        if value < at_least:
            raise ConfigError(f"{self.where}: {key} = {value!r} is less than {at_least:g}")
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number > 0."""
        value = self.number(key)
        if value == 0.0:
            raise ConfigError(f"{self.where}: {key} must be more than 0")
        return value

    def optional(self, key: str) -> float | None:
        """A positive number, or None if absent."""
        return self.positive(key) if key in self.values else None

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number >= `at_least`; `default` if absent (None: it must be there)."""
        if default is not None and key not in self.values:
            return default
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a whole number")
        if value < at_least:
            raise ConfigError(f"{self.where}: {key} = {value} is less than {at_least}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` if absent (None: it must be there)."""
        if default is not None and key not in self.values:
            return default
        value = self._value(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a string")
        return value

    def flag(self, key: str) -> bool:
        """true or false; false if absent."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.where}: {key} = {value!r} is not a list of strings")
        return tuple(value)

    def table(self, key: str, known: Iterable[str]) -> Entry | None:
        """A table inside this one, or None if absent."""
        return Entry.of(f"{self.where}.{key}", self.values[key], known) if key in self.values else None
