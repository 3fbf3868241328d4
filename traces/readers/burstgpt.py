"""BurstGPT CSV (or parquet with the same names): seconds from the start of the trace, token counts, model, log type.

Rows with no response tokens are requests that failed; as in every format, they are left out and counted unless asked
for. Exact duplicates are common here and are kept and counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from traces.options import ReadOptions
from traces.readers import RawTrace
from traces.readers.columns import open_table
from traces.schema import ARRIVAL, ISL, OSL, SESSION_ID
from traces.source import Kind, Source

UNIT = "s"

ALIASES: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: ("timestamp",),
    ISL: ("request tokens",),
    OSL: ("response tokens",),
    SESSION_ID: ("session id",),
}


class BurstGptReader:
    """Reads `Timestamp, Model, Request tokens, Response tokens, ...`."""

    name = "burstgpt"

    def claims(self, source: Source) -> bool:
        """A table with BurstGPT's names."""
        names = {name.casefold() for name in source.columns}
        needed = (ALIASES[column][0] for column in (ARRIVAL, ISL, OSL))
        return source.kind is not Kind.JSON_LINES and all(name in names for name in needed)

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Seconds, unless `time_unit` says otherwise."""
        if source.kind is Kind.JSON_LINES:
            raise source.error("burstgpt traces are CSV or parquet, this file is JSON lines; see --format")
        return open_table(source, options, self.name, ALIASES, unit=UNIT)
