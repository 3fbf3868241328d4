"""Azure's LLM inference traces, 2023 and 2024: CSV as published, or parquet with the same names.

Timestamps are dates with up to seven decimals, with or without a zone; lines may end in CR LF.
"""

from __future__ import annotations

from collections.abc import Mapping

from traces.options import ReadOptions
from traces.readers import RawTrace
from traces.readers.columns import open_table
from traces.schema import ARRIVAL, ISL, OSL
from traces.source import Kind, Source

ALIASES: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: ("timestamp",),
    ISL: ("contexttokens",),
    OSL: ("generatedtokens",),
}


class AzureReader:
    """Reads `TIMESTAMP, ContextTokens, GeneratedTokens`."""

    name = "azure"

    def claims(self, source: Source) -> bool:
        """A table with Azure's three names."""
        names = {name.casefold() for name in source.columns}
        return source.kind is not Kind.JSON_LINES and all(accepted[0] in names for accepted in ALIASES.values())

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Dates give seconds; numbers instead of dates need `time_unit`."""
        if source.kind is Kind.JSON_LINES:
            raise source.error("azure traces are CSV or parquet, this file is JSON lines; see --format")
        return open_table(source, options, self.name, ALIASES)
