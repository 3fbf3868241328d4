"""JSON as a server of strangers reads it: nothing that two readers could take differently, nothing without bounds."""

from __future__ import annotations

import json
import math
from typing import Final, NoReturn

from executors.frontend.errors import VALIDATION, ApiError
from executors.frontend.settings import Limits

_LEAST: Final = -(2**63)
_MOST: Final = 2**64 - 1
"""Of 64 bits, signed or not: what every reader behind us can hold."""


def read_object(body: bytes, limits: Limits) -> dict[str, object]:
    """The object in `body`. Raises ApiError for anything else, duplicate keys, NaN, depth, long or broken strings."""
    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _too_deep(limits) from None
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:
        raise _bad("the body has a number with too many digits") from None
    if not isinstance(document, dict):
        raise _bad(f"the body is {_kind_of(document)}; send an object")
    _check(document, limits)
    return document


def _check(document: object, limits: Limits) -> None:
    level: list[object] = [document]
    for _ in range(limits.json_depth):
        below: list[object] = []
        for value in level:
            match value:
                case dict():
                    for key in value:
                        _check_text(key, limits)
                    below.extend(value.values())
                case list():
                    below.extend(value)
                case _:
                    _check_leaf(value, limits)
        if not below:
            return
        level = below
    for value in level:
        if isinstance(value, dict | list):
            raise _too_deep(limits)
        _check_leaf(value, limits)


def _check_leaf(value: object, limits: Limits) -> None:
    match value:
        case str():
            _check_text(value, limits)
        case int() if not _LEAST <= value <= _MOST:
            raise _bad(f"the body has a whole number beyond {_LEAST} to {_MOST}")
        case float() if not math.isfinite(value):
            raise _bad("the body has a number beyond all bounds")


def _check_text(text: str, limits: Limits) -> None:
    if len(text) > limits.string_chars:
        raise _bad(f"the body has a string of {len(text)} characters; at most {limits.string_chars} are taken")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _bad("the body has a string with half a surrogate pair") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad(f"the key {twice[:64]!r} stands twice in one object")
    return made


def _constant(name: str) -> NoReturn:
    raise _bad(f"the body has {name}, which is not JSON")


def _kind_of(value: object) -> str:
    return {"list": "a list", "str": "a string", "NoneType": "null"}.get(
        type(value).__name__, "a number or a truth value"
    )


def _too_deep(limits: Limits) -> ApiError:
    return _bad(f"the body is nested deeper than {limits.json_depth} levels")


def _bad(message: str) -> ApiError:
    return ApiError(VALIDATION, message, code="invalid_json")
