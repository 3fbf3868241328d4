"""Checks of the router's settings: one line that names the key, the value, the limit and the next step.

Nothing here knows which keys there are.
"""

from __future__ import annotations

import math

from policies.errors import ConfigError


def within(key: str, value: float | None, least: float, most: float = math.inf) -> None:
    """`router.<key>` is None, or finite and from `least` to `most`. Raises ConfigError."""
    if value is None:
        return
    if not (math.isfinite(value) and least <= value <= most):
        limit = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ConfigError(f"router.{key} is {value}, it must be {limit}; change it or leave it out for its default")


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """`router.<key>` is one of `known`. Raises ConfigError."""
    if value not in known:
        raise ConfigError(f"router.{key} is {value!r}, it must be one of {', '.join(known)}")
