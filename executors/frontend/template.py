"""Chat templates as models bring them (Jinja), filled in a sandbox: they see the messages and nothing else."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from executors.frontend.errors import VALIDATION, ApiError
from policies.errors import ConfigError


class ChatTemplate:
    """One template with the names of the model's tokens (`bos_token`, ...)."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = _now
        try:
            self._template = sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt, up to where the answer begins. Raises ApiError where the template takes no such messages."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError) as error:
            said = str(error)[:200] if isinstance(error, _Refused) else "it cannot be filled with them"
            message = f"messages: the chat template of the model does not take them: {said}"
            raise ApiError(VALIDATION, message, param="messages") from None


class _Refused(TemplateError):
    """The template itself says no."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
