"""The flags of each engine by version: how one is spelled, and whether a release has it.

Read from `flags.toml`, for writing and for reading commands. A release outside of what the table covers is answered
with the nearest one and a notice, never with a guess.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.names import pick

Plain = bool | int | float | str | Mapping[str, "bool | int | float | str"]
"""A value of a flag; a mapping for those that are JSON."""
KINDS = ("int", "float", "text", "json", "switch", "pair", "first", "value")


class _Row(TypedDict, total=False):
    key: str
    name: str
    also: list[str]
    short: list[str]
    kind: str
    yaml: str
    yaml_too: str
    spell: dict[str, str]
    takes: dict[str, str]
    since: str
    until: str


class _Engine(TypedDict):
    images: NotRequired[dict[str, dict[str, str]]]  # of Dynamo alone
    program: list[str]
    modules: list[str]
    read: list[str]
    flags: list[_Row]
    aside: dict[str, int]


@frozen
class Flag:
    """One flag. `yaml` is where it stands in a file of further options, None if on the command line; `yaml_too` where
    it may stand there as well. `spell` is empty if our values are the engine's; `takes` has further words of its that
    are read."""

    key: str
    name: str
    kind: str
    also: tuple[str, ...] = ()
    yaml: str | None = None
    yaml_too: str | None = None
    spell: Mapping[str, str] = field(default_factory=dict)
    takes: Mapping[str, str] = field(default_factory=dict)

    def words(self, value: Plain) -> tuple[str, ...]:
        """The words of a command that give it this value; none for a switch that is off."""
        match self.kind:
            case "switch":
                return (self.name,) if value else ()
            case "pair":
                return (self.name,) if value else (f"--no-{self.name.removeprefix('--')}",)
            case "first":
                return (str(value),)
            case "json":
                return (self.name, json.dumps(value, separators=(",", ":")))
        return (self.name, str(self.spelled(value)))

    def spelled(self, value: Plain) -> Plain:
        """The engine's word for our value."""
        return pick(f"value of {self.name or self.yaml or self.key}", str(value), self.spell) if self.spell else value

    def ours(self, theirs: str) -> tuple[str, ...]:
        """Our values that the engine spells so, the usual one first."""
        meant = tuple(ours for ours, word in self.spell.items() if word == theirs)
        return meant or ((self.takes[theirs],) if theirs in self.takes else ())

    def parse(self, text: str, where: str) -> Plain:
        """The value that a word of a command means; `ConfigError` if it is none."""
        try:
            match self.kind:
                case "int":
                    return int(text)
                case "float":
                    return float(text)
                case "json":
                    value = json.loads(text)
                    if not isinstance(value, dict):
                        raise ValueError(text)
                    return value
        except ValueError:
            article = {"int": "a whole number", "float": "a number", "json": "a JSON object"}[self.kind]
            raise ConfigError(f"{where}: {self.name} {text!r} is not {article}") from None
        return text


@frozen
class Flags:
    """The flags of one release. `version` is the release that they are of, `notice` what to say if another was asked
    for. `aside` are flags that are known and concern nothing of ours, with their number of words."""

    engine: str
    version: str
    program: tuple[str, ...]
    modules: tuple[str, ...]
    by_key: Mapping[str, Flag]
    aside: Mapping[str, int]
    notice: str | None = None

    def __contains__(self, key: str) -> bool:
        return key in self.by_key

    def __getitem__(self, key: str) -> Flag:
        return pick(f"flag of {self.engine} {self.version}", key, self.by_key)

    def named(self) -> Mapping[str, tuple[Flag, bool]]:
        """Every spelling that the command line accepts, with whether it switches on."""
        found: dict[str, tuple[Flag, bool]] = {}
        for flag in self.by_key.values():
            for name in (flag.name, *flag.also):
                if name:
                    found[name] = (flag, True)
                    if flag.kind == "pair" and name.startswith("--"):
                        found[f"--no-{name.removeprefix('--')}"] = (flag, False)
        return found


def find_flags(engine: str, version: str | None = None) -> Flags:
    """The flags of a release (None: the newest that was read)."""
    table = pick("engine", engine, _tables())
    first, last = table["read"][0], table["read"][-1]
    asked = version or last
    order = _order(asked, engine)
    nearest = first if order < _order(first) else last if order > _order(last) else asked
    notice = None
    if nearest != asked:
        notice = (
            f"{engine} {asked} is not covered by the table of flags ({first} to {last}): these are the flags of "
            f"{nearest}, the nearest; check them against its --help"
        )
    chosen = [row for row in table["flags"] if _has(row, _order(nearest))]
    return Flags(
        engine=engine,
        version=nearest,
        program=tuple(table["program"]),
        modules=tuple(table["modules"]),
        by_key={row["key"]: _flag(row) for row in chosen},
        aside=table["aside"],
        notice=notice,
    )


def releases(engine: str) -> tuple[str, ...]:
    """The releases whose own parser was read for the table, oldest first."""
    return tuple(pick("engine", engine, _tables())["read"])


def shipped(dynamo_version: str, engine: str) -> str | None:
    """The release of the engine in the image of this release of Dynamo (of the newest one before it that is known)."""
    known = _tables()["dynamo"]["images"]
    found = [row[engine] for of, row in known.items() if _order(of) <= _order(dynamo_version) and engine in row]
    return found[-1] if found else None


def _flag(row: _Row) -> Flag:
    return Flag(
        key=row["key"],
        name=row.get("name", ""),
        kind=row["kind"],
        also=(*row.get("also", ()), *row.get("short", ())),
        yaml=row.get("yaml"),
        yaml_too=row.get("yaml_too"),
        spell=row.get("spell", {}),
        takes=row.get("takes", {}),
    )


def _has(row: _Row, at: tuple[int, ...]) -> bool:
    since, until = row.get("since"), row.get("until")
    return (since is None or at >= _order(since)) and (until is None or at < _order(until))


def _order(version: str, engine: str = "engine") -> tuple[int, ...]:
    """Orders releases: up to four numbers, then that of a post release. Pre-releases count as their release."""
    found = re.match(r"v?(\d+(?:\.\d+){0,3})(?:.*?\.?post(\d+))?", version)
    if not found:
        raise ConfigError(f"{engine} version {version!r}: a release is written like 0.12.0")
    numbers = [int(part) for part in found[1].split(".")]
    return (*numbers, *([0] * (4 - len(numbers))), int(found[2] or 0))


@cache
def _tables() -> Mapping[str, _Engine]:
    text = (Path(__file__).parent / "flags.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)  # its shape is tested
