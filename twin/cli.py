"""The `twin` command: finds the command that a line names and runs it; `twin.shell` does the rest."""

from __future__ import annotations

from collections.abc import Sequence

from twin.errors import Exit
from twin.shell import enter
from twin.shell import run as run_line


def main() -> None:
    """Entry point of the `twin` script."""
    enter("twin", _dispatch)


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    return run_line("twin", _dispatch, args)


def _dispatch(args: Sequence[str]) -> int:
    if args[:1] == ["replay"]:
        from twin.commands.replay_line import quick

        values = quick(args[1:])
        if values is not None:
            from twin.commands.replay import replay

            return replay(values)
    from twin.commands.tree import root

    return int(root()(args, prog_name="twin", standalone_mode=False) or Exit.OK)


if __name__ == "__main__":
    main()
