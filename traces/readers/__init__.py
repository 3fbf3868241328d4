"""The interface of a trace reader, and where readers are found: one file per format, imported when it is needed.

A format from outside this package is a class with the members of `TraceReader`, named in the entry-point group
`dynatwin.trace_readers` (in its pyproject.toml: `[project.entry-points."dynatwin.trace_readers"]`, then
`myformat = "mypackage.reader:MyReader"`). It is used when asked for by name (`--format myformat`), and asked whether it
knows a file that no built-in reader knows. A reader takes rows apart and checks none: that is done once, for all.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from traces.check import Clock
from traces.errors import TraceError
from traces.options import ReadOptions, TraceInfo
from traces.rows import Rows
from traces.source import Source

GROUP = "dynatwin.trace_readers"

BUILT_IN: Mapping[str, str] = {
    "dynamo": "traces.readers.dynamo:DynamoReader",
    "journal": "traces.record:JournalReader",
    "mooncake": "traces.readers.mooncake:MooncakeReader",
    "azure": "traces.readers.azure:AzureReader",
    "burstgpt": "traces.readers.burstgpt:BurstGptReader",
    "columns": "traces.readers.columns:ColumnsReader",
}
"""Readers of this package, in the order in which they look at a file: the strictest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTrace:
    """A recognised file. `chunks(n)` starts a new reading and gives up to n rows at a time, in file order.

    `fields`: what the file calls a canonical column, for error texts. `in_arrival_order` is false for formats whose
    lines stand in another order by their nature; such a trace is sorted, in memory.
    """

    info: TraceInfo
    clock: Clock
    chunks: Callable[[int], Iterator[Rows]]
    fields: Mapping[str, str]
    in_arrival_order: bool = True


class TraceReader(Protocol):
    """One format. `name` is what `--format` takes."""

    name: str

    def claims(self, source: Source) -> bool:
        """Whether the beginning of the file is of this format for certain; a doubt is a no."""

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Recognise columns, unit and block size. Raises TraceError if the file is of another format after all."""


def reader_for(source: Source, name: str) -> TraceReader:
    """The reader called `name`, or the first that claims the file when `name` is "auto"."""
    if name == "auto":
        return _recognise(source)
    if name in BUILT_IN:
        return _load(BUILT_IN[name])
    outside = _outside()
    if name in outside:
        return outside[name]()
    known = [*BUILT_IN, *outside]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise TraceError(f"there is no trace format {name!r}{hint} Known: auto, {', '.join(known)}")


def _recognise(source: Source) -> TraceReader:
    for target in BUILT_IN.values():
        reader = _load(target)
        if reader.claims(source):
            return reader
    for make in _outside().values():
        reader = make()
        if reader.claims(source):
            return reader
    seen = source.columns or tuple(source.objects[0] if source.objects else ())
    raise source.error(
        f"the format is not known: {source.kind.value} with {', '.join(map(str, seen[:12]))}; "
        "rename the columns to arrival_s, isl, osl in a CSV or parquet, or name the format with --format",
        1,
    )


def _load(target: str) -> TraceReader:
    module, _, name = target.partition(":")
    reader: TraceReader = getattr(importlib.import_module(module), name)()
    return reader


def _outside() -> dict[str, Callable[[], TraceReader]]:
    from importlib.metadata import entry_points

    return {entry.name: entry.load() for entry in entry_points(group=GROUP)}
