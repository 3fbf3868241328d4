"""The index of engines' block events against a naive model, in random order and disorder; dumps, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_blocks import Content, NaiveRank

from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.kv_events import KvCleared, KvEvent, KvRemoved, KvStored
from policies.router.chains import index as index_module
from policies.router.chains.index import ChainIndex

RANKS = [RankId(WorkerId(0), 0), RankId(WorkerId(0), 1), RankId(WorkerId(3), 0)]
G1, G2, G3, _ = Tier

EXTS = st.integers(0, 9).map(BlockHash)
KEYS = st.integers(0, 1).map(BlockHash)
BLOCKS = st.lists(st.tuples(EXTS, KEYS), min_size=1, max_size=4)
# Ids that engines give: each content has one, so that stores repeat and meet instead of contradicting each other.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def named(prompt: list[int]) -> BlockHash:
    return BlockHash(100 + int("1" + "".join(map(str, prompt)), 2))


@st.composite
def odd_events(draw: st.DrawFn, tiers: tuple[Tier, ...]) -> KvEvent:
    """Anything at all."""
    rank = draw(st.sampled_from(RANKS))
    common = {"at_s": 0.0, "worker_id": rank.worker_id, "dp_rank": rank.dp_rank, "event_id": 0}
    kind = draw(st.sampled_from(["store"] * 6 + ["remove"] * 4 + ["clear"]))
    tier = draw(st.sampled_from(tiers))
    if kind == "store":
        exts, keys = zip(*draw(BLOCKS), strict=True)
        parent = draw(st.none() | EXTS)
        return KvStored(**common, exts=exts, local_hashes=keys, parent_ext=parent, tier=tier)
    if kind == "remove":
        return KvRemoved(**common, exts=tuple(draw(st.lists(EXTS, min_size=1, max_size=4))), tier=tier)
    return KvCleared(**common, tier=draw(st.sampled_from([None, tier])))


@st.composite
def engine_events(draw: st.DrawFn, tiers: tuple[Tier, ...]) -> KvEvent:
    """What an engine says, parts of it lost and out of order."""
    rank = draw(st.sampled_from(RANKS))
    common = {"at_s": 0.0, "worker_id": rank.worker_id, "dp_rank": rank.dp_rank, "event_id": 0}
    prompt = draw(PROMPTS)
    lo = draw(st.integers(0, len(prompt) - 1))
    exts = tuple(named(prompt[: n + 1]) for n in range(lo, len(prompt)))
    tier = draw(st.sampled_from(tiers))
    if draw(st.integers(0, 2)):
        keys = tuple(map(BlockHash, prompt[lo:]))
        parent = named(prompt[:lo]) if lo else None
        return KvStored(**common, exts=exts, local_hashes=keys, parent_ext=parent, start_position=lo, tier=tier)
    return KvRemoved(**common, exts=draw(st.sampled_from([exts, exts[::-1], exts[:1], exts[-1:]])), tier=tier)


def events(tiers: tuple[Tier, ...]) -> st.SearchStrategy[list[KvEvent]]:
    return st.lists(odd_events(tiers) | engine_events(tiers), max_size=40)


class Both:
    """The index and one naive rank for each of its ranks; they must agree after every event."""

    def __init__(self, cascade: bool = False) -> None:
        self.index = ChainIndex("cascade" if cascade else "set")
        self.naive = {rank: NaiveRank(cascade) for rank in RANKS}
        self.seen: dict[Content, None] = {}
        for rank in RANKS:
            self.index.up(rank)

    def apply(self, event: KvEvent) -> None:
        self.index.apply(event)
        self.naive[event.rank].apply(event)

    def agree(self, prompts: list[list[int]]) -> None:
        """For the prompts and for all that was ever held."""
        for naive in self.naive.values():
            self.seen.update((node.content, None) for node in naive.nodes.values())
        for prompt in [*prompts, *map(list, self.seen)]:
            path = self.index.path(prompt)
            found = self.index.match(path)
            assert {r: tuple(o) for r, o in self.index.overlaps(found).items()} == {
                r: naive.overlap(prompt) for r, naive in self.naive.items()
            }
            device = {r: naive.overlap(prompt)[0] for r, naive in self.naive.items()}
            assert self.index.depths(found) == {r: depth for r, depth in device.items() if depth}
        for rank, naive in self.naive.items():
            assert self.index.sizes_of(rank) == naive.sizes
            assert naive.sizes[1] <= naive.sizes[0]
            lineage = self.index._ranks[rank]
            assert set(lineage._where) == set(naive.nodes)
            assert len({id(run) for run in lineage._where.values()}) <= len(naive.nodes)
        counts = self.index.counters()
        total: dict[str, int] = {}
        for naive in self.naive.values():
            for name, n in naive.counts.items():
                total[name] = total.get(name, 0) + n
        assert {name: n for name, n in counts.items() if n and not name.startswith("index_")} == total


@pytest.mark.parametrize("branch_blocks", [2, 128])
@given(some=events((G1, G2, G3)), prompts=st.lists(PROMPTS, max_size=3))
@examples(300)
def test_the_index_is_what_each_rank_holds(branch_blocks: int, some: list[KvEvent], prompts: list[list[int]]) -> None:
    """Short branches make prompts and runs span several."""
    usual, index_module._BRANCH_BLOCKS = index_module._BRANCH_BLOCKS, branch_blocks
    try:
        both = Both()
    finally:
        index_module._BRANCH_BLOCKS = usual
    for event in some:
        both.apply(event)
        both.agree(prompts)
    for rank in RANKS:
        both.index.drop(rank)
    assert both.index.size == 0


def one_by_one(event: KvEvent) -> list[KvEvent]:
    """A store told block by block, as engines do while they generate tokens."""
    if not isinstance(event, KvStored):
        return [event]
    parents = (event.parent_ext, *event.exts)
    return [
        replace(event, exts=(ext,), local_hashes=(key,), parent_ext=parent, start_position=None)
        for parent, ext, key in zip(parents, event.exts, event.local_hashes, strict=False)
    ]


@pytest.mark.parametrize("branch_blocks", [2, 128])
@given(some=st.lists(engine_events((G1, G2)), max_size=40), prompts=st.lists(PROMPTS, min_size=1, max_size=3))
@examples(200)
def test_how_blocks_are_cut_into_events_does_not_matter(
    branch_blocks: int, some: list[KvEvent], prompts: list[list[int]]
) -> None:
    """Neither for matches nor, as long as none comes before its parent, for the room that they take."""
    usual, index_module._BRANCH_BLOCKS = index_module._BRANCH_BLOCKS, branch_blocks
    try:
        whole, pieces = ChainIndex(), ChainIndex()
    finally:
        index_module._BRANCH_BLOCKS = usual
    for rank in RANKS:
        whole.up(rank)
        pieces.up(rank)
    for event in some:
        whole.apply(event)
        for piece in one_by_one(event):
            pieces.apply(piece)
    for prompt in prompts:
        found = [index.overlaps(index.match(index.path(prompt))) for index in (whole, pieces)]
        assert found[0] == found[1]
    assert (pieces.sizes, pieces.counters()) == (whole.sizes, whole.counters())
    assert pieces.size == whole.size or whole.counters()["orphans"]


@given(some=events((G1,)), prompts=st.lists(PROMPTS, max_size=3))
@examples(200)
def test_removals_may_take_all_below_with_them(some: list[KvEvent], prompts: list[list[int]]) -> None:
    both = Both(cascade=True)
    for event in some:
        both.apply(event)
        both.agree(prompts)
    assert both.index.sizes[1:] == (0, 0)


@given(some=events((G1, G2)), more=events((G1, G2)), prompts=st.lists(PROMPTS, max_size=3))
@examples(200)
def test_a_loaded_dump_is_the_same_rank(some: list[KvEvent], more: list[KvEvent], prompts: list[list[int]]) -> None:
    """Also for what happens to it afterwards, as long as no ghost is dropped: how old they are is not told."""
    both, copy = Both(), ChainIndex()
    for event in some:
        both.apply(event)
    for rank in RANKS:
        copy.up(rank)
        copy.load(rank, both.index.dump(rank))
        assert copy.sizes_of(rank) == both.index.sizes_of(rank)
    dropped = both.index.counters()["ghosts_dropped"]
    for event in [None, *more]:
        if event is not None:
            both.apply(event)
            copy.apply(event)
        if both.index.counters()["ghosts_dropped"] > dropped:
            return
        held = [list(node.content) for naive in both.naive.values() for node in naive.nodes.values()]
        for prompt in [*prompts, *held]:
            assert copy.overlaps(copy.match(copy.path(prompt))) == both.index.overlaps(
                both.index.match(both.index.path(prompt))
            )
        assert copy.sizes == both.index.sizes
