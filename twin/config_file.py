"""Reads a configuration file into given values, each with the line that it stands on.

Only the shape is looked at here (tables, worker groups, short forms); what a value may be is `config_read`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from policies.errors import ConfigError
from twin.config_live import TABLES as LIVE_TABLES
from twin.config_planner import TABLES as PLANNER_TABLES
from twin.config_values import Given, Key

# A table that may also be written as one string: `engine = "vllm"` stands for `[workers.engine] kind = "vllm"`.
SHORT_FORMS = {"workers.engine": "kind", "workers.latency": "model", "sla": "limits"}
PATHS = (
    "trace.path",
    "workers.latency.path",
    "workers.latency.hardware",
    "faults.path",
)  # in a file: relative to that file
NAMES_OR_PATHS = ("workers.latency.coefficients",)  # the same, where FILE.toml or FILE.toml#ENTRY is given
TABLES = frozenset(
    [
        "trace",
        "router",
        "router.queue",
        "router.busy",
        "router.affinity",
        "router.thunder",
        "replicas",
        "observe",
        "disaggregation",
        "resilience",
        "faults",
        "sla",
        "workers.startup",
        "workers.kvbm",
        "workers.links",
        *LIVE_TABLES,
        *PLANNER_TABLES,
        *SHORT_FORMS,
    ]
)
NAMED = ("links", "classes")  # tables that there may be several of, each with a name: [[links]], [[classes]]
MANY = ("workers", *NAMED)
ONE = {"links": "link", "classes": "class"}  # what one of them is called

Found = dict[Key, Given]


def read_file(file: Path) -> tuple[Found, list[str | None]]:
    """Every value of a file by its key, and the name of each worker group (None where it has none).

    Raises ConfigError for a file that cannot be read or is not TOML.
    """
    document, lines = _document(file)
    given: Found = {}
    workers = document.pop("workers", [{}])
    groups = [workers] if isinstance(workers, dict) else workers  # `[workers]` is the only group
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise ConfigError(f"{_place(file, lines, ('workers',))}: begin each group of workers with the line [[workers]]")
    tables: list[tuple[Key, Mapping[str, object]]] = [((), document)]
    tables += [(("workers", at), group) for at, group in enumerate(groups)]
    for name in NAMED:
        tables += [((name, at), table) for at, table in enumerate(_named(name, file, document, lines))]
    while tables:
        base, table = tables.pop(0)
        for name, value in table.items():
            key = (*base, name)
            path = dotted(key)
            if isinstance(value, str) and path in SHORT_FORMS:
                given[(*key, SHORT_FORMS[path])] = Given(value, _place(file, lines, key))
            elif isinstance(value, dict) and value and path in TABLES:
                tables.append((key, value))
            elif value != {}:
                given[key] = Given(value, _place(file, lines, key))
    for key, found in given.items():
        if is_path(dotted(key), found.value):
            given[key] = found._replace(value=str(file.parent / found.value))
    names = (group.get("name") for group in groups)
    return given, [name if isinstance(name, str) else None for name in names]


def is_path(key: str, value: object) -> bool:
    """Whether the value of a key (dotted, worker groups without their names) names a file."""
    if key in NAMES_OR_PATHS:
        return str(value).partition("#")[0].endswith(".toml")
    return key in PATHS and isinstance(value, str | Path) and value != ""


def _named(name: str, file: Path, document: dict[str, object], lines: Mapping[Key, int]) -> list[dict[str, object]]:
    """The tables [[name]], each with a name of its own."""
    tables, one = document.pop(name, []), ONE[name]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{_place(file, lines, (name, 0))}: begin each {one} with the line [[{name}]]")
    for at, table in enumerate(tables):
        if "name" not in table:
            raise ConfigError(f"{_place(file, lines, (name, at))}: this {one} has no name; write name = ... below it")
    return tables


def dotted(key: Key) -> str:
    """The key's tables and name, without the number of the worker group."""
    return ".".join(part for part in key if isinstance(part, str))


def _document(file: Path) -> tuple[dict[str, object], dict[Key, int]]:
    import tomllib

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}; --config wants a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text at byte {error.start}; --config wants a TOML file") from None
    try:
        return tomllib.loads(text), _lines(text)
    except tomllib.TOMLDecodeError as error:
        message, line = str(error), re.search(r"line (\d+)", str(error))
        where = f"{file}:{line.group(1)}" if line else str(file)
        raise ConfigError(f"{where}: not valid TOML: {message[:1].lower()}{message[1:]}") from None


_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_.\-\"' ]+?)\s*=")


def _lines(text: str) -> dict[Key, int]:
    """The line of each key, for error texts: tables and keys at the start of a line, as people write them."""
    lines: dict[Key, int] = {}
    seen = dict.fromkeys(MANY, -1)
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            parts = _parts(header.group(2))
            if parts[0] in seen:
                seen[parts[0]] += 1 if len(parts) == 1 else 0
                table = (parts[0], max(seen[parts[0]], 0), *parts[1:])
            else:
                table = parts
            lines.setdefault(table, number)
            continue
        assignment = _ASSIGNMENT.match(line)
        if assignment:
            lines.setdefault((*table, *_parts(assignment.group(1))), number)
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _place(file: Path, lines: Mapping[Key, int], key: Key) -> str:
    while key and key not in lines:
        key = key[:-1]
    return f"{file}:{lines[key]}" if key else str(file)
