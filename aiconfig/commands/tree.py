"""All commands of `aiconfig`; a command's module is imported when the command is asked for."""

from __future__ import annotations

from typing import Any

from twin.commands.tree import Commands, Version, tree

PLACES = {
    "search": "aiconfig.commands.search:search",
    "estimate": "aiconfig.commands.estimate:estimate",
    "explain": "aiconfig.commands.results:explain",
    "compare": "aiconfig.commands.results:compare",
    "emit": "aiconfig.commands.artifacts:emit",
    "import": "aiconfig.commands.artifacts:import_",
    "models": "twin.commands.catalogue:models",
    "systems": "twin.commands.catalogue:hardware",
}


class _Commands(Commands):
    places = PLACES


def root() -> Any:
    """The whole tree as a click command."""
    return tree(_Commands, _aiconfig)


def _aiconfig(version: Version = False) -> None:
    """Find the deployment that serves a model within given limits: search, explain, compare, write its files."""
