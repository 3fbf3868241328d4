"""Values of the configuration that are lists written as text, and what they may hold.

`where` names the key and who gave it; every refusal is one line that begins with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from policies.errors import ConfigError
from twin.config_values import number_of

LARGEST_BATCH = 65_536


def accept_rates(text: str, where: str) -> tuple[float, ...]:
    """`0.85,0.3`: numbers from 0 to 1."""
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(
                f'{where} = "{text}": {part.strip() or "nothing"} must be a number from 0 to 1, as in 0.85,0.3'
            )
        rates.append(rate)
    return tuple(rates)


def graph_sizes(text: str, where: str) -> tuple[int, ...]:
    """`1,2,4,8-256/8`: batch sizes and ranges of them with their step, as a rising sequence."""
    sizes: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6})/(\d{1,6}))?\s*", part)
        low, high, step = (int(n) for n in found.groups(default=found[1])) if found else (0, 0, 0)
        if not 1 <= low <= high <= LARGEST_BATCH or step < 1:
            raise ConfigError(
                f'{where} = "{text}": {part.strip() or "nothing"} must be a batch size from 1 to {LARGEST_BATCH:,} '
                "or a range with its step, as in 1,2,4,8-256/8"
            )
        sizes.update(range(low, high + 1, step))
    return tuple(sorted(sizes))


def name_pairs(texts: Iterable[str], where: str) -> dict[str, str]:
    """`gpt-4o=llama`: a name, an equals sign, and what it stands for; each name once."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, meant = (part.strip() for part in text.partition("="))
        if not name or not meant:
            raise ConfigError(f'{where}: "{text}" must be a name, = and what it stands for, as in gpt-4o=llama')
        if name in found:
            raise ConfigError(f"{where}: {name} stands for {found[name]} and for {meant}; leave one out")
        found[name] = meant
    return found


def taint_weights(texts: Iterable[str], where: str) -> tuple[tuple[str, float], ...]:
    """`zone=a:1`: a taint, a colon, and how much it is liked; below 0 it is not."""
    found = []
    for text in texts:
        taint, _, weight = text.rpartition(":")
        number = number_of(weight)
        if not taint or number is None or not math.isfinite(number):
            raise ConfigError(f'{where}: "{text}" must be a taint, a colon and a number, as in zone=a:1')
        found.append((taint, number))
    return tuple(found)
