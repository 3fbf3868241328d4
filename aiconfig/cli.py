"""The `aiconfig` command: finds the command that a line names and runs it; `twin.shell` does the rest."""

from __future__ import annotations

from collections.abc import Sequence

from twin.errors import Exit
from twin.shell import enter
from twin.shell import run as run_line


def main() -> None:
    """Entry point of the `aiconfig` script."""
    enter("aiconfig", _dispatch)


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    return run_line("aiconfig", _dispatch, args)


def _dispatch(args: Sequence[str]) -> int:
    from aiconfig.commands.tree import root

    return int(root()(args, prog_name="aiconfig", standalone_mode=False) or Exit.OK)


if __name__ == "__main__":
    main()
