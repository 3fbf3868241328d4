"""Lines of JSON objects in chunks, with the line on which each stands.

A clean chunk is parsed in one sweep; only when that fails is it gone through line by line. A broken line becomes a note
about that row: it never ends the reading and never shifts another row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from traces.parse import Notes
from traces.source import Json, Source

_CHUNK_BYTES = 8 * 1024 * 1024
"""Lines are read about this many bytes at a time, however long they are."""

_decode = json.JSONDecoder().decode


@dataclass(slots=True)
class Objects:
    """Some consecutive lines. `notes` holds, per index, what is wrong with a line; its object is then empty."""

    items: list[Json]
    place: Callable[[int], int]
    notes: Notes = field(default_factory=dict)

    def keys(self) -> set[str]:
        """Every key that any of the objects has."""
        return set().union(*self.items)

    def column(self, key: str) -> list[object]:
        """The values of one key, None where it is absent."""
        try:
            return [item[key] for item in self.items]
        except KeyError:
            return [item.get(key) for item in self.items]

    def take(self, index: Sequence[int]) -> Objects:
        """The objects at `index`."""
        place, new = self.place, {old: new for new, old in enumerate(index)}
        notes = {new[i]: said for i, said in self.notes.items() if i in new}
        return Objects([self.items[i] for i in index], lambda i: place(index[i]), notes)


def objects(source: Source, batch_rows: int) -> Iterator[Objects]:
    """The objects of a file, up to `batch_rows` at a time."""
    line = 1
    with source.open() as stream:
        while lines := stream.readlines(_CHUNK_BYTES):
            for start in range(0, len(lines), batch_rows):
                chunk = _parse(lines[start : start + batch_rows], line + start)
                if chunk.items:
                    yield chunk
            line += len(lines)


def _parse(lines: list[bytes], first: int) -> Objects:
    try:
        text = b"".join(lines).decode("utf-8")
        found = [_decode(line) for line in text.removesuffix("\n").split("\n")]
        if set(map(type, found)) == {dict} and len(found) == len(lines):
            return Objects(found, lambda i: first + i)
    except (ValueError, RecursionError):
        pass
    items: list[Json] = []
    numbers: list[int] = []
    notes: Notes = {}
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        item, wrong = _one(line)
        if wrong:
            notes[len(items)] = wrong
        items.append(item)
        numbers.append(number)
    return Objects(items, numbers.__getitem__, notes)


def _one(line: bytes) -> tuple[Json, str]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 text at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return {}, f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return {}, "not usable JSON: nested too deep"
    except ValueError as error:  # a number of more digits than Python converts
        return {}, f"not usable JSON: {str(error).split(';')[0]}"
    return (found, "") if isinstance(found, dict) else ({}, "not a JSON object")
