"""The tree of a space: every walk ends at a legal candidate, near what was asked for, and none is given twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
from aiconfig_eval_builders import candidate

from aiconfig.axes import Tree, Value, axes_of
from aiconfig.candidate import Candidate

SPACE = [
    candidate(engine, mode, replicas=replicas, tp=tp)
    for engine, mode, replicas, tp in product(("vllm", "sglang"), ("agg", "disagg"), (1, 2, 4), (1, 2))
    if not (engine == "sglang" and tp == 2)
]


def _ask(wanted: dict[str, Value]) -> Callable[[str, tuple[Value, ...]], Value]:
    return lambda axis, choices: wanted.get(axis, choices[0])


def test_what_exists_is_found() -> None:
    tree = Tree(SPACE)
    for place, one in enumerate(SPACE):
        taken = tree.take(_ask(axes_of(one)))
        assert (taken.place, taken.axes) == (place, axes_of(one))
    assert tree.left == 0


def test_what_does_not_exist_is_the_nearest_that_does() -> None:
    asked = axes_of(candidate("sglang", replicas=4, tp=2))
    taken = Tree(SPACE).take(_ask(asked))
    assert SPACE[taken.place] == candidate("sglang", replicas=4, tp=1)


def test_a_neighbour_stands_in_for_what_was_taken() -> None:
    tree, asked = Tree(SPACE), _ask(axes_of(candidate("vllm", replicas=2)))
    found = [SPACE[tree.take(asked).place] for _ in range(4)]
    assert [(one.pools[0].replicas, one.pools[0].layout.tp) for one in found] == [(2, 1), (1, 1), (4, 1), (2, 2)]


def test_random_walks_visit_everything_once(seed: int) -> None:
    stream = random.Random(seed)
    tree = Tree(SPACE)
    places = [tree.take(lambda axis, choices: stream.choice(choices)).place for _ in SPACE]
    assert sorted(places) == list(range(len(SPACE)))
    assert tree.left == 0


def test_numbers_are_in_order_of_size_whatever_the_space_says() -> None:
    assert Tree(SPACE[::-1]).choices["mixed.replicas"] == (1, 2, 4)


def test_a_mark_counts_and_a_second_one_is_a_bug() -> None:
    tree = Tree(SPACE)
    tree.mark(3)
    assert tree.left == len(SPACE) - 1
    with pytest.raises(ValueError, match="taken before"):
        tree.mark(3)


def test_equal_candidates_are_a_bug() -> None:
    twice: list[Candidate] = [SPACE[0], SPACE[0]]
    with pytest.raises(ValueError, match="same axes"):
        Tree(twice)
