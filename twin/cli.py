"""The `twin` command: runs what a line asks for, and turns every way of ending into an exit code.

Only this file and `twin.commands` print and exit: results go to stdout, everything else to stderr, errors as one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from twin.errors import Exit, exit_for

# No command does linear algebra: starting BLAS threads would only cost (measured: 0.1 CPU seconds a start on 2 cores).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

PIPE_CLOSED = 141  # as a shell reports a process that SIGPIPE ended


def main() -> None:
    """Entry point of the `twin` script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    debug = "--debug" in args
    try:
        code = _dispatch([arg for arg in args if arg != "--debug"])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseException as error:
        return _ended(error, debug)


def _dispatch(args: Sequence[str]) -> int:
    if args[:1] == ["replay"]:
        from twin.commands.replay_line import quick

        values = quick(args[1:])
        if values is not None:
            from twin.commands.replay import replay

            return replay(values)
    from twin.commands.tree import root

    return int(root()(args, prog_name="twin", standalone_mode=False) or Exit.OK)


def _ended(error: BaseException, debug: bool) -> int:
    """Say in one line what went wrong, and return what it costs."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else Exit.BUG
    code, text = _explained(error)
    if debug and code is not Exit.INTERRUPTED:
        import traceback

        traceback.print_exception(error)
    else:
        print("twin:", " ".join(text.split()), file=sys.stderr)
    return code


def _explained(error: BaseException) -> tuple[Exit, str]:
    """The exit code of an error, and its one line."""
    if "typer" in sys.modules:
        import typer

        from twin.commands.tree import usage_error

        if isinstance(error, typer.Abort):
            return Exit.INTERRUPTED, "stopped"
        if isinstance(error, usage_error()):
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "twin"
            return Exit.BAD_INPUT, f"{error.format_message()} ({where} --help lists what there is)"
    if isinstance(error, OSError) and error.filename is not None:
        return Exit.BAD_INPUT, f"{error.filename}: {error.strerror}"
    code = exit_for(error)
    if code is Exit.INTERRUPTED:
        return code, str(error) or "stopped"
    if code is Exit.BUG:
        return code, f"this is a bug: {type(error).__name__}: {error} (--debug on the same line shows the traceback)"
    return code, str(error)


if __name__ == "__main__":
    main()
