"""`aiconfig explain` and `aiconfig compare`: questions to a search that was made."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer

from twin.commands.options import Json
from twin.errors import Exit

Search = Annotated[
    Path | None, typer.Option("--search", help="Folder of the search; otherwise the newest below runs/.", metavar="DIR")
]
NAMED = "Name of a candidate, or its place in the table."


def explain(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help=NAMED)],
    search: Search = None,
    json: Json = False,
) -> int:
    """Why a candidate was left out, or how good it is: numbers compared, figures, terms."""
    from aiconfig.explain import explain_lines
    from aiconfig.lookup import find_search, look_up
    from aiconfig.plain import to_plain

    folder, result = find_search(search)
    looked = look_up(result, folder, candidate)
    if json:
        print(json_.dumps(to_plain(looked), indent=1, sort_keys=True, ensure_ascii=False))
    else:
        print("\n".join(explain_lines(result, looked)))
    return Exit.OK


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=NAMED)],
    b: Annotated[str, typer.Argument(metavar="B", help=NAMED)],
    search: Search = None,
    json: Json = False,
) -> int:
    """Two candidates of a search side by side."""
    from aiconfig.explain import compare_lines
    from aiconfig.lookup import find_search, look_up
    from aiconfig.plain import to_plain

    folder, result = find_search(search)
    first, second = (look_up(result, folder, name) for name in (a, b))
    if json:
        print(json_.dumps({"a": to_plain(first), "b": to_plain(second)}, indent=1, sort_keys=True, ensure_ascii=False))
    else:
        print("\n".join(compare_lines(result, first, second)))
    return Exit.OK
