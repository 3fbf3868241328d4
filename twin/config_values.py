"""One value of the configuration: from what was given to what is meant, within its limits, or refused in one line.

Nothing here knows which keys exist. A refusal says where, which key, the value, the limit and the default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from policies.errors import CapabilityError, ConfigError
from twin.config_schema import NAMES, Limits

Key = tuple[str | int, ...]


class Given(NamedTuple):
    """A value as it was given; `text` when it came as text (a flag or --set) and has no type yet."""

    value: Any
    origin: str
    text: bool = False


WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "Path": "a path",
    NAMES: 'a list of different names, as in ["a", "b"]',
}


def checked(given: Given, shown: str, kind: str, default: object, limits: Limits) -> Any:
    """The value of key `shown` as `kind` (a name in WORDS). Raises ConfigError or CapabilityError."""

    def refuse(why: str) -> NoReturn:
        usual = limits.absent if default is None else f"the default is {toml_value(default)}"
        text = f"{shown} = {toml_value(given.value)}: {why} ({limits.meaning}); {usual}"
        raise ConfigError(f"{given.origin}: {text}")

    value = _typed(given, kind)
    if value is None:
        refuse(f"must be {WORDS[kind]}")
    if kind in ("int", "float"):
        if limits.low is not None and limits.low == limits.high and value > limits.high:
            later = f"{limits.meaning} above {limits.high} is not available in this version"
            raise CapabilityError(f"{given.origin}: {shown} = {value}: {later}")
        if limit := _outside(value, limits):
            refuse(f"must be {limit}")
        if limits.choices and str(value) not in limits.choices:
            refuse(f"must be {_listed(limits.choices)}")
    elif limits.choices:
        return _chosen(str(value), given, shown, limits) or refuse(
            f"must be {_listed(limits.choices)}{nearest(_plain(value), limits.choices)}"
        )
    elif value == "":
        refuse("must not be empty")
    return value


def _typed(given: Given, kind: str) -> Any:
    """The value as `kind`, None if it is not one."""
    value = given.value
    if kind == "bool":
        return {"true": True, "false": False}.get(value.lower()) if given.text else _only(value, bool)
    if kind == "int":
        if given.text:
            return int(value) if re.fullmatch(r"[+-]?\d(_?\d){0,30}", value) else None
        return None if isinstance(value, bool) else _only(value, int)
    if kind == "float":
        return None if isinstance(value, str) and not given.text else number_of(value)
    if kind == "Path":
        return Path(value) if isinstance(value, str | Path) and str(value) else None
    if kind == NAMES:
        return _names(value.split(",") if given.text and value else value or [])
    text = _only(value, str)
    return _unquoted(text) if given.text and text is not None else text


def _names(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return None
    names = tuple(name.strip() for name in value)
    return names if all(names) and len({*names}) == len(names) else None


def _only(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def number_of(value: object) -> float | None:
    """A number, or text that reads as one, as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _outside(value: float, limits: Limits) -> str:
    """Which limit a number breaks, in words; empty if none."""
    if not math.isfinite(value):
        return "finite"
    if limits.low is not None and value < limits.low:
        return f"{limits.low} or more"
    if limits.above is not None and value <= limits.above:
        return f"more than {limits.above}"
    if limits.high is not None and value > limits.high:
        return f"{limits.high} or less"
    return ""


def _plain(value: str) -> str:
    return value.lower().replace("_", "-")


def _chosen(value: str, given: Given, shown: str, limits: Limits) -> str | None:
    """The choice that was meant (case does not matter, underscores stand for dashes), None if there is none."""
    for choice in limits.choices:
        if _plain(choice) == _plain(value):
            return choice
    if limits.plugins:
        from twin.plugins import names

        return next((name for name in names(limits.plugins) if _plain(name) == _plain(value)), None)
    return None


def parameter(given: Given, shown: str) -> float | str | bool:
    """A latency model's own value: what it means is checked by the model, here only that it is one plain value."""
    value = given.value
    if given.text:
        words = {"true": True, "false": False}
        number = number_of(value)
        value = words.get(value.lower(), _unquoted(value) if number is None else number)
    if isinstance(value, int) and not isinstance(value, bool):
        value = number_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{given.origin}: {shown} = {given.value}: must be finite")
    if not isinstance(value, bool | float | str):
        raise ConfigError(f"{given.origin}: {shown} = {given.value!r}: must be one number, text, true or false")
    return value


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    import json

    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _listed(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def nearest(name: str, names: Iterable[str], *, last: bool = False) -> str:
    """`; did you mean ...` with the nearest of `names`, empty if none is near; `last` compares their last parts."""
    import difflib

    by_word = {full.rpartition(".")[2] if last else full: full for full in names}
    near = difflib.get_close_matches(name, by_word, n=1, cutoff=0.6)
    return f"; did you mean {by_word[near[0]]}" if near else ""
