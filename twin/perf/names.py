"""Names that a user can mistype: refused with the nearest known one. Never guesses silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from policies.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant, or None if none is close."""
    import difflib

    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not known: what it is, the nearest name, and all of them."""
    names = sorted(known)
    guess = nearest(name, names)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return ConfigError(f"{what} {name!r} is not known{hint} (known: {', '.join(names)})")


def pick(what: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or a `ConfigError` that says what could have been meant."""
    try:
        return table[name]
    except KeyError:
        raise unknown(what, name, table) from None
