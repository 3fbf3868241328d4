"""The block pool in runs: what is found, what is evicted first, what is counted."""

from __future__ import annotations

import pytest

from policies.cluster.blocks import Branch, ContentTree
from policies.errors import InvariantError
from twin.engine.pool import BlockPool, Hold


def filled(pool: BlockPool, branch: Branch, lo: int, hi: int) -> list[Hold]:
    """Blocks taken and published by one owner."""
    holds: list[Hold] = []
    pool.take(hi - lo)
    pool.publish(holds, branch, lo, hi)
    return holds


@pytest.fixture
def branch() -> Branch:
    return ContentTree(16, 16).path(list(range(8)), 128).pieces[0][0]


def test_a_published_block_is_found_at_once(branch: Branch) -> None:
    pool = BlockPool(10)
    filled(pool, branch, 0, 4)
    match = pool.match(((branch, 8),), 8)
    assert (match.blocks, match.inactive) == (4, 0)


def test_what_nobody_holds_is_found_and_counts_as_inactive(branch: Branch) -> None:
    pool = BlockPool(10)
    pool.release(filled(pool, branch, 0, 4), private=0)
    assert (pool.free, pool.inactive, pool.active) == (6, 4, 0)
    assert pool.match(((branch, 8),), 8).inactive == 4


def test_looking_is_limited_and_touches_nothing(branch: Branch) -> None:
    pool = BlockPool(10)
    pool.release(filled(pool, branch, 0, 4), private=0)
    assert pool.match(((branch, 8),), 2).blocks == 2
    assert pool.match(((branch, 3),), 8).blocks == 3
    assert (pool.free, pool.inactive) == (6, 4)


def test_suffixes_die_before_prefixes(branch: Branch) -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, branch, 0, 4), private=0)
    pool.take(1)
    assert pool.match(((branch, 8),), 8).blocks == 3


def test_an_earlier_release_dies_before_a_later_one() -> None:
    tree = ContentTree(16, 16)
    old, new = (tree.path([n * 10, n * 10 + 1], 32).pieces[0][0] for n in (1, 2))
    pool = BlockPool(4)
    first, second = filled(pool, old, 0, 2), filled(pool, new, 0, 2)
    pool.release(first, private=0)
    pool.release(second, private=0)
    pool.take(3)
    assert pool.match(((old, 2),), 2).blocks == 0
    assert pool.match(((new, 2),), 2).blocks == 1


def test_a_hit_protects_its_prefix_and_leaves_the_rest_in_its_place(branch: Branch) -> None:
    pool = BlockPool(6)
    pool.release(filled(pool, branch, 0, 6), private=0)
    holds = pool.pin(pool.match(((branch, 2),), 2))
    assert (pool.active, pool.inactive) == (2, 4)
    pool.take(4)
    assert pool.match(((branch, 6),), 6).blocks == 2
    pool.release(holds, private=4)
    pool.audit()
    assert pool.active == 0


def test_two_copies_of_one_block_both_occupy_the_pool_and_the_older_is_found(branch: Branch) -> None:
    pool = BlockPool(8)
    first, second = filled(pool, branch, 0, 3), filled(pool, branch, 0, 3)
    assert pool.active == 6
    found = pool.match(((branch, 3),), 3).parts
    assert [part.copies for part in found] == [first[0].copies]
    pool.release(first, private=0)
    pool.release(second, private=0)
    assert pool.inactive == 6


def test_removal_is_told_when_the_last_copy_goes(branch: Branch) -> None:
    pool = BlockPool(4, events=True)
    first, second = filled(pool, branch, 0, 2), filled(pool, branch, 0, 2)
    pool.release(first, private=0)
    pool.take(1)
    assert pool.removed == [], "block 1 is still held by the second owner"
    pool.release(second, private=1)
    pool.take(3)
    assert [(run.lo, run.hi) for run in pool.removed] == [(1, 2)]


def test_holders_of_a_stretch_that_was_split_give_back_all_of_it(branch: Branch) -> None:
    pool = BlockPool(10)
    whole = filled(pool, branch, 0, 6)
    part = pool.pin(pool.match(((branch, 4),), 4))
    less = pool.pin(pool.match(((branch, 2),), 2))
    pool.release(whole, private=0)
    assert pool.active == 4
    pool.release(part, private=0)
    assert pool.active == 2
    pool.release(less, private=0)
    assert (pool.active, pool.inactive) == (0, 6)
    pool.audit()


def test_content_of_one_request_alone_makes_no_events() -> None:
    tree = ContentTree(16, 16)
    own = tree.private()
    pool = BlockPool(4, events=True)
    pool.release(filled(pool, own, 0, 4), private=0)
    pool.take(4)
    assert pool.stored == []
    assert pool.removed == []


def test_asking_for_more_than_there_is_breaks_loudly(branch: Branch) -> None:
    pool = BlockPool(4)
    filled(pool, branch, 0, 3)
    with pytest.raises(InvariantError, match="2 blocks asked, 1 free"):
        pool.take(2)


def test_the_tree_forgets_what_no_pool_holds() -> None:
    tree = ContentTree(16, 16)
    pool = BlockPool(2)
    pool.release(filled(pool, tree.path([1, 2], 32).pieces[0][0], 0, 2), private=0)
    assert len(tree) == 1
    pool.take(2)
    assert len(tree) == 0
