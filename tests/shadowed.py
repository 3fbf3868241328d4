"""What a live cluster would tell its shadow of a made-up demand, for tests."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet

from policies.cluster.ids import RequestId, WorkerId
from twin.config import Config
from twin.engine.ticks import instant
from twin.shadow.facts import Arrived, Ended, Fact, Joined

BLOCK = 16


class Asked(NamedTuple):
    at_s: float
    isl: int
    osl: int
    max_tokens: int
    keys: list[int]


def demand(seed: int, count: int, rate_rps: float = 20.0) -> list[Asked]:
    """Prompts that share beginnings."""
    rng = random.Random(seed)
    made, at_s = [], 0.0
    for number in range(count):
        isl = rng.randrange(8, 3000)
        shared = rng.choice((0, 4, 60))
        keys = [rng.randrange(2) * 1000 + place for place in range(shared)]
        keys += [10**6 + number * 1000 + place for place in range(isl // BLOCK + 1)]
        osl = rng.randrange(1, 200)
        made.append(Asked(at_s, isl, osl, osl + rng.randrange(100), keys[: -(-isl // BLOCK)]))
        at_s = instant(at_s + rng.expovariate(rate_rps))
    return made


def as_trace(asked: Sequence[Asked], file: Path) -> Path:
    """The same as a file to replay."""
    columns = {
        "arrival_s": [one.at_s for one in asked],
        "isl": [one.isl for one in asked],
        "osl": [one.osl for one in asked],
        "max_tokens": [one.max_tokens for one in asked],
        "hash_ids": [one.keys for one in asked],
    }
    parquet.write_table(pa.table(columns), file)
    return file


def joined(config: Config) -> list[Fact]:
    """All workers of the configuration, there from the start."""
    names = [group.name for group in config.workers for _ in range(group.count)]
    return [Joined(0.0, WorkerId(number), name, None, None) for number, name in enumerate(names)]


def arrived(number: int, one: Asked) -> Arrived:
    whole = one.keys[: one.isl // BLOCK]
    return Arrived(one.at_s, name(number), one.isl, one.max_tokens, array("Q", whole).tobytes())


def name(number: int) -> RequestId:
    return RequestId(str(number))


def ended(number: int, one: Asked, after_s: float) -> Ended:
    """As if it had taken `after_s`, half of it for the first token."""
    at_s = one.at_s
    return Ended(instant(at_s + after_s), name(number), "completed", one.osl, at_s + after_s / 2, at_s + after_s)


def in_batches(facts: Sequence[Fact], every_s: float) -> list[tuple[float, list[Fact]]]:
    """In order of time, cut as a live side sends them."""
    ordered = sorted(facts, key=lambda fact: fact.at_s)
    cut = groupby(ordered, key=lambda fact: int(fact.at_s / every_s))
    return [((number + 1) * every_s, list(some)) for number, some in cut]
