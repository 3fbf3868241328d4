"""Commands of engines, taken apart: words from scripts and lines, and what each flag says by the table.

Strict: a value of the wrong kind is an error, and a flag that the table does not have is named, with what was near.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from aiconfig.candidate import ENGINES
from aiconfig.emit.flags import Flag, Flags, Plain, find_flags
from aiconfig.emit.launch import MARK
from policies.errors import ConfigError
from policies.frozen import frozen


@frozen
class Command:
    """The words of one command of an engine, after its program; `facts` from a file of ours."""

    engine: str
    words: tuple[str, ...]
    facts: Mapping[str, str]
    where: str


@frozen
class Parsed:
    """What the flags of a command say, by key; those that say nothing of a deployment's shape, and those that the
    table does not know."""

    values: Mapping[str, Plain]
    aside: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def commands_in(text: str, where: str) -> list[Command]:
    """Every command of an engine in a script of ours, or in a line (or lines, joined by backslashes) of a shell."""
    facts = _facts(text, where)
    arrays = re.findall(r"^command=\(\n(.*?)^\)$", text, re.M | re.S)
    sources = arrays or ["\n".join(line for line in _joined(text))]
    found = []
    for source in sources:
        for line in [source] if arrays else source.split("\n"):
            command = command_of(_split(line, where), facts, where)
            if command is not None:
                found.append(command)
    return found


def command_of(words: Sequence[str], facts: Mapping[str, str], where: str) -> Command | None:
    """The command of an engine in these words, None if there is none. Assignments and launchers before it are passed
    over; it ends where the shell would start another."""
    ends = [n for n, word in enumerate(words) if re.fullmatch(r"[;&|]+|\d*>>?.*", word)]
    words = list(words[: ends[0]] if ends else words)
    for engine in ENGINES:
        flags = find_flags(engine, facts.get("version"))
        for start in range(len(words)):
            size = _program(words, start, flags)
            if size:
                rest = words[start + size :]
                if engine == "trtllm" and rest[:1] == ["serve"]:
                    rest = rest[1:]
                if engine == "trtllm" and rest[:1] == ["disaggregated"]:
                    return None  # the router in front of workers
                return Command(engine=engine, words=tuple(rest), facts=facts, where=where)
    return None


def parse(command: Command, flags: Flags) -> Parsed:
    """The command's flags by the table. Of a flag that is given twice the last counts, as in the engines."""
    names = flags.named()
    values: dict[str, Plain] = {}
    aside: list[str] = []
    unknown: list[str] = []
    words = list(command.words)
    while words:
        word = words.pop(0)
        name, equals, joined = word.partition("=")
        if not word.startswith("-"):
            first = next((flag for flag in flags.by_key.values() if flag.kind == "first"), None)
            if first is not None and first.key not in values:
                values[first.key] = word
            else:
                unknown.append(word)
        elif (found := _look_up(name, names)) is not None:
            flag, on = found
            values[flag.key] = _value(flag, on, joined if equals else None, words, name, command.where)
        elif name in flags.aside:
            aside.append(name)
            _skip(words, 0 if equals else flags.aside[name])
        else:
            unknown.append(_named(name, [*names, *flags.aside]))
            _skip(words, 0 if equals else -1)
    return Parsed(values=values, aside=tuple(aside), unknown=tuple(unknown))


def flatten(tree: Mapping[str, object], flags: Flags, where: str) -> Parsed:
    """What a file of options says, by the table."""
    places = {place: flag for flag in flags.by_key.values() for place in (flag.yaml, flag.yaml_too) if place}
    values: dict[str, Plain] = {}
    unknown = []
    for place, value in _leaves(tree, ""):
        flag = places.get(place)
        if flag is None:
            unknown.append(_named(place, list(places)))
        elif flag.kind == "switch" and not isinstance(value, bool):
            raise ConfigError(f"{where}: {place} {value!r} is neither true nor false")
        elif flag.kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{where}: {place} {value!r} is not a whole number")
        elif isinstance(value, bool | int | float | str):
            values[flag.key] = value
    return Parsed(values=values, unknown=tuple(unknown))


def _named(name: str, known: Sequence[str]) -> str:
    """The unknown name, with a known one only if it is nearly that: engines have hundreds that we do not."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"{name} (did you mean {close[0]}?)" if close else name


def _leaves(tree: Mapping[str, object], under: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        place = f"{under}.{key}" if under else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, place)
        else:
            yield place, value


def _look_up(name: str, names: Mapping[str, tuple[Flag, bool]]) -> tuple[Flag, bool] | None:
    """Engines take dashes and underscores alike."""
    if name in names:
        return names[name]
    spelled = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
    return names.get(spelled) or names.get(f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name)


def _value(flag: Flag, on: bool, joined: str | None, words: list[str], name: str, where: str) -> Plain:
    if flag.kind in ("switch", "pair"):
        if joined is not None:
            raise ConfigError(f"{where}: {name} takes no value, and has {joined!r}")
        return on
    if joined is None:
        if not words or (words[0].startswith("--") and flag.kind != "text"):
            raise ConfigError(f"{where}: {name} has no value")
        joined = words.pop(0)
    return flag.parse(joined, where)


def _skip(words: list[str], count: int) -> None:
    """Drops the values of a flag: so many, or (-1) all up to the next flag."""
    while words and count != 0 and not (count < 0 and words[0].startswith("-")):
        words.pop(0)
        count -= 1 if count > 0 else 0


def _program(words: Sequence[str], start: int, flags: Flags) -> int:
    """How many words name the engine's program there; 0 if none do."""
    rest = [word.rsplit("/", 1)[-1] if n == 0 else word for n, word in enumerate(words[start : start + 3])]
    if tuple(rest[: len(flags.program)]) == flags.program:
        return len(flags.program)
    if len(rest) == 3 and rest[0].startswith("python") and rest[1] == "-m" and rest[2] in flags.modules:
        return 3
    return 0


def _facts(text: str, where: str) -> dict[str, str]:
    line = next((line for line in text.split("\n") if line.startswith(f"# {MARK} ")), None)
    if line is None:
        return {}
    pairs = [word.partition("=") for word in _split(line.removeprefix(f"# {MARK} "), where)]
    return {key: value for key, equals, value in pairs if equals}


def _joined(text: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", text).split("\n")


def _split(text: str, where: str) -> list[str]:
    """The words as a shell would split them."""
    lexer = shlex.shlex(_uncommented(text), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError(f"{where}: {str(error).lower()} in the command") from None


def _uncommented(text: str) -> str:
    """The text without comments: # begins one at the start of a word, outside of quotes (shlex takes it anywhere)."""
    kept: list[str] = []
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (not kept or kept[-1].isspace()):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if char == "\\" and quote != "'" and at + 1 < len(text):
            kept.append(char)
            at += 1
        kept.append(text[at])
        at += 1
    return "".join(kept)
