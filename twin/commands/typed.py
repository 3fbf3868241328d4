"""A table of options as a function that typer reads: a keyword for each option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from twin.commands.replay_line import Option, Values


def command_of(run: Callable[[Values], int], options: Sequence[Option], help_text: str) -> Callable[..., int]:
    """The command `run` with these options: it is given the values of those that are on the line."""

    def command(**values: Any) -> int:
        return run({name: value for name, value in values.items() if value not in (None, False, [])})

    parameters = [_parameter(option) for option in options]
    command.__doc__ = help_text
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(option: Option) -> Parameter:
    hint: Any = bool if not option.metavar else list[str] | None if option.many else str | None
    settings: dict[str, Any] = {"metavar": option.metavar or None, "help": option.help}
    flags = [flag for flag in (option.flag, option.short) if flag.startswith("-")]
    what = typer.Option(*flags, **settings) if flags else typer.Argument(**settings)
    default = None if option.metavar else False
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, what])
