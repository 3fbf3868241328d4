"""The `twin` command: finds the command asked for, runs it, turns every way of ending into an exit code.

A command's module is imported when that command runs, plug-ins only when a name is not built in or names are listed.
Only this file and `twin.commands` print and exit: results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twin.errors import Exit, exit_for

# Command -> where its function, or its group of commands, is.
BUILT_IN = {
    "replay": "twin.commands.replay:replay",
    "compare": "twin.commands.runs:compare",
    "report": "twin.commands.runs:report",
    "synth": "twin.commands.traces:synth",
    "import": "twin.commands.traces:import_",
    "traces": "twin.commands.traces:traces",
    "models": "twin.commands.catalogue:models",
    "hardware": "twin.commands.catalogue:hardware",
}
EPILOG = "Errors are one line on stderr; --debug anywhere on the line shows where they came from."


def main() -> None:
    """Entry point of the `twin` script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    debug = "--debug" in args
    try:
        result = _root()([arg for arg in args if arg != "--debug"], prog_name="twin", standalone_mode=False)
        sys.stdout.flush()
        return int(result or Exit.OK)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except BaseException as error:
        return _ended(error, debug)


def _ended(error: BaseException, debug: bool) -> int:
    """Say in one line what went wrong, and return what it costs."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else Exit.BUG
    if debug and not isinstance(error, KeyboardInterrupt):
        import traceback

        traceback.print_exception(error)
        return _exit_code(error)
    _say(_text_of(error))
    return _exit_code(error)


def _text_of(error: BaseException) -> str:
    code = _exit_code(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped"
    if isinstance(error, _usage_error()):
        asked = getattr(error, "ctx", None)
        where = asked.command_path if asked is not None else "twin"
        return f"{error.format_message()} ({where} --help lists what there is)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if code is Exit.BUG:
        return f"this is a bug: {type(error).__name__}: {error} (run the same with --debug for the traceback)"
    return str(error)


def _exit_code(error: BaseException) -> Exit:
    if isinstance(error, typer.Abort):
        return Exit.INTERRUPTED
    if isinstance(error, _usage_error()) or (isinstance(error, OSError) and error.filename is not None):
        return Exit.BAD_INPUT
    return exit_for(error)


def _usage_error() -> type[Any]:
    """The base of click's own errors, wherever this version of typer keeps click."""
    return next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _say(text: str) -> None:
    line = " ".join(text.split())
    print(f"twin: {line}", file=sys.stderr)


# ---------------------------------------------------------------- finding commands


class Commands(TyperGroup):
    """The group of all commands; a module is imported when its command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        from twin.plugins import COMMANDS, names

        return [*BUILT_IN, *(name for name in names(COMMANDS) if name not in BUILT_IN)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = BUILT_IN.get(cmd_name)
        if place is not None:
            module, _, attribute = place.partition(":")
            return _command(cmd_name, getattr(import_module(module), attribute))
        from twin.plugins import COMMANDS, names

        return _command(cmd_name, _plugin(cmd_name)) if cmd_name in names(COMMANDS) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from twin.config_values import nearest

            there = self.list_commands(ctx)
            ctx.fail(f"there is no command {name}{nearest(name, there) or '; there are ' + ', '.join(there)}")
        return super().resolve_command(ctx, args)


def _plugin(name: str) -> Any:
    """What a plug-in adds; one that cannot be loaded still has its place in --help, and says why when it is run."""
    from twin.errors import CapabilityError
    from twin.plugins import COMMANDS, load

    try:
        return load(COMMANDS, name)
    except CapabilityError as error:
        why = error

        def broken() -> None:
            raise why

        broken.__doc__ = "(its plug-in cannot be loaded)"
        return broken


def _command(name: str, found: Any) -> Any:
    """A function, or a `typer.Typer` with commands of its own, as a command of this group."""
    app = found
    if not isinstance(found, typer.Typer):
        app = _app()
        app.command(name, epilog=EPILOG)(found)
    command = typer.main.get_command(app)
    command.name = name
    return command


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def _root() -> Any:
    app = _app(cls=Commands, no_args_is_help=True, epilog=EPILOG)
    app.callback()(_twin)
    return typer.main.get_command(app)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"dynatwin {version('dynatwin')}")
        raise typer.Exit


def _twin(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """A digital twin of an LLM inference cluster: replay a trace, read the report, compare."""


if __name__ == "__main__":
    main()
