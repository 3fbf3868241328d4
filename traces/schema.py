"""The canonical form of recorded demand: column names, units and limits.

Every reader ends here and everything above starts here. A canonical trace says when requests came and how long they
were; it never says how any cluster answered them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from traces.arrow import INT_LISTS

ARRIVAL = "arrival_s"
"""Seconds since the first arrival of the trace; null only for a later turn of a session, which waits for its turn."""
ISL = "isl"
OSL = "osl"
REQUEST_ID = "request_id"
SESSION_ID = "session_id"
DELAY = "delay_s"
"""Pause in seconds between the end of the previous turn's answer and the arrival of this turn."""
HASH_IDS = "hash_ids"
"""One id per `hash_block_tokens` prompt tokens (file metadata); null when nothing is known of the content."""
MAX_TOKENS = "max_tokens"
PRIORITY = "priority"
LORA = "lora"
TENANT = "tenant"
"""Whose request it is; prompts of different tenants share no content."""

SCHEMA = pa.schema(
    [
        pa.field(ARRIVAL, pa.float64()),
        pa.field(ISL, pa.int32()),
        pa.field(OSL, pa.int32()),
        pa.field(REQUEST_ID, pa.string()),
        pa.field(SESSION_ID, pa.string()),
        pa.field(DELAY, pa.float64()),
        pa.field(HASH_IDS, INT_LISTS),
        pa.field(MAX_TOKENS, pa.int32()),
        pa.field(PRIORITY, pa.int32()),
        pa.field(LORA, pa.string()),
        pa.field(TENANT, pa.string()),
    ]
)
COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
REQUIRED = (ARRIVAL, ISL, OSL)
TEXTS = (REQUEST_ID, SESSION_ID, LORA, TENANT)

TOKENS_LIMIT = 2**31 - 1
"""Largest token count of one request: the columns are int32."""
SPAN_LIMIT_S = 1e9
"""Longest trace, about 31 years: a larger offset means that the time unit is wrong."""

META_BLOCK = "hash_block_tokens"
META_SYNTHETIC = "synthetic"
META_SOURCE = "source"
META_LICENCE = "licence"
META_GENERATOR = "generator"
META_SEED = "seed"


def canonical_schema(columns: Iterable[str], metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """The canonical fields among `columns`, in canonical order, with `metadata`."""
    wanted = set(columns)
    return pa.schema([SCHEMA.field(name) for name in COLUMNS if name in wanted], metadata=dict(metadata or {}))
