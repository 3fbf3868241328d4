"""The rows that a simulation plays: drawn from a workload, or those of the user's trace, and how many are warm-up.

The same workload gives the same rows on every machine, and a longer draw begins with a shorter one, so that all
candidates of a search meet the same requests. Nothing here knows candidates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from aiconfig.estimate import Load
from aiconfig.workload import Workload
from policies.errors import ConfigError
from policies.frozen import frozen
from traces import arrow
from traces.convert import write_table
from traces.draw import Ints, Stream
from traces.rows import IdLists
from traces.schema import ARRIVAL, HASH_IDS, ISL, META_BLOCK, META_GENERATOR, META_SEED, META_SYNTHETIC, OSL
from traces.schema import canonical_schema as schema_of

REQUESTS_PER_USER: Final = 10
ENOUGH_REQUESTS: Final = 1000
"""Behind the warm-up: the fewest for percentiles (specification R3). Where ten for each user are more, so many do."""
LEAST_PER_USER: Final = 4
LEAST_REQUESTS: Final = 200
OPEN_REQUESTS: Final = 1200
OPEN_WARMUP: Final = 6
"""One row in so many of an open loop is warm-up: 1,000 are left of 1,200."""
LEAST_PREFIX: Final = 16
"""Prompts that have fewer tokens in common share nothing: no engine but SGLang has blocks so small."""


@frozen
class Protocol:
    """`requests` rows are played; the first `warmup` of them are left out of what is measured.

    In a closed loop these are the opening burst: as many as there are users. Its drain at the end is measured."""

    requests: int
    warmup: int

    def line(self) -> str:
        """For people."""
        left_out = f"the first {self.warmup:,} left out" if self.warmup else "none left out"
        return f"{self.requests:,} requests played, {left_out} as warm-up"


def protocol(workload: Workload, load: Load) -> Protocol:
    """How many rows a simulation at this load plays. Raises ConfigError for a load that the arrivals cannot have."""
    if load.users is not None:
        if workload.arrivals != "closed":
            raise ConfigError(f"{load}: users are for --arrivals closed, and arrivals are {workload.arrivals}")
        requests = workload.requests or _closed_requests(load.users)
        return Protocol(requests=requests, warmup=load.users if 2 * load.users <= requests else 0)
    if workload.arrivals == "closed":
        raise ConfigError(f"{load}: a rate is for --arrivals poisson or recorded, and arrivals are closed")
    requests = workload.requests or OPEN_REQUESTS
    return Protocol(requests=requests, warmup=requests // OPEN_WARMUP)


def _closed_requests(users: int) -> int:
    """Ten for each user, at least 200; for many users 1,000 behind the warm-up, and at least four for each."""
    usual = min(REQUESTS_PER_USER * users, ENOUGH_REQUESTS + users)
    return max(LEAST_REQUESTS, usual, LEAST_PER_USER * users)


def write_rows(workload: Workload, rows: int, path: Path) -> None:
    """Write the first `rows` rows of a workload without a trace of its own as a trace to `path`."""
    write_table(draw_rows(workload, rows), path)


def draw_rows(workload: Workload, rows: int) -> pa.Table:
    """The first `rows` rows of a workload, with arrivals at a mean of one a second, as a canonical trace.

    Lengths are uniform over whole numbers. With a common prefix the tokens of a hash id are those of the prefix: all
    prompts have the first id in common and no other. Raises ConfigError for recorded arrivals without a trace.
    """
    if workload.arrivals == "recorded":
        raise ConfigError("--arrivals recorded: recorded where? give --trace, or --arrivals closed or poisson")
    isl = _lengths(workload.isl, workload.min_ratio, rows, Stream(workload.seed, "isl"))
    osl = _lengths(workload.osl, workload.min_ratio, rows, Stream(workload.seed, "osl"))
    columns = {
        ARRIVAL: arrow.numbers(_arrivals(workload, rows)),
        ISL: arrow.numbers(isl.astype(np.int32)),
        OSL: arrow.numbers(osl.astype(np.int32)),
    }
    metadata = {
        META_SYNTHETIC: "true",
        META_GENERATOR: f"aiconfig {_words(workload)}, {workload.arrivals} arrivals",
        META_SEED: str(workload.seed),
    }
    if workload.prefix_tokens >= LEAST_PREFIX:
        columns[HASH_IDS] = _ids(isl, workload.prefix_tokens).to_arrow()
        metadata[META_BLOCK] = str(workload.prefix_tokens)
    return pa.Table.from_arrays(list(columns.values()), schema=schema_of(columns, metadata))


def _words(workload: Workload) -> str:
    words = f"isl {workload.isl} osl {workload.osl}"
    if workload.min_ratio < 1.0:
        words += f" from {workload.min_ratio:g} times that"
    return words + (f", prefix {workload.prefix_tokens}" if workload.prefix_tokens else "")


def _arrivals(workload: Workload, rows: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if workload.arrivals == "closed":
        return np.zeros(rows)
    gaps_s = -np.log1p(-Stream(workload.seed, "arrivals").uniform(rows))
    gaps_s[0] = 0.0
    return np.cumsum(gaps_s)


def _lengths(longest: int, min_ratio: float, rows: int, stream: Stream) -> Ints:
    """Uniform over the whole numbers from `min_ratio * longest` (rounded up) to `longest`."""
    shortest = max(1, -int(-longest * min_ratio // 1))
    drawn: Ints = shortest + np.floor(stream.uniform(rows) * (longest - shortest + 1)).astype(np.int64)
    return drawn


def _ids(isl: Ints, prefix_tokens: int) -> IdLists:
    """Id 0 first in every prompt, all others there once."""
    counts = -(-isl // prefix_tokens)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    values = np.arange(1, int(offsets[-1]) + 1)
    values[offsets[:-1]] = 0
    return IdLists(offsets, values)
