"""The choices that make a candidate, one by one, and the tree of those that a space has: what a sampler works on.

A sampler names a value for each axis in turn; where the tree has none such, the nearest that leads to a candidate which
was not taken yet is used. So every point that is asked for is legal, and none is asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from aiconfig.candidate import Candidate
from policies.frozen import frozen

Value: TypeAlias = int | str


def axes_of(candidate: Candidate, *, served: bool = False) -> dict[str, Value]:
    """What a candidate chose, axis by axis, in the order in which it is asked for; with `served` how it is served."""
    axes: dict[str, Value] = {"engine": candidate.engine, "mode": candidate.mode, "nextn": candidate.nextn}
    for pool in candidate.pools:
        role = pool.role
        axes |= {
            f"{role}.gpu": pool.gpu,
            f"{role}.layout": pool.layout.label(),
            f"{role}.weights": pool.weights,
            f"{role}.kv": pool.kv,
            f"{role}.max_num_seqs": pool.max_num_seqs,
            f"{role}.max_num_batched_tokens": pool.max_num_batched_tokens,
            f"{role}.replicas": pool.replicas,
        }
    if served:
        serving = candidate.serving
        axes |= {"router": serving.router, "host_kv": serving.host_kv_bytes, "disk_kv": serving.disk_kv_bytes}
    return axes


@frozen
class Taken:
    """A candidate out of the tree, by its place in the space, and what it chose."""

    place: int
    axes: Mapping[str, Value]


class _Node:
    __slots__ = ("axis", "branches", "left", "place")

    def __init__(self) -> None:
        self.axis = ""
        self.branches: dict[Value, _Node] = {}
        self.left = 0  # candidates below that were not taken
        self.place: int | None = None


class Tree:
    """The candidates of a space by their axes, how they are served among them if that differs anywhere. `choices` are
    all values of each axis, in order."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        served = len({candidate.serving for candidate in candidates}) > 1
        self._axes = [axes_of(candidate, served=served) for candidate in candidates]
        self._root = _Node()
        values: dict[str, dict[Value, None]] = {}
        for place, axes in enumerate(self._axes):
            node = self._root
            node.left += 1
            for axis, value in axes.items():
                values.setdefault(axis, {})[value] = None
                node.axis = axis
                node = node.branches.setdefault(value, _Node())
                node.left += 1
            if node.place is not None:
                raise ValueError(f"two candidates have the same axes: {axes}")
            node.place = place
        self.choices: dict[str, tuple[Value, ...]] = {axis: _in_order(found) for axis, found in values.items()}
        self._rank = {axis: {value: at for at, value in enumerate(found)} for axis, found in self.choices.items()}

    @property
    def left(self) -> int:
        """Candidates that were not taken."""
        return self._root.left

    def take(self, ask: Callable[[str, tuple[Value, ...]], Value]) -> Taken:
        """The candidate that `ask` (axis, all its choices) leads to, or the nearest that is left; it is then taken."""
        node = self._root
        while node.place is None:
            node = self._nearest(node, ask(node.axis, self.choices[node.axis]))
        return self.mark(node.place)

    def mark(self, place: int) -> Taken:
        """Take a candidate by its place."""
        node = self._root
        path = [node]
        for value in self._axes[place].values():
            node = node.branches[value]
            path.append(node)
        if not node.left:
            raise ValueError(f"candidate {place} was taken before")
        for step in path:
            step.left -= 1
        return Taken(place=place, axes=self._axes[place])

    def _nearest(self, node: _Node, wanted: Value) -> _Node:
        """The branch with candidates left whose value is nearest in order; of two, the one before."""
        ranks = self._rank[node.axis]
        at = ranks[wanted]
        open_ = [value for value, branch in node.branches.items() if branch.left]
        return node.branches[min(open_, key=lambda value: (abs(ranks[value] - at), ranks[value]))]


def _in_order(found: Iterable[Value]) -> tuple[Value, ...]:
    """Numbers by size; names as they came."""
    values = list(found)
    numbers = sorted(value for value in values if isinstance(value, int))
    return tuple(numbers) if len(numbers) == len(values) else tuple(values)
