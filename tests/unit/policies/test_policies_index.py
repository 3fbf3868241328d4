"""The prefix index: case C12, the examples X of the spec that have a meaning on runs of blocks, and its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import keys_path

from policies.cluster.blocks import BlockRun, ContentTree
from policies.cluster.ids import WorkerId
from policies.router.index import PrefixIndex

W0, W1 = WorkerId(0), WorkerId(1)


class Held:
    """An index, and content named as lists of keys, one key per block. Branches fall where requests part."""

    def __init__(self) -> None:
        self.tree = ContentTree(1, 1)
        self.index = PrefixIndex()

    def store(self, keys: list[int], lo: int = 0, worker_id: WorkerId = W0) -> None:
        self.index.store(worker_id, self._runs(keys, lo))

    def remove(self, keys: list[int], lo: int = 0, worker_id: WorkerId = W0) -> None:
        self.index.remove(worker_id, self._runs(keys, lo))

    def match(self, keys: list[int], worker_id: WorkerId = W0) -> int:
        return self.index.depths(keys_path(self.tree, keys)).get(worker_id, 0)

    def _runs(self, keys: list[int], lo: int) -> list[BlockRun]:
        """Blocks lo .. len(keys)."""
        return [run._replace(lo=max(run.lo, lo)) for run in keys_path(self.tree, keys).runs() if run.hi > lo]


@pytest.mark.shared
def test_c12_odd_events(shared: Path) -> None:
    """Block hashes are interned as paths through their parents; an unknown one stands for itself."""
    held = Held()
    query = keys_path(held.tree, [101, 102, 103])
    chains: dict[int, list[int]] = {}
    matches, others, unknown, orphans = [], [], [], []
    for line in (shared / "cases/inputs/c12_kv_events.jsonl").read_text().splitlines():
        event = json.loads(line)
        worker_id = WorkerId(int(event["worker"][1:]))
        if event["type"] == "cleared":
            held.index.clear(worker_id)
        for block in event["block_hashes"]:
            parent = event["parent_block_hash"]
            if event["type"] == "stored":
                chains[block] = [*chains.get(parent, [parent] if parent else []), block]
                held.store(chains[block], len(chains[block]) - 1, worker_id)
            else:
                chain = chains.get(block, [block])
                held.remove(chain, len(chain) - 1, worker_id)
        if worker_id == W0:
            matches.append(held.index.depths(query).get(W0, 0))
            others.append(held.index.depths(query).get(W1, 0))
            unknown.append(held.index.unknown_removals)
            orphans.append(held.index.orphan_stores)
            if event["type"] == "cleared":
                assert (held.index.blocks(W0), held.index.blocks(W1)) == (0, 1)
                alone = PrefixIndex()
                alone.store(W1, keys_path(held.tree, [101]).runs())
                assert held.index.size == alone.size
    assert matches == [1, 2, 2, 2, 2, 0, 2, 3, 1, 0, 0]
    assert others == [1] * 11
    assert unknown == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    assert orphans == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert held.index.duplicate_stores == 1


def test_x2_a_hole_hides_what_is_behind_it_until_it_is_filled() -> None:
    held = Held()
    held.store([1, 2, 3])
    assert held.match([1, 2, 3]) == 3
    held.remove([1, 2], lo=1)
    assert held.match([1, 2, 3]) == 1
    held.store([1, 2], lo=1)
    assert held.match([1, 2, 3]) == 3
    assert held.index.blocks(W0) == 3


def test_x3_blocks_before_their_parent_wait_for_it() -> None:
    held = Held()
    held.store([1, 2, 3], lo=1)
    assert (held.match([1, 2, 3]), held.index.orphan_stores) == (0, 2)
    held.store([1])
    assert held.match([1, 2, 3]) == 3
    other = Held()
    other.store([1, 2], lo=1)
    other.remove([1, 2], lo=1)
    other.store([1])
    assert (other.match([1, 2]), other.index.blocks(W0), other.index.orphan_stores) == (1, 1, 1)


@pytest.mark.parametrize("front_first", [True, False])
def test_x4_removal_in_either_order_leaves_nothing(front_first: bool) -> None:
    held = Held()
    held.store([1, 2])
    first, second = ([1], 0), ([1, 2], 1)
    if not front_first:
        first, second = second, first
    held.remove(*first)
    assert held.match([1, 2]) == (0 if front_first else 1)
    held.remove(*second)
    assert (held.match([1, 2]), held.index.size, held.index.unknown_removals) == (0, 0, 0)


def test_x6_repeated_text_does_not_match_itself() -> None:
    held = Held()
    held.store([5, 5])
    assert held.match([5, 5, 5]) == 2


def test_x7_and_x8_stores_in_odd_orders() -> None:
    held = Held()
    held.store([1, 2])
    held.remove([1, 2], lo=1)
    held.store([1, 2, 3], lo=2)
    assert (held.match([1, 2, 3]), held.index.orphan_stores) == (1, 1)
    held.store([1, 2], lo=1)
    assert held.match([1, 2, 3]) == 3

    backwards = Held()
    backwards.store([1, 2, 3, 4], lo=3)
    backwards.store([1, 2, 3], lo=2)
    backwards.store([1])
    assert backwards.match([1, 2, 3, 4]) == 1
    backwards.store([1, 2], lo=1)
    assert backwards.match([1, 2, 3, 4]) == 4


def test_part_of_a_child_branch() -> None:
    held = Held()
    held.store([1, 2, 3])
    held.store([1, 2, 8, 9, 7])
    held.remove([1, 2, 8, 9, 7], lo=3)
    held.store([1, 2, 8, 9, 7], worker_id=W1)
    assert (held.match([1, 2, 8, 9, 7]), held.match([1, 2, 8, 9, 7], W1)) == (3, 5)


def test_a_hole_in_the_parent_branch_hides_the_child_branch() -> None:
    held = Held()
    held.store([1, 2, 3, 4])
    held.store([1, 2, 8, 9])  # parts after block 2
    held.remove([1, 2], lo=1)
    assert (held.match([1, 2, 8, 9]), held.match([1, 2, 3])) == (1, 1)
    held.store([1, 2, 8, 9, 9], lo=4)
    assert held.index.orphan_stores == 0  # its parent, block 4 of that branch, is held
    held.remove([1, 2, 3, 4])
    held.store([1, 2, 7], lo=2)
    assert held.index.orphan_stores == 1  # block 2 is not held
    held.store([1, 2])
    assert (held.match([1, 2, 8, 9, 9]), held.match([1, 2, 7]), held.match([1, 2, 3])) == (5, 3, 2)


def test_branches_that_part_inside_one_block() -> None:
    """Two keys to a block: the third prompt parts from the second within the block where that parts from the first."""
    tree, index = ContentTree(1, 2), PrefixIndex()
    first, second, third = (keys_path(tree, keys) for keys in ([0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]))
    index.store(W0, first.runs())
    index.store(W1, second.runs())
    index.store(W0, third.runs()[1:])
    assert index.orphan_stores == 0
    assert (index.depths(third), index.depths(second)) == ({W0: 2, W1: 1}, {W0: 1, W1: 2})
    index.remove(W1, first.runs()[:1])
    index.store(W1, third.runs()[1:])
    assert index.orphan_stores == 1
    assert index.depths(third) == {W0: 2}


def test_x9_clearing_one_worker_leaves_the_other() -> None:
    held = Held()
    held.store([1, 2])
    held.store([1], worker_id=W1)
    held.index.clear(W0)
    assert (held.match([1, 2]), held.match([1, 2], W1), len(held.index)) == (0, 1, 1)


def test_clearing_drops_what_waits_behind_a_hole() -> None:
    held = Held()
    held.store([1, 2, 3], lo=1)
    held.index.clear(W0)
    held.store([1])
    assert held.match([1, 2, 3]) == 1
    held.index.clear(W0)
    assert (held.index.size, len(held.index.depths(keys_path(held.tree, [1])))) == (0, 0)


def test_nothing_is_an_error() -> None:
    held = Held()
    held.index.clear(W1)
    held.remove([1, 2], worker_id=W1)
    assert (held.index.unknown_removals, held.index.size, held.index.blocks(W1)) == (2, 0, 0)


def test_dropped_content_leaves_the_tree() -> None:
    held = Held()
    held.store([1, 2, 3])
    held.store([1, 2, 9])
    assert len(held.tree) == 2
    held.remove([1, 2, 9])
    held.remove([1, 2, 3], lo=2)
    assert (len(held.tree), held.index.unknown_removals) == (0, 0)
