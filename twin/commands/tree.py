"""All commands as a typer tree.

A command's module is imported when the command is asked for; plug-ins are looked for when no built-in name fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from twin.errors import CapabilityError
from twin.plugins import COMMANDS, load, names

# Command -> where its function, or its group of commands, is.
BUILT_IN = {
    "replay": "twin.commands.replay_typer:replay",
    "compare": "twin.commands.runs:compare",
    "report": "twin.commands.runs:report",
    "explain": "twin.commands.explain:explain",
    "sweep": "twin.commands.sweep:sweep",
    "plan": "twin.commands.plan:plan",
    "forecast": "twin.commands.forecast:forecast",
    "synth": "twin.commands.traces:synth",
    "import": "twin.commands.traces:import_",
    "traces": "twin.commands.traces:traces",
    "calibrate": "twin.commands.calibrate:calibrate",
    "record": "twin.commands.record:record",
    "models": "twin.commands.catalogue:models",
    "hardware": "twin.commands.catalogue:hardware",
}
EPILOG = "Errors are one line on stderr; --debug anywhere on the line shows where they came from."


class Commands(TyperGroup):
    """A group of commands, each at its place (module:attribute). A program with commands of its own has a subclass."""

    places: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = self.places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        return _command(cmd_name, getattr(import_module(module), attribute))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from twin.config_values import nearest

            there = self.list_commands(ctx)
            ctx.fail(f"there is no command {name}{nearest(name, there) or '; there are ' + ', '.join(there)}")
        return super().resolve_command(ctx, args)


class _TwinCommands(Commands):
    """Ours, and those that plug-ins add."""

    places = BUILT_IN

    def list_commands(self, ctx: Any) -> list[str]:
        return [*BUILT_IN, *(name for name in names(COMMANDS) if name not in BUILT_IN)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in BUILT_IN:
            return super().get_command(ctx, cmd_name)
        return _command(cmd_name, _plugin(cmd_name)) if cmd_name in names(COMMANDS) else None


def root() -> Any:
    """The whole tree of `twin` as a click command."""
    return tree(_TwinCommands, _twin)


def tree(commands: type[Commands], callback: Callable[..., None]) -> Any:
    """A group of commands as a click command; what `callback` takes are options of the program itself."""
    app = _app(cls=commands, no_args_is_help=True, epilog=EPILOG)
    app.callback()(callback)
    return typer.main.get_command(app)


def usage_error() -> type[Any]:
    """The base of click's own errors, wherever this version of typer keeps click."""
    return next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _command(name: str, found: Any) -> Any:
    """A function, or a `typer.Typer` with commands of its own, as a command of the tree."""
    app = found
    if not isinstance(found, typer.Typer):
        app = _app()
        app.command(name, epilog=EPILOG)(found)
    command = typer.main.get_command(app)
    command.name = name
    return command


def _plugin(name: str) -> Any:
    """What a plug-in adds; one that cannot be loaded still has its place in --help, and says why when it is run."""
    try:
        return load(COMMANDS, name)
    except CapabilityError as error:
        why = error

        def broken() -> None:
            raise why

        broken.__doc__ = "(its plug-in cannot be loaded)"
        return broken


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"dynatwin {version('dynatwin')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
]


def _twin(version: Version = False) -> None:
    """A digital twin of an LLM inference cluster: replay a trace, read the report, compare."""
