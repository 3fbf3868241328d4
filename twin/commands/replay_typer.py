"""`twin replay` as typer reads it: the table of `replay_line` as one function with a keyword for each option."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from twin.commands.replay import replay as run
from twin.commands.replay_line import OPTIONS, Option


def replay(**values: Any) -> int:
    """Simulate a trace on a cluster and write a report."""
    return run({name: value for name, value in values.items() if value not in (None, False, [])})


def _parameter(option: Option) -> Parameter:
    hint: Any = bool if not option.metavar else list[str] | None if option.many else str | None
    settings: dict[str, Any] = {"metavar": option.metavar or None, "help": option.help}
    flags = [flag for flag in (option.flag, option.short) if flag.startswith("-")]
    what = typer.Option(*flags, **settings) if flags else typer.Argument(**settings)
    default = None if option.metavar else False
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, what])


_PARAMETERS = [_parameter(option) for option in OPTIONS]
replay.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]
replay.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
