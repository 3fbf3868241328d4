"""Where a quadratic in the step index changes its sign. Used to cut decode pieces; never rounds across a root."""

from __future__ import annotations

import math

from twin.perf.protocol import FOREVER_STEPS, DecodePiece


def slower(piece: DecodePiece, growth: float, factor: float = 1.0) -> DecodePiece:
    """A piece whose context grows at `growth` (0 < growth <= 1) times the pace, and whose steps last `factor` times."""
    steps = piece.steps if piece.steps >= FOREVER_STEPS else int((piece.steps - 1) / growth) + 1
    return DecodePiece(piece.g0 * factor, piece.g1 * growth * factor, piece.g2 * growth * growth * factor, steps)


def at_least(piece: DecodePiece, least_s: float) -> DecodePiece:
    """A piece whose steps never get shorter, none of them below `least_s`; it ends where they would rise above that."""
    if piece.g0 >= least_s:
        return piece
    steps = steps_on_this_side(piece.g0 - least_s, piece.g1, piece.g2)
    return DecodePiece(least_s, 0.0, 0.0, min(piece.steps, steps))


def steps_on_this_side(g0: float, g1: float, g2: float) -> int:
    """How many steps j = 0, 1, ... surely have g0 + g1*j + g2*j*j on the side of 0 on which j = 0 lies.

    Conservative: it may stop one step before the crossing, never behind it, and is at least 1.
    """
    root = _first_root(g0, g1, g2)
    return FOREVER_STEPS if root is None or root >= FOREVER_STEPS else max(1, math.floor(root))


def _first_root(c: float, b: float, a: float) -> float | None:
    """The smallest root > 0 of a x^2 + b x + c, if any (stable form: no difference of nearly equal numbers)."""
    if a == 0.0:
        root = -c / b if b else -1.0
        return root if root > 0.0 else None
    discriminant = b * b - 4.0 * a * c
    if discriminant < 0.0:
        return None
    q = -0.5 * (b + math.copysign(math.sqrt(discriminant), b))
    roots = [q / a] + ([c / q] if q else [])
    return min((root for root in roots if root > 0.0), default=None)
