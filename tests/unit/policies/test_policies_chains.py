"""The index of engines' own block events: case C12, the examples X1 to X10, odd events, tiers, dump and load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.kv_events import TIER_OF_MEDIUM, KvCleared, KvRefused, KvRemoved, KvStored
from policies.errors import InvariantError
from policies.router.chains import orphans
from policies.router.chains.holders import Overlap
from policies.router.chains.index import ChainIndex, Semantics

W0, W1 = RankId(WorkerId(0), 0), RankId(WorkerId(1), 0)
G1, G2, G3, G4 = Tier


class Held:
    """An index with ranks that are up. Blocks are (id, local hash) or ids 10 + n for local hash n."""

    def __init__(self, *ranks: RankId, semantics: Semantics = "set") -> None:
        self.index = ChainIndex(semantics)
        for rank in ranks or (W0,):
            self.index.up(rank)

    def store(
        self,
        *exts: int,
        under: int | None = None,
        hashes: Sequence[int] | None = None,
        rank: RankId = W0,
        tier: Tier = G1,
        start: int | None = None,
    ) -> None:
        local = hashes if hashes is not None else [ext - 10 for ext in exts]
        self.index.apply(
            KvStored(
                at_s=0.0,
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                event_id=0,
                exts=tuple(map(BlockHash, exts)),
                local_hashes=tuple(map(BlockHash, local)),
                parent_ext=BlockHash(under) if under is not None else None,
                start_position=start,
                tier=tier,
            )
        )

    def remove(self, *exts: int, rank: RankId = W0, tier: Tier = G1) -> None:
        ids = tuple(map(BlockHash, exts))
        self.index.apply(
            KvRemoved(at_s=0.0, worker_id=rank.worker_id, dp_rank=rank.dp_rank, event_id=0, exts=ids, tier=tier)
        )

    def clear(self, rank: RankId = W0, tier: Tier | None = None) -> None:
        self.index.apply(KvCleared(at_s=0.0, worker_id=rank.worker_id, dp_rank=rank.dp_rank, event_id=0, tier=tier))

    def match(self, *hashes: int, rank: RankId = W0) -> int:
        return self.index.depths(self.index.match(self.index.path(hashes))).get(rank, 0)

    def overlap(self, *hashes: int, rank: RankId = W0, most_blocks: int | None = None) -> Overlap:
        return self.index.overlaps(self.index.match(self.index.path(hashes), most_blocks))[rank]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return tuple(self.index.sizes)

    def counts(self, *names: str) -> dict[str, int]:
        """The counters that are not zero, sizes left out."""
        return {k: n for k, n in self.index.counters().items() if n and not k.startswith("index_")}


# ---------------------------------------------------------------- case C12, examples X


def play_c12(shared: Path, semantics: Semantics) -> tuple[list[int], list[int], Held]:
    held = Held(W0, W1, semantics=semantics)
    mine, others = [], []
    for line in (shared / "cases/inputs/c12_kv_events.jsonl").read_text().splitlines():
        event = json.loads(line)
        rank = RankId(WorkerId(int(event["worker"][1:])), 0)
        exts, parent = event["block_hashes"], event["parent_block_hash"]
        if event["type"] == "stored":
            held.store(*exts, under=parent, hashes=exts, rank=rank)
        elif event["type"] == "removed":
            held.remove(*exts, rank=rank)
        else:
            held.clear(rank)
        if rank == W0:
            mine.append(held.match(101, 102, 103))
            others.append(held.match(101, 102, 103, rank=W1))
    return mine, others, held


@pytest.mark.shared
def test_c12_and_x1_odd_events(shared: Path) -> None:
    mine, others, held = play_c12(shared, "set")
    assert mine == [1, 2, 2, 2, 2, 0, 2, 3, 1, 0, 0]
    assert others == [1] * 11
    assert held.index.sizes_of(W0) == (0, 0, 0)
    assert held.counts() == {"unknown_removals": 2, "orphans": 1, "duplicate_stores": 1}
    held.index.drop(W0)
    alone = Held(W1)
    alone.store(101, hashes=[101], rank=W1)
    assert held.index.size == alone.index.size


@pytest.mark.shared
def test_c12_as_dynamo_keeps_its_tree(shared: Path) -> None:
    mine, others, held = play_c12(shared, "cascade")
    assert mine == [1, 2, 2, 2, 2, 0, 1, 1, 1, 0, 0]
    assert others == [1] * 11
    assert held.counts() == {"unknown_removals": 3, "unknown_parents": 2, "duplicate_stores": 1}


def test_x2_a_hole_is_filled() -> None:
    seen = {}
    for semantics in ("set", "cascade"):
        held = Held(semantics=semantics)  # type: ignore[arg-type]
        held.store(11, 12, 13)
        before = held.match(1, 2, 3)
        held.remove(12)
        hole = held.match(1, 2, 3)
        held.store(12, under=11)
        seen[semantics] = (before, hole, held.match(1, 2, 3), held.sizes)
    assert seen == {"set": (3, 1, 3, (3, 0, 0)), "cascade": (3, 1, 2, (2, 0, 0))}


def test_x3_blocks_before_their_parent() -> None:
    held = Held()
    held.store(12, 13, under=11)
    assert (held.match(1, 2, 3), held.sizes) == (0, (0, 0, 2))
    held.store(11)
    assert (held.match(1, 2, 3), held.sizes, held.counts()) == (3, (3, 0, 0), {"orphans": 2, "adopted": 2})
    other = Held()
    other.store(12, under=11)
    other.remove(12)
    assert (other.match(1, 2), other.sizes) == (0, (0, 0, 0))
    other.store(11)
    assert (other.match(1, 2), other.sizes, other.counts()) == (1, (1, 0, 0), {"orphans": 1})


def test_x4_removal_in_either_order_leaves_nothing() -> None:
    held = Held()
    held.store(11, 12)
    held.remove(11)
    assert (held.match(1, 2), held.sizes) == (0, (1, 1, 0))
    held.remove(12)
    assert (held.match(1, 2), held.sizes) == (0, (0, 0, 0))
    held.store(11, 12)
    held.remove(12)
    assert held.match(1, 2) == 1
    held.remove(11)
    held.index.drop(W0)
    assert (held.match(1, 2), held.index.size) == (0, 0)


def test_x5_two_ids_of_one_content_are_two_copies() -> None:
    held = Held()
    held.store(11, 12)
    held.store(21, 22, hashes=[1, 2])
    seen = [held.match(1, 2)]
    held.remove(11, 12)
    seen.append(held.match(1, 2))
    held.remove(22)
    seen.append(held.match(1, 2))
    held.remove(21)
    assert [*seen, held.match(1, 2), held.sizes] == [2, 2, 1, 0, (0, 0, 0)]


def test_three_ids_of_one_content() -> None:
    held = Held()
    held.store(11)
    held.store(21, hashes=[1])
    held.store(31, hashes=[1])
    seen = []
    for ext in (21, 11, 31):
        held.remove(ext)
        seen.append(held.match(1))
    assert seen == [1, 1, 0]


def test_x6_repeated_text_does_not_match_itself() -> None:
    held = Held()
    held.store(11, 12, hashes=[5, 5])
    assert (held.match(5, 5, 5), held.sizes) == (2, (2, 0, 0))


def test_x7_a_child_of_a_removed_leaf_waits() -> None:
    held = Held()
    held.store(11, 12)
    held.remove(12)
    held.store(13, under=12)
    assert held.match(1, 2, 3) == 1
    held.store(12, under=11)
    assert (held.match(1, 2, 3), held.sizes, held.counts()) == (3, (3, 0, 0), {"orphans": 1, "adopted": 1})


def test_x8_a_chain_told_backwards() -> None:
    held = Held()
    held.store(14, under=13)
    held.store(13, under=12)
    held.store(11)
    assert held.match(1, 2, 3, 4) == 1
    held.store(12, under=11)
    assert (held.match(1, 2, 3, 4), held.sizes, held.counts()) == (4, (4, 0, 0), {"orphans": 2, "adopted": 2})


def test_x9_ranks_are_told_apart() -> None:
    zero, one = RankId(WorkerId(0), 0), RankId(WorkerId(0), 1)
    held = Held(zero, one)
    held.store(11, 12, rank=zero)
    held.store(11, rank=one)
    held.clear(zero)
    assert held.index.depths(held.index.match(held.index.path([1, 2]))) == {one: 1}


def test_x10_lower_tiers_go_on_where_the_one_above_ends() -> None:
    held = Held()
    held.store(11, 12)
    held.store(13, 14, under=12, tier=G2)
    held.store(15, 16, under=14, tier=G3)
    held.remove(15, tier=G3)
    assert held.overlap(1, 2, 3, 4, 5, 6) == Overlap(device_blocks=2, host_blocks=2, disk_blocks=0)
    path = held.index.path([1, 2, 3, 4, 5, 6])
    assert held.index.why_not_more(path, W0) == "hole at 5"
    held.store(15, under=14, tier=G3)
    assert held.overlap(1, 2, 3, 4, 5, 6) == Overlap(2, 2, 2)
    assert held.index.why_not_more(path, W0) == "whole prompt"
    assert held.index.why_not_more(held.index.path([1, 2, 9]), W0) == "ends at 3"


def test_x10_a_block_that_was_never_reached_adds_nothing_either() -> None:
    held = Held()
    held.store(11, 12)
    held.store(13, 14, under=12, tier=G2)
    held.store(16, under=15, tier=G3)
    assert (held.overlap(1, 2, 3, 4, 5, 6), held.sizes) == (Overlap(2, 2), (4, 0, 1))


# ---------------------------------------------------------------- tiers


def test_each_tier_counts_only_behind_the_one_above_it() -> None:
    held = Held(W0, W1)
    held.store(11, 12, 13, 14, 15, 16)
    held.store(11, 12, 13, tier=G2)  # offloaded copies do not count twice
    held.store(11, 12, 13, 14, tier=G4)
    held.remove(12, 13, 14, 15, 16)
    assert held.overlap(1, 2, 3, 4, 5, 6) == Overlap(1, 2, 0, 1)
    held.store(11, 12, 13, rank=W1, tier=G3)
    assert held.overlap(1, 2, 3, 4, rank=W1) == Overlap(0, 0, 3, 1), "the last one is in the shared tier"
    assert held.overlap(1, 2, 3, 4, rank=W1, most_blocks=2) == Overlap(0, 0, 2, 0)
    assert held.overlap(1, 2, 3, 4, most_blocks=2) == Overlap(1, 1, 0, 0)
    assert held.index.columns(held.index.match(held.index.path([1, 2, 3, 4])), [W1, W0]) == (
        [0, 1],
        [0, 2],
        [3, 0],
        [1, 1],
    )


def test_a_block_is_known_while_any_tier_holds_it() -> None:
    held = Held()
    held.store(11, 12)
    held.store(11, 12, tier=G2)
    held.clear(tier=G1)
    assert (held.overlap(1, 2), held.sizes) == (Overlap(0, 2), (2, 0, 0))
    held.clear(tier=G2)
    assert held.sizes == (0, 0, 0)


def test_a_removal_from_a_tier_that_does_not_hold_the_block_is_unknown() -> None:
    held = Held()
    held.store(11, tier=G2)
    held.remove(11)
    assert (held.overlap(1), held.counts()) == (Overlap(0, 1), {"unknown_removals": 1})


def test_clearing_one_tier_leaves_its_orphans_of_others() -> None:
    held = Held()
    held.store(12, under=11)
    held.store(12, under=11, tier=G2)
    held.clear(tier=G1)
    held.store(11, tier=G2)
    assert (held.overlap(1, 2), held.sizes) == (Overlap(0, 2), (2, 0, 0))


def test_media_have_tiers_and_strange_ones_are_counted() -> None:
    assert {name: TIER_OF_MEDIUM.get(name) for name in ("GPU", "CPU_PINNED", "NVME", "SHARED", "TAPE")} == {
        "GPU": G1,
        "CPU_PINNED": G2,
        "NVME": G3,
        "SHARED": G4,
        "TAPE": None,
    }
    held = Held()
    held.index.apply(KvRefused(at_s=0.0, worker_id=WorkerId(0), event_id=0, what="medium 'TAPE'"))
    assert held.counts() == {"refused_events": 1}


# ---------------------------------------------------------------- odd events


def test_an_id_that_names_another_block_now() -> None:
    held = Held()
    held.store(11, 12, 13)
    held.store(12, under=11, hashes=[7])
    assert held.match(1, 2, 3) == 1
    assert held.match(1, 7) == 2
    assert (held.sizes, held.counts()) == ((3, 0, 0), {"ext_conflicts": 1})
    held.store(22, under=11, hashes=[2])  # 13 is still held behind it
    assert held.match(1, 2, 3) == 3
    held.remove(11, 12, 13, 22)
    assert held.sizes == (0, 0, 0)


def test_an_id_under_itself_and_ids_twice_in_one_event() -> None:
    held = Held()
    held.store(11)
    held.store(11, under=11)
    assert (held.match(1, 1), held.counts()) == (0, {"ext_conflicts": 1})
    held.clear()
    held.store(12, 12, hashes=[1, 2])
    assert held.sizes == (1, 0, 0)
    held.store(13, under=12, hashes=[3])
    held.remove(12, 13)
    held.store(14, under=14)
    assert held.sizes == (0, 0, 1)


def test_a_store_at_another_place_than_its_parent_says_is_refused() -> None:
    held = Held()
    held.store(12, start=1)
    held.store(11, start=0)
    held.store(12, under=11, start=2)
    held.store(12, under=11, start=1)
    held.store(99, under=98, start=5)
    assert (held.match(1, 2), held.counts()) == (2, {"misplaced": 2, "orphans": 1})


def test_an_orphan_with_another_parent_or_content_replaces_the_old_one() -> None:
    held = Held()
    held.store(13, under=12)
    held.store(13, under=12)
    held.store(13, under=14)
    held.store(13, under=14, hashes=[8])
    assert (held.sizes, held.counts()) == ((0, 0, 1), {"orphans": 3, "duplicate_stores": 1, "ext_conflicts": 2})
    held.store(11)
    held.store(13, under=11, hashes=[8], tier=G2)  # its parent is known now: both tiers hold it
    assert (held.overlap(1, 8), held.sizes) == (Overlap(2), (2, 0, 0))
    held.remove(13)
    assert held.overlap(1, 8) == Overlap(1, 1)


def test_orphans_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "MOST_ORPHANS", 3)
    held = Held()
    for ext in (12, 22, 32, 42):
        held.store(ext, under=ext - 1)
    assert (held.sizes, held.counts()) == ((0, 0, 3), {"orphans": 4, "orphans_dropped": 1})
    held.store(11)
    assert held.match(1, 2) == 1


def test_ghosts_are_never_more_than_what_is_held() -> None:
    held = Held()
    held.store(11, 12, 13, 14)
    held.remove(11, 12, 13)
    assert (held.sizes, held.counts()) == ((1, 1, 0), {"ghosts_dropped": 2})
    held.store(11, 12)
    held.store(13, under=12)
    assert (held.match(1, 2, 3, 4), held.sizes) == (4, (4, 0, 0))


def test_a_rank_must_be_up() -> None:
    with pytest.raises(InvariantError, match="not registered"):
        Held(W0).store(11, rank=W1)


def test_ids_and_hashes_must_be_equally_many() -> None:
    with pytest.raises(ValueError, match="2 block ids with 1 local hashes"):
        Held().store(11, 12, hashes=[1])


# ---------------------------------------------------------------- memory, dump and load


def test_a_rank_that_comes_back_holds_nothing_and_takes_a_free_place() -> None:
    held = Held(W0, W1)
    held.store(11, 12)
    held.store(11, rank=W1)
    held.index.up(W0)
    assert (held.match(1, 2), held.match(1, 2, rank=W1)) == (0, 1)
    held.store(11, 12)
    assert (held.match(1, 2), held.match(1, 2, rank=W1)) == (2, 1)
    for rank in (W0, W1):
        held.index.drop(rank)
    assert (held.index.size, held.index.ranks) == (0, ())


def test_content_is_forgotten_with_its_last_holder() -> None:
    held = Held(W0, W1)
    for n, rank in enumerate([W0, W1] * 4):
        held.store(*range(100 * n, 100 * n + 300), hashes=[*range(200), *range(1000 * n, 1000 * n + 100)], rank=rank)
    held.clear(W0)
    held.clear(W1)
    assert held.index.size == 2
    assert held.match(*range(200)) == 0


def odd_rank() -> Held:
    held = Held(W0)
    held.store(11, 12, 13, 14)
    held.store(21, 22, hashes=[1, 2])
    held.store(13, 14, under=12, tier=G2)
    held.store(33, under=12, hashes=[9])
    held.store(42, 43, under=41)
    held.remove(12)
    held.store(51, 52, 53, 54, 55, hashes=[5, 6, 7, 8, 9])
    held.remove(51, 52, 53)
    return held


def test_a_dump_makes_the_same_rank_elsewhere() -> None:
    held = odd_rank()
    copy = Held(W1)
    copy.store(77, rank=W1)
    copy.index.load(W1, held.index.dump(W0))
    for prompt in ([1, 2, 3, 4], [1, 2, 9], [5, 6, 7, 8, 9]):
        assert copy.overlap(*prompt, rank=W1) == held.overlap(*prompt)
    assert copy.sizes == held.sizes
    assert (copy.match(77, rank=W1), copy.counts()) == (0, {})
    held.remove(22)
    copy.remove(22, rank=W1)
    assert copy.overlap(1, 2, rank=W1) == held.overlap(1, 2) == Overlap(1)
    copy.store(41, hashes=[31], rank=W1)
    assert copy.match(31, 32, 33, rank=W1) == 3


def test_a_dump_that_cannot_be_loaded_leaves_what_was() -> None:
    held = Held(W0)
    held.store(11)
    bad = held.index.dump(W0)[0]
    object.__setattr__(bad, "local_hashes", (BlockHash(-1),))
    with pytest.raises(OverflowError):
        held.index.load(W0, [bad])
    assert held.match(1) == 1
    held.clear()
    held.index.drop(W0)
    assert held.index.size == 0
