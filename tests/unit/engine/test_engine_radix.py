"""The radix cache: what is found, what is shared, who may be evicted and in which order."""

from __future__ import annotations

import pytest

from policies.cluster.blocks import BlockRun, ContentTree
from policies.errors import InvariantError
from twin.engine.radix import Node, Pieces, RadixCache, Stamp


def at(tick: int) -> Stamp:
    return (0, 1, tick)


def publish(cache: RadixCache, pieces: Pieces, tick: int) -> Node:
    """Compute a whole prompt, publish it and let go of it."""
    pages = pieces[-1][1]
    node, cached = cache.match(pieces, pages, at(tick))
    cache.lock(node)
    assert cache.take(pages - cached)
    if cached < pages:
        added = cache.publish(node, pieces, cached, pages, at(tick))
        cache.free += added.known
        node = added.node
    cache.unlock(node)
    cache.audit()
    return node


@pytest.fixture
def tree() -> ContentTree:
    return ContentTree(4, 1)


def test_a_common_beginning_is_found_and_split_only_by_a_match(tree: ContentTree) -> None:
    cache = RadixCache(100)
    long, short = tree.path([1, 2, 3], 12).pieces, tree.path([1, 2, 9], 12).pieces
    node = publish(cache, long, 1)
    assert cache.peek(short, 12) == 8
    assert (node.lo, node.hi) == (0, 12)
    front, pages = cache.match(short, 12, at(2))
    assert (pages, front.lo, front.hi, node.lo) == (8, 0, 8, 8)
    assert front.stamp == at(1)  # a split is no touch
    cache.audit()


def test_the_tail_of_the_oldest_leaf_goes_first(tree: ContentTree) -> None:
    cache = RadixCache(24, events=True)
    old, new = tree.path([1, 2], 8).pieces, tree.path([5, 6, 7], 12).pieces
    publish(cache, old, 1)
    publish(cache, new, 2)
    assert cache.take(7)  # four are free
    assert (cache.peek(old, 8), cache.peek(new, 12)) == (5, 12)
    assert cache.removed == [BlockRun(old[0][0], 5, 8)]
    cache.audit()


def test_a_parent_can_go_when_its_children_are_gone(tree: ContentTree) -> None:
    cache = RadixCache(12)
    one, two = tree.path([1, 2], 8).pieces, tree.path([1, 3], 8).pieces
    publish(cache, one, 1)
    publish(cache, two, 2)
    assert cache.inactive == 12
    assert cache.take(11)
    assert (cache.peek(one, 8), cache.peek(two, 8)) == (1, 1)
    cache.audit()


def test_pages_that_exist_come_back_to_whoever_computed_them_again(tree: ContentTree) -> None:
    cache = RadixCache(40)
    pieces = tree.path([1, 2], 8).pieces
    cache.lock(cache.root)
    cache.lock(cache.root)
    assert cache.take(16)
    first = cache.publish(cache.root, pieces, 0, 8, at(1))
    second = cache.publish(cache.root, pieces, 0, 8, at(2))
    assert (first.known, second.known) == (0, 8)
    assert first.node is second.node
    assert first.node.locks == 2


def test_what_is_locked_stays(tree: ContentTree) -> None:
    cache = RadixCache(10)
    pieces = tree.path([1, 2], 8).pieces
    node = publish(cache, pieces, 1)
    cache.lock(node)
    assert not cache.take(3)
    assert (cache.free, cache.peek(pieces, 8)) == (2, 8)
    cache.unlock(node)
    assert cache.take(3)
    assert cache.peek(pieces, 8) == 7


def test_a_leaf_that_one_request_extends_stays_one_node(tree: ContentTree) -> None:
    cache = RadixCache(40)
    pieces = tree.path([1], 4).pieces
    own = tree.private()
    cache.lock(cache.root)
    assert cache.take(6)
    node = cache.publish(cache.root, pieces, 0, 4, at(1)).node
    assert cache.publish(node, (*pieces, (own, 6)), 4, 6, at(2)).node is node
    cache.lock(node)  # somebody else is here now
    assert cache.take(1)
    assert cache.publish(node, (*pieces, (own, 7)), 6, 7, at(3)).node is not node


def test_the_audit_finds_a_wrong_count(tree: ContentTree) -> None:
    cache = RadixCache(40)
    publish(cache, tree.path([1], 4).pieces, 1)
    cache.inactive += 1
    with pytest.raises(InvariantError, match="evictable"):
        cache.audit()
