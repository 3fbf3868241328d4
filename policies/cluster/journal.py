"""The journal: every (event, actions) pair as one line of JSON, and back; and its replay through fresh policies.

The first line is the header, each later one `{"seq", "event", "actions"}`, with `"branches"` in front when the line
needs branches of blocks that no line before it defined. No file is opened here: lines go to a callable and come from
an iterable, and a journal is read from its start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from policies.cluster.actions import Action
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import Event
from policies.cluster.plain import (
    BranchNames,
    BranchTable,
    JsonValue,
    as_int,
    as_list,
    as_table,
    decode_action,
    decode_event,
    encode,
)
from policies.errors import JournalError

SCHEMA = "dynatwin.journal/1"

_LINES_PER_WRITE = 512


class Header(NamedTuple):
    """The first line: what made the journal. `config` is the whole configuration as plain values."""

    versions: Mapping[str, str]
    config: Mapping[str, JsonValue]
    seed: int
    policies: tuple[str, ...]


class Entry(NamedTuple):
    """One later line: what happened and what was ordered, `seq` counting from 0."""

    seq: int
    event: Event
    actions: tuple[Action, ...]


class Mismatch(NamedTuple):
    """Where a replay first ordered something else than the journal says."""

    seq: int
    event: Event
    recorded: tuple[Action, ...]
    replayed: tuple[Action, ...]

    def __str__(self) -> str:
        return (
            f"journal entry {self.seq}: {self.event!r}\n"
            f"  recorded: {list(self.recorded)!r}\n"
            f"  replayed: {list(self.replayed)!r}"
        )


# ---------------------------------------------------------------- writing


def encode_header(header: Header) -> str:
    """The first line of a journal, without line end."""
    return _dump({"schema": SCHEMA, **header._asdict()}, "the header")


class Encoder:
    """Writes the entries of one journal, in order; it remembers which branches it has defined."""

    def __init__(self) -> None:
        self._names = BranchNames()

    def entry(self, seq: int, event: Event, actions: Sequence[Action]) -> str:
        """One line, without line end. Raises JournalError for what JSON has no form for, such as a NaN."""
        happened = encode(event, self._names)
        ordered = [encode(action, self._names) for action in actions]
        line: dict[str, object] = {"seq": seq}
        branches = self._names.take_definitions()
        if branches:
            line["branches"] = branches
        line["event"] = happened
        line["actions"] = ordered
        return _dump(line, f"entry {seq}")


class Journal:
    """Takes (event, actions) pairs from a controller and hands whole lines to `write`, many at a time."""

    def __init__(self, write: Callable[[str], object], header: Header) -> None:
        self._write = write
        self._encoder = Encoder()
        self._seq = 0
        self._lines = [encode_header(header)]

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self._lines.append(self._encoder.entry(self._seq, event, actions))
        self._seq += 1
        if len(self._lines) >= _LINES_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Hand over what is buffered; call it once more when the run ends, however it ends."""
        if self._lines:
            self._write("\n".join(self._lines) + "\n")
            self._lines.clear()


# ---------------------------------------------------------------- reading


def decode_header(line: str) -> Header:
    """The header from a journal's first line. Raises JournalError for another schema."""
    found = _load(line, 1)
    if found.get("schema") != SCHEMA:
        raise JournalError(
            f"journal line 1: schema is {found.get('schema')!r}, this version reads {SCHEMA!r}; "
            "replay it with the version that wrote it"
        )
    try:
        return Header(
            versions={name: str(version) for name, version in as_table(found["versions"]).items()},
            config=as_table(found["config"]),
            seed=as_int(found["seed"]),
            policies=tuple(str(name) for name in as_list(found["policies"])),
        )
    except (KeyError, ValueError) as error:
        raise _damaged(1, error) from None


def decode(lines: Iterable[str]) -> Iterator[Entry]:
    """The entries of a journal, header line first. Raises JournalError at the first line that is not right."""
    table = BranchTable()
    number = 0
    for number, line in enumerate(lines, start=1):
        if number == 1:
            decode_header(line)
        else:
            yield _decode_entry(line, number, table)
    if number == 0:
        raise JournalError("the journal is empty; a run writes at least a header")


def replay(lines: Iterable[str], policies: Sequence[Policy]) -> Mismatch | None:
    """Run a journal's events through fresh policies; the first difference, or None when all is the same."""
    controller = Controller(policies)
    for entry in decode(lines):
        replayed = tuple(controller.step(entry.event))
        if replayed != entry.actions:
            return Mismatch(entry.seq, entry.event, entry.actions, replayed)
    return None


def _decode_entry(line: str, number: int, table: BranchTable) -> Entry:
    found = _load(line, number)
    try:
        for definition in as_list(found.get("branches", [])):
            table.define(definition)
        return Entry(
            seq=as_int(found["seq"]),
            event=decode_event(found["event"], table),
            actions=tuple(decode_action(form, table) for form in as_list(found["actions"])),
        )
    except (KeyError, ValueError) as error:
        raise _damaged(number, error) from None


def _dump(value: Mapping[str, object], where: str) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise JournalError(f"{where} cannot be written: {error}; plain, finite values only") from None


def _load(line: str, number: int) -> dict[str, JsonValue]:
    try:
        return as_table(json.loads(line))
    except ValueError as error:
        raise JournalError(f"journal line {number}: {error}; the line is cut or damaged") from None


def _damaged(number: int, error: KeyError | ValueError) -> JournalError:
    said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return JournalError(f"journal line {number}: {said}; the line is damaged, or of another version")
