"""Least squares in plain Python: small problems, the same answer on every machine.

A linear algebra library may differ in the last bit between hosts, and a journal must replay everywhere. Problems here
have at most a few dozen columns and a few hundred rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SINGULAR = 1e-10
"""A column shorter than this share of its length before elimination says nothing new."""


def solve(rows: Sequence[Sequence[float]], y: Sequence[float]) -> list[float] | None:
    """The x of least |rows x - y|², by modified Gram-Schmidt; None where it is not unique.

    `rows` is n rows of m values, n >= m.
    """
    if not rows or len(rows) < len(rows[0]):
        return None
    basis: list[list[float]] = [list(column) for column in zip(*rows, strict=True)]
    m = len(basis)
    upper = [[0.0] * m for _ in range(m)]
    rest = list(y)
    along = [0.0] * m
    for j in range(m):
        column = basis[j]
        length = math.sqrt(dot(column, column))
        for i in range(j):
            upper[i][j] = dot(basis[i], column)
            column = [a - upper[i][j] * b for a, b in zip(column, basis[i], strict=True)]
        left = math.sqrt(dot(column, column))
        if left <= _SINGULAR * length or length == 0:
            return None
        upper[j][j] = left
        basis[j] = [a / left for a in column]
        along[j] = dot(basis[j], rest)
        rest = [a - along[j] * b for a, b in zip(rest, basis[j], strict=True)]
    x = [0.0] * m
    for j in range(m - 1, -1, -1):
        x[j] = (along[j] - sum(upper[j][k] * x[k] for k in range(j + 1, m))) / upper[j][j]
    return x


def solve_ridge(rows: Sequence[Sequence[float]], y: Sequence[float], weights: Sequence[float]) -> list[float] | None:
    """The x of least |rows x - y|² + sum of weights[j] x[j]²; None where it is not unique."""
    m = len(weights)
    extra = [[math.sqrt(w) if i == j else 0.0 for i in range(m)] for j, w in enumerate(weights) if w > 0]
    return solve([*rows, *extra], [*y, *(0.0 for _ in extra)])


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True))
