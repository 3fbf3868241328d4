"""Finds what other packages add through entry points: commands, routers, trace readers and more.

A plug-in is looked for only when a name is not built in, or when names are listed, and loaded only when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from policies.errors import CapabilityError

COMMANDS = "dynatwin.commands"
ROUTERS = "dynatwin.routers"
GROUPS = (
    COMMANDS,
    ROUTERS,
    "dynatwin.planners",
    "dynatwin.forecasters",
    "dynatwin.kv_policies",
    "dynatwin.engines",
    "dynatwin.trace_readers",
)


def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add to a group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """What stands behind a name. Raises CapabilityError when nothing does, when two do, or when it cannot be loaded."""
    found = _distinct(entry_points(group=group, name=name))
    if not found:
        raise CapabilityError(f"{name}: no installed package adds it to {group}; there are: {_listed(names(group))}")
    if len(found) > 1:
        raise CapabilityError(f"{name}: added to {group} by {' and '.join(sorted(found))}; uninstall one of them")
    (point,) = found.values()
    try:
        return point.load()
    except Exception as error:
        raise CapabilityError(f"{name}: its plug-in {point.value} cannot be loaded: {error!r}; reinstall it") from error


def _distinct(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    return {point.value: point for point in points}


def _listed(found: tuple[str, ...]) -> str:
    return ", ".join(found) if found else "none"
