"""GPUs: as much of what is wanted as fits, never above the budget, never more of a role than was wanted.

Per role: workers wanted, the least there must be, GPUs of one worker. The ceiling is hard. The floor only keeps the
total from shrinking below it, by a tolerance of one worker; it never invents growth.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.errors import ConfigError
from policies.frozen import frozen


@frozen
class Share:
    """One role's claim."""

    want: int
    least: int
    gpus: int

    @property
    def total(self) -> int:
        """GPUs of what is wanted."""
        return self.want * self.gpus


def total(counts: Sequence[int], shares: Sequence[Share]) -> int:
    """GPUs of so many workers each."""
    return sum(n * share.gpus for n, share in zip(counts, shares, strict=True))


def fit(shares: Sequence[Share], budget: int) -> tuple[int, ...]:
    """Workers for each of one or two roles (prefill first) within `budget` GPUs. Raises ConfigError where the least
    does not fit.

    Two roles: the first gets its share of the budget by what was wanted (at least its least, at most what the other's
    least leaves), the second what is left, and what that leaves over goes to the first (cases C19, G1 to G9).
    """
    least = sum(share.least * share.gpus for share in shares)
    if least > budget:
        raise ConfigError(f"the least that there must be needs {least} GPUs, and the budget is {budget}")
    wanted = sum(share.total for share in shares)
    if wanted <= budget:
        return tuple(share.want for share in shares)
    if len(shares) == 1:
        return (min(shares[0].want, budget // shares[0].gpus),)
    p, d = shares
    first = max(p.least, min((budget - d.least * d.gpus) // p.gpus, p.want * budget // wanted))
    second = min(d.want, max(d.least, (budget - first * p.gpus) // d.gpus))
    left = budget - first * p.gpus - second * d.gpus
    return min(p.want, first + left // p.gpus), second


def fit_from(shares: Sequence[Share], current: Sequence[int], budget: int) -> tuple[int, ...]:
    """As `fit`, but no role that wants to stay or grow shrinks for another that wants to grow; only to get back under
    the ceiling may any role shrink."""
    kept = [
        Share(want=share.want, least=max(share.least, min(n, share.want)), gpus=share.gpus)
        for share, n in zip(shares, current, strict=True)
    ]
    if sum(share.least * share.gpus for share in kept) <= budget:
        return fit(kept, budget)
    return fit(shares, budget)


def tolerance(shares: Sequence[Share], most: int | None, least: int | None) -> int:
    """GPUs by which the floor gives way: those of the largest worker, where both bounds are set."""
    return max(share.gpus for share in shares) if most is not None and least is not None else 0


def above_floor(
    counts: Sequence[int], current: Sequence[int], shares: Sequence[Share], most: int | None, least: int | None
) -> tuple[int, ...]:
    """The counts with as few of their shrinking steps as needed taken back, those of whoever shrinks most first, so
    that the total is not below the floor (or not below what there is now, where that is below it already)."""
    kept = list(counts)
    if least is None:
        return tuple(kept)
    bound = min(least - tolerance(shares, most, least), total(current, shares))
    while total(kept, shares) < bound:
        short = [i for i, n in enumerate(kept) if n < current[i]]
        if not short:
            break
        kept[max(short, key=lambda i: (current[i] - kept[i], -shares[i].gpus, -i))] += 1
    return tuple(kept)
