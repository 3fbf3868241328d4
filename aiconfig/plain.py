"""Frozen values as plain JSON values and back, by their annotations: what result.json is made of.

Equal values give equal text. What does not fit is refused with its place; nothing is filled in silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from policies.cluster.plain import JsonValue
from policies.errors import ConfigError

T = TypeVar("T")


def to_plain(value: object) -> JsonValue:
    """A tree of dataclasses, mappings, tuples and scalars as tables, lists and scalars. JSON has no word for what is
    not finite: that becomes its name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} has no plain form")


def from_plain(kind: type[T], plain: object, where: str) -> T:
    """The value of a dataclass that `to_plain` made `plain` of. Raises ConfigError with the place in `where`."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: must be a table")
    hints = get_type_hints(kind)
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass, says the caller
    for name in plain:
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is not known; it was written by another version")
    found = {}
    for name, one in known.items():
        if name in plain:
            found[name] = _value(hints[name], plain[name], f"{where}.{name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(f"{where}: {name!r} is missing; it was written by another version")
    return kind(**found)


def _value(hint: object, plain: object, where: str) -> object:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if plain is None and NoneType in args:
            return None
        return _value(next(arg for arg in args if arg is not NoneType), plain, where)
    if origin is tuple:
        if not isinstance(plain, list):
            raise ConfigError(f"{where}: must be a list")
        return tuple(_value(args[0], item, f"{where}[{at}]") for at, item in enumerate(plain))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(plain, Mapping):
            raise ConfigError(f"{where}: must be a table")
        return {str(key): _value(args[1], item, f"{where}.{key}") for key, item in plain.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return from_plain(hint, plain, where)
    if hint is Path:
        return Path(str(plain))
    return _scalar(hint, plain, where)


def _scalar(hint: object, plain: object, where: str) -> object:
    if get_origin(hint) is Literal:
        if plain in get_args(hint):
            return plain
        raise ConfigError(f"{where} = {plain!r}: must be one of {', '.join(map(str, get_args(hint)))}")
    if hint is float and plain in ("inf", "-inf", "nan"):
        return float(str(plain))
    if hint is float and isinstance(plain, int | float) and not isinstance(plain, bool):
        return plain
    if isinstance(hint, type) and type(plain) is hint:
        return plain
    raise ConfigError(f"{where} = {plain!r}: must be of type {getattr(hint, '__name__', hint)}")
