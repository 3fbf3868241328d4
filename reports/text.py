"""Numbers as people read them, the same in the terminal, on the page and in a comparison.

A unit is always shown, and what is undefined reads "n/a", never 0.
"""

from __future__ import annotations

from typing import Final

NA: Final = "n/a"


def count(value: float) -> str:
    """12,345."""
    return f"{value:,.0f}"


def counted(value: int, noun: str) -> str:
    """1 request, 12,345 requests."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def figures(value: float | None, digits: int = 3) -> str:
    """About `digits` significant figures, without exponent in the usual range: 0.0332, 7.98, 1,148."""
    if value is None:
        return NA
    if not value:
        return "0"
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.{digits}g}"
    places = max(digits - len(str(int(size))), 0) if size >= 1 else digits + (size < 0.1) + (size < 0.01)
    return f"{value:,.{places}f}"


def large(value: float | None) -> str:
    """1.17 M."""
    if value is None:
        return NA
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,.0f}"


def share(value: float | None) -> str:
    """23.1 %."""
    return NA if value is None else f"{value * 100:.1f} %" if value >= 0.001 or not value else f"{value * 100:.3g} %"


def change(value: float | None) -> str:
    """A relative change with its sign: +4.9 %, -0.004 %, +2,320 %."""
    return NA if value is None else f"{'+' if value > 0 else ''}{figures(value * 100)} %"


def time(value_s: float | None) -> str:
    """A time in the unit that suits it: 370 µs, 12.3 ms, 1.23 s, 40.5 min, 7.0 d."""
    if value_s is None:
        return NA
    size = abs(value_s)
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36_000.0, 1 / 60, "min")):
        if size < limit and (value_s or unit == "s"):
            return f"{figures(value_s * factor)} {unit}"
    return f"{value_s / 3600:.1f} h" if size < 360_000.0 else f"{value_s / 86_400:.1f} d"


def in_unit(value_s: float | None, unit: str) -> str:
    """A time in a given unit (ms or s), without the unit."""
    return NA if value_s is None else figures(value_s * {"ms": 1e3, "s": 1.0}[unit])


def common_unit(*values_s: float | None) -> str:
    """ms or s, for a row of times that are read together."""
    known = [value for value in values_s if value is not None]
    return "s" if known and max(known) >= 10.0 else "ms"
