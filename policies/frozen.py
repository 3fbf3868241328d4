"""What events, orders, settings and reports are made of: records that never change.

`frozen` is `dataclass(frozen=True, slots=True, kw_only=True)`, whose comparison, hash and text all classes share. A
dataclass compiles these for each class, and a run defines more than a hundred before it does anything: 0.04 s. It must
never mean anything else than that dataclass does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[_T]) -> type[_T]:
    """A dataclass with slots, whose fields are given by name and never change."""
    own = cls.__dict__
    made = dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)
    for name, method in _SHARED.items():
        if name not in own:
            setattr(made, name, method)
    return made


def _compared(record: Any) -> tuple[object, ...]:
    return tuple(getattr(record, one.name) for one in fields(record) if one.compare)


def _eq(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return _compared(self).__hash__()  # nothing may be ordered by it


def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({shown})"


_SHARED: dict[str, Callable[..., object]] = {"__eq__": _eq, "__hash__": _hash, "__repr__": _repr}
