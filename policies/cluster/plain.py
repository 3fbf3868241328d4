"""Events and actions as plain JSON values, and back.

A dataclass is a table of its fields, an enum value its name, a 64-bit hash a decimal string; how a field is written
follows from its annotation, so a new event or action needs no code here. A branch is written as its name: `BranchNames`
gives names and collects the definitions that a reader needs, `BranchTable` takes definitions and finds branches again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from policies.cluster import actions as _actions
from policies.cluster import events as _events
from policies.cluster import kv_events as _kv_events
from policies.cluster import scaling as _scaling
from policies.cluster import ticks as _ticks
from policies.cluster import traffic as _traffic
from policies.cluster import twin_asks as _twin_asks
from policies.cluster.actions import Action
from policies.cluster.blocks import BlockPath, BlockRun, Branch
from policies.cluster.events import Event
from policies.cluster.ids import BlockHash
from policies.cluster.kv_events import KvEvent
from policies.errors import JournalError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_Kind = TypeVar("_Kind", bound=Event | Action)


class BranchNames:
    """The writer's side. A branch is defined, ancestors first, when its name is asked for the first time.

    A branch that nothing holds any more is forgotten here too: memory is bounded by what is alive.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Branch, str] = WeakKeyDictionary()
        self._fresh: list[JsonValue] = []

    def name(self, branch: Branch) -> str:
        """The name of a branch: its hash as a decimal string."""
        name = self._names.get(branch)
        if name is not None:
            return name
        line: list[Branch] = []
        above: Branch | None = branch
        while above is not None and above not in self._names:
            line.append(above)
            above = above.parent
        for new in reversed(line):
            name = self._names[new] = str(new.hash)
            self._fresh.append(
                {
                    "hash": name,
                    "uid": new.uid,
                    "parent": self._names[new.parent] if new.parent is not None else None,
                    "start": new.start,
                    "from_key": new.from_key,
                    "key": str(new.keys[0]) if new.keys else None,
                }
            )
        return self._names[branch]

    def take_definitions(self) -> list[JsonValue]:
        """The definitions since the last call, in the order in which a reader needs them."""
        fresh, self._fresh = self._fresh, []
        return fresh


class BranchTable:
    """The reader's side. One name may be defined again: the content came back after everybody had dropped it."""

    def __init__(self) -> None:
        self._branches: dict[str, Branch] = {}

    def define(self, form: JsonValue) -> None:
        """Take one definition; its parent must be defined. Raises ValueError or KeyError for a damaged one."""
        found = as_table(form)
        parent, key = found["parent"], found["key"]
        self._branches[str(found["hash"])] = Branch(
            uid=as_int(found["uid"]),
            parent=self.branch(parent) if parent is not None else None,
            start=as_int(found["start"]),
            from_key=as_int(found["from_key"]),
            keys=[int(str(key))] if key is not None else None,
        )

    def branch(self, name: JsonValue) -> Branch:
        """The branch of that name. Raises ValueError for one that was not defined."""
        branch = self._branches.get(str(name))
        if branch is None:
            raise ValueError(f"branch {name!r} is used before it is defined")
        return branch


def encode(value: Event | Action, names: BranchNames) -> dict[str, JsonValue]:
    """An event or action as a table with its `type`. Raises JournalError for a type that is not registered."""
    kind = type(value)
    codec = _RECORDS.get(kind)
    if codec is None:
        known = ", ".join(module.__name__ for module in _MODULES)
        raise JournalError(f"{kind.__name__} is in none of {known}; only what is there can be written")
    return {"type": kind.__name__, **as_table(codec.encode(value, names))}


def decode_event(form: JsonValue, table: BranchTable) -> Event:
    """The event of a table made by `encode`. Raises ValueError or KeyError for a damaged one."""
    return _decode(form, _EVENTS, table)


def decode_action(form: JsonValue, table: BranchTable) -> Action:
    """The action of a table made by `encode`. Raises ValueError or KeyError for a damaged one."""
    return _decode(form, _ACTIONS, table)


