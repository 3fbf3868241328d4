"""What every command of ours has in common: it runs what a line asks for and turns every way of ending into a code.

Only this file, `twin.cli`, `aiconfig.cli` and their folders of commands print and exit: results go to stdout,
everything else to stderr, errors as one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

from twin.errors import Exit, exit_for

# No command does linear algebra: starting BLAS threads would only cost (measured: 0.1 CPU seconds a start on 2 cores).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

PIPE_CLOSED = 141  # as a shell reports a process that SIGPIPE ended

Dispatch = Callable[[Sequence[str]], int]
"""Runs the arguments of a line and returns the exit code."""


def enter(program: str, dispatch: Dispatch) -> None:
    """The whole life of a process that is the script `program`."""
    if sys.stderr is None:  # closed: its text has nowhere to go
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        print(
            f"{program}: stdout: is closed, and results go there; redirect it to a file, or to /dev/null",
            file=sys.stderr,
        )
        sys.exit(Exit.BAD_INPUT)
    sys.stdout = _named(sys.stdout)
    sys.exit(run(program, dispatch, sys.argv[1:]))


def run(program: str, dispatch: Dispatch, args: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    debug = "--debug" in args
    try:
        code = dispatch([arg for arg in args if arg != "--debug"])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        _drop_stdout()
        return PIPE_CLOSED
    except BaseException as error:
        return _ended(program, error, debug)


class _Stdout(FileIO):
    """Standard output whose errors say that it is it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def _named(stdout: TextIO) -> TextIO:
    """The same stdout, with errors that name it, and replacements for what its encoding lacks."""
    raw = BufferedWriter(_Stdout(stdout.fileno(), "wb", closefd=False))
    return TextIOWrapper(raw, encoding=stdout.encoding, errors="replace", line_buffering=stdout.isatty())


def _drop_stdout() -> None:
    """What is left for stdout goes nowhere, so that the end of the process does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ended(program: str, error: BaseException, debug: bool) -> int:
    """Say in one line what went wrong, and return what it costs."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else Exit.BUG
    code, text = _explained(program, error)
    if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one: its help is the answer
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return code
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    if debug and code is not Exit.INTERRUPTED:
        import traceback

        traceback.print_exception(error)
    else:
        print(f"{program}:", " ".join(text.split()), file=sys.stderr)
    return code


def _explained(program: str, error: BaseException) -> tuple[Exit, str]:
    """The exit code of an error, and its one line."""
    if "typer" in sys.modules:
        import typer

        from twin.commands.tree import usage_error

        if isinstance(error, typer.Abort):
            return Exit.INTERRUPTED, "stopped"
        if isinstance(error, usage_error()):
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else program
            return Exit.BAD_INPUT, f"{error.format_message()} ({where} --help lists what there is)"
    if isinstance(error, OSError) and error.filename is not None:
        return Exit.BAD_INPUT, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno is not None:
        return Exit.BAD_INPUT, f"a file could not be read or written: {error.strerror}"
    code = exit_for(error)
    if code is Exit.INTERRUPTED:
        return code, str(error) or "stopped"
    if code is Exit.BUG:
        return code, f"this is a bug: {type(error).__name__}: {error} (--debug on the same line shows the traceback)"
    return code, str(error)
