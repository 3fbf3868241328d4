"""The front: what no other is better than in one figure without being worse in another. Larger is better in all.

Those that break a limit are never on it. Equals are told apart by simplicity: fewer GPUs, less pp, dp, tp, the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from aiconfig.estimate import Estimate

T = TypeVar("T")
Axis = Callable[[Estimate], float | None]

AXES: Final = ("tok/s/GPU", "tok/s/user")
"""The figures of the usual front, as their names are printed."""


def default_axes(gpus_bought: int) -> tuple[Axis, Axis]:
    """Output tokens a second for each GPU that is paid for, and for each user."""
    return (lambda one: one.output_tokens_per_s / gpus_bought, lambda one: one.tokens_per_s_per_user)


def front(items: Iterable[T], estimate_of: Callable[[T], Estimate], axes: Sequence[Axis]) -> list[T]:
    """The items that none dominates, best on the first axis first. An item that lacks a figure is left out; of equals
    the simplest stays."""
    known = []
    for item in items:
        figures = tuple(axis(estimate_of(item)) for axis in axes)
        if not any(figure is None or figure != figure for figure in figures):
            known.append((figures, estimate_of(item).candidate.simplicity, item))
    ordered = sorted(known, key=lambda one: (tuple(-figure for figure in one[0] if figure is not None), one[1]))
    kept: list[tuple[tuple[float | None, ...], T]] = []
    for figures, _, item in ordered:
        if not any(_covers(other, figures) for other, _ in kept):
            kept.append((figures, item))
    return [item for _, item in kept]


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """At least as good in everything, and better in something."""
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def _covers(one: tuple[float | None, ...], other: tuple[float | None, ...]) -> bool:
    """At least as good in everything; all figures are there."""
    return all(a >= b for a, b in zip(one, other, strict=True))  # type: ignore[operator]  # None was left out above
