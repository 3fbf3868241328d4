"""Checks of the planner's settings: one line that names the key, the value, the limit and the next step.

Nothing here knows which keys there are.
"""

from __future__ import annotations

import math

from policies.errors import ConfigError


def within(key: str, value: float | None, least: float, most: float = math.inf) -> None:
    if value is not None and not (math.isfinite(value) and least <= value <= most):
        limit = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise ConfigError(f"planner.{key} is {value}, it must be {limit}; change it or leave it out for its default")


def above_zero(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"planner.{key} is {value}, it must be above 0; change it or leave it out for its default")


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"planner.{key} is {value!r}, it must be one of {', '.join(known)}")