def as_table(form: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(form, dict):
        raise ValueError(f"{form!r} is not a table")
    return form


def as_list(form: JsonValue) -> list[JsonValue]:
    if not isinstance(form, list):
        raise ValueError(f"{form!r} is not a list")
    return form


def as_int(form: JsonValue) -> int:
    if not isinstance(form, int) or isinstance(form, bool):
        raise ValueError(f"{form!r} is not a whole number")
    return form


# ---------------------------------------------------------------- by annotation


class _Codec(NamedTuple):
    encode: Callable[[object, BranchNames], JsonValue]
    decode: Callable[[JsonValue, BranchTable], object]


class _Field(NamedTuple):
    name: str
    codec: _Codec
    required: bool


def _plain(*kinds: type) -> _Codec:
    """A value that JSON has a form for; `kinds` are its types, exactly (a bool is no int)."""

    def encode(value: object, _: BranchNames) -> JsonValue:
        return value  # type: ignore[return-value]  # what JSON cannot hold is refused when the line is written

    def decode(form: JsonValue, _: BranchTable) -> object:
        if type(form) not in kinds:
            raise ValueError(f"{form!r} is not {' or '.join(kind.__name__ for kind in kinds)}")
        return form

    return _Codec(encode, decode)


def _encode_path(value: object, names: BranchNames) -> JsonValue:
    assert isinstance(value, BlockPath)
    return {"pieces": [[names.name(branch), end] for branch, end in value.pieces], "blocks": value.blocks}


def _decode_path(form: JsonValue, table: BranchTable) -> BlockPath:
    found = as_table(form)
    pieces = tuple((table.branch(name), as_int(end)) for name, end in map(as_list, as_list(found["pieces"])))
    return BlockPath(pieces, as_int(found["blocks"]))


def _encode_run(value: object, names: BranchNames) -> JsonValue:
    assert isinstance(value, BlockRun)
    return [names.name(value.branch), value.lo, value.hi]


def _decode_run(form: JsonValue, table: BranchTable) -> BlockRun:
    name, lo, hi = as_list(form)
    return BlockRun(table.branch(name), as_int(lo), as_int(hi))


def _encode_kv_event(value: object, names: BranchNames) -> JsonValue:
    assert isinstance(value, KvEvent)
    return encode(value, names)


_LEAVES: Mapping[object, _Codec] = {
    bool: _plain(bool),
    int: _plain(int),
    float: _plain(float, int),
    str: _plain(str),
    BlockHash: _Codec(lambda value, _: str(value), lambda form, _: BlockHash(int(str(form)))),
    BlockPath: _Codec(_encode_path, _decode_path),
    BlockRun: _Codec(_encode_run, _decode_run),
    KvEvent: _Codec(_encode_kv_event, lambda form, table: _decode(form, _KV_EVENTS, table)),  # one of several types
}


def _codec(hint: object) -> _Codec:
    """How values of one annotated type are written. Raises TypeError for a type that has no form yet."""
    leaf = _LEAVES.get(hint)
    if leaf is not None:
        return leaf
    if hasattr(hint, "__supertype__"):  # a NewType is written as what it stands on
        return _codec(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(args) == 2 and NoneType in args:
        return _optional(_codec(next(arg for arg in args if arg is not NoneType)))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(_codec(args[0]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"there is no plain form for a field of type {hint}; give it one in {__name__}")


def _optional(inner: _Codec) -> _Codec:
    return _Codec(
        lambda value, names: None if value is None else inner.encode(value, names),
        lambda form, table: None if form is None else inner.decode(form, table),
    )


def _sequence(inner: _Codec) -> _Codec:
    def encode(value: object, names: BranchNames) -> JsonValue:
        assert isinstance(value, tuple)
        return [inner.encode(item, names) for item in value]

    return _Codec(encode, lambda form, table: tuple(inner.decode(item, table) for item in as_list(form)))


def _enum(kind: type[Enum]) -> _Codec:
    def encode(value: object, _: BranchNames) -> JsonValue:
        assert isinstance(value, Enum)
        return value.name

    def decode(form: JsonValue, _: BranchTable) -> Enum:
        if str(form) not in kind.__members__:
            raise ValueError(f"{form!r} is not one of {', '.join(kind.__members__)}")
        return kind[str(form)]

    return _Codec(encode, decode)


def _record(kind: type) -> _Codec:
    """A dataclass. A field that is absent takes its default, one that is not known is an error."""
    hints = get_type_hints(kind)
    members = tuple(
        _Field(f.name, _codec(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    )
    known = frozenset(member.name for member in members)

    def encode(value: object, names: BranchNames) -> JsonValue:
        return {name: codec.encode(getattr(value, name), names) for name, codec, _ in members}

    def decode(form: JsonValue, table: BranchTable) -> object:
        found = as_table(form)
        strange = found.keys() - known
        if strange:
            raise ValueError(f"{kind.__name__} has no field {min(strange)!r}")
        lacking = [name for name, _, required in members if required and name not in found]
        if lacking:
            raise ValueError(f"{kind.__name__} lacks its field {lacking[0]!r}")
        return kind(**{name: codec.decode(found[name], table) for name, codec, _ in members if name in found})

    return _Codec(encode, decode)


def _kinds(names: Mapping[str, object], base: type[_Kind]) -> dict[str, type[_Kind]]:
    """The dataclasses among a module's names that are a kind of `base`."""
    return {name: kind for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, base)}


_MODULES = (_events, _kv_events, _actions, _traffic, _scaling, _twin_asks, _ticks)
_NAMES: Mapping[str, object] = {name: kind for module in _MODULES for name, kind in vars(module).items()}

_EVENTS: Mapping[str, type[Event]] = _kinds(_NAMES, Event)
_KV_EVENTS: Mapping[str, type[KvEvent]] = _kinds(vars(_kv_events), KvEvent)
_ACTIONS: Mapping[str, type[Action]] = _kinds(_NAMES, Action)
_RECORDS: Mapping[type, _Codec] = {kind: _record(kind) for kind in (*_EVENTS.values(), *_ACTIONS.values())}


def _decode(form: JsonValue, kinds: Mapping[str, type[_Kind]], table: BranchTable) -> _Kind:
    found = dict(as_table(form))
    name = found.pop("type")
    kind = kinds.get(str(name))
    if kind is None:
        raise ValueError(f"type {name!r} is not one of {', '.join(sorted(kinds))}")
    value = _RECORDS[kind].decode(found, table)
    assert isinstance(value, kind)
    return value
