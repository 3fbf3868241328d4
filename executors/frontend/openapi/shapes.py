"""JSON schemas in short, as the parsers of requests read: null is the same as absent, unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Schema = Mapping[str, object]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def text(longest: int | None = None, **more: object) -> Schema:
    return _sized({"type": ["string", "null"], **more}, maxLength=longest)


def flag() -> Schema:
    return {"type": ["boolean", "null"]}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    return _sized({"type": ["integer", "null"]}, minimum=low, maximum=high)


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Schema:
    return _sized({"type": ["number", "null"]}, minimum=low, maximum=high, exclusiveMinimum=above)


def items(of: Schema, least: int | None = None, most: int | None = None, *, null: bool = True) -> Schema:
    return _sized({"type": ["array", "null"] if null else "array", "items": of}, minItems=least, maxItems=most)


def choice(*values: object) -> Schema:
    return {"enum": [*values, None]}


def keyed(value: Schema, keys: str | None = None) -> Schema:
    """An object whose keys are the client's."""
    made: Schema = {"type": ["object", "null"], "additionalProperties": value}
    return made if keys is None else {**made, "propertyNames": {"pattern": keys}}


def fields(properties: Mapping[str, Schema], *required: str, null: bool = False, unknown: bool = False) -> Schema:
    """An object of a request. `unknown`: keys beside `properties` are let pass."""
    made: Schema = {"type": ["object", "null"] if null else "object", "properties": dict(properties)}
    return {**made, "required": list(required), "additionalProperties": unknown}


def told(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """An object of an answer: all but `optional` are always there."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def is_text(**more: object) -> Schema:
    return {"type": "string", **more}


def is_count() -> Schema:
    return {"type": "integer", "minimum": 0}


def is_one_of(values: Sequence[object]) -> Schema:
    return {"enum": list(values)}


def _sized(made: Schema, **bounds: object) -> Schema:
    return {**made, **{name: bound for name, bound in bounds.items() if bound is not None}}
