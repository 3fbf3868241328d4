"""The guessed index: examples A1 to A5, pruning, memory, and random histories against a naive model."""

from __future__ import annotations

from array import array

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.blocks import BlockPath, ContentTree
from policies.cluster.ids import RankId, WorkerId
from policies.errors import ConfigError, InvariantError
from policies.router.chains import approximate
from policies.router.chains.approximate import LruIndex, TtlIndex, raised
from policies.router.chains.holders import Columns, Reach

W1, W2 = RankId(WorkerId(1), 0), RankId(WorkerId(2), 0)
TREE = ContentTree(1, 1, 4)
TEN = array("Q", range(10))


def path(keys: array[int] | list[int]) -> BlockPath:
    return TREE.path(array("Q", keys), len(keys))


def ttl(ttl_s: float = 120.0) -> TtlIndex[RankId]:
    index = TtlIndex[RankId](ttl_s)
    for rank in (W1, W2):
        index.up(rank, 1000)
    return index


def depth(index: TtlIndex[RankId] | LruIndex[RankId], found: Reach, rank: RankId = W1) -> int:
    return index.columns(found, [rank]).device_blocks[0]


def test_a1_a_prompt_counts_until_it_expires() -> None:
    index = ttl()
    index.sent(W1, path(TEN), 0.0)
    assert [depth(index, index.match(path(TEN), t)) for t in (119.9, 120.0)] == [10, 0]
    assert (len(index), index.size) == (0, 2)


def test_a2_sent_again_it_counts_from_then() -> None:
    index = ttl()
    index.sent(W1, path(TEN), 0.0)
    index.sent(W1, path(TEN), 100.0)
    assert [depth(index, index.match(path(TEN), t)) for t in (219.9, 220.0)] == [10, 0]


def test_a3_only_what_is_sent_again_stays() -> None:
    index = ttl()
    index.sent(W1, path(TEN), 0.0)
    index.sent(W1, path(TEN[:5]), 100.0)
    assert [depth(index, index.match(path(TEN), t)) for t in (119.9, 130.0)] == [10, 5]


def test_a4_a_lost_worker_holds_nothing() -> None:
    index = ttl()
    index.sent(W1, path(TEN), 0.0)
    index.sent(W2, path(TEN), 0.0)
    index.drop(W1)
    found = index.match(path(TEN), 51.0)
    assert (depth(index, found), depth(index, found, W2)) == (0, 10)


def test_a4_least_recently_sent_leaves_go_first() -> None:
    index = LruIndex[RankId]()
    index.up(W1, 8)
    index.sent(W1, path(TEN), 0.0)
    assert depth(index, index.match(path(TEN), 0.0)) == 8
    index.sent(W1, path([0, 1, 50, 51]), 9.0)
    assert [depth(index, index.match(path(keys), 9.0)) for keys in (list(TEN), [0, 1, 50, 51])] == [6, 4]
    assert len(index) == 8


def test_a5_a_prediction_only_raises() -> None:
    predicted = ttl(5.0)
    predicted.sent(W1, path(TEN), 0.0)
    real = Columns([3], [0], [0], [0])
    seen = [raised(real, predicted.columns(predicted.match(path(TEN), t), [W1])).device_blocks for t in (4.0, 6.0)]
    assert seen == [[10], [3]]
    assert raised(Columns([3], [4], [2], [1]), Columns([5], [0], [0], [0])) == ([5], [2], [2], [1])
    assert raised(Columns([3], [1], [0], [0]), Columns([9], [0], [0], [0])) == ([9], [0], [0], [0])


def test_too_much_is_pruned_to_four_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "MOST_BLOCKS", 20)
    index = ttl()
    index.sent(W1, path(TEN), 0.0)
    index.sent(W2, path(TEN), 0.0)
    index.sent(W1, path([77, 78]), 1.0)
    assert (len(index), index.pruned_blocks) == (16, 6)
    found = index.match(path(TEN), 2.0)
    assert (depth(index, found), depth(index, found, W2)) == (4, 10)
    assert depth(index, index.match(path([77, 78]), 2.0)) == 2


def test_bad_use_is_named() -> None:
    with pytest.raises(ConfigError, match="ttl_s is 0 s"):
        TtlIndex(0)
    with pytest.raises(InvariantError, match="is not up"):
        TtlIndex(1.0).sent(W1, path(TEN), 0.0)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send"] * 8 + ["wait"] * 3 + ["drop"]), st.sampled_from([W1, W2]), PROMPTS, st.integers(0, 4)
    ),
    max_size=30,
)


@given(steps=STEPS)
@examples(300)
def test_with_a_time_to_live_each_block_has_its_own_expiry(steps: list) -> None:
    index, held, now_s = ttl(5.0), dict[tuple[RankId, tuple[int, ...]], float](), 0.0
    for kind, rank, prompt, wait_s in steps:
        now_s += wait_s
        if kind == "send":
            index.sent(rank, path(prompt), now_s)
            held |= {(rank, tuple(prompt[:n])): now_s + 5.0 for n in range(1, len(prompt) + 1)}
        elif kind == "drop":
            index.up(rank, 1000)
            held = {block: due_s for block, due_s in held.items() if block[0] != rank}
        held = {block: due_s for block, due_s in held.items() if due_s > now_s}
        for prompt_seen in {tuple(prompt), *(blocks for _, blocks in held)}:
            found = index.match(path(list(prompt_seen)), now_s)
            for one in (W1, W2):
                naive = next((n for n in range(len(prompt_seen)) if (one, prompt_seen[: n + 1]) not in held), None)
                assert depth(index, found, one) == (len(prompt_seen) if naive is None else naive)
        assert len(index) == len(held)
    index.match(path([9]), now_s + 5.0)
    assert (len(index), index.size) == (0, 2)


@given(steps=STEPS)
@examples(300)
def test_without_events_a_rank_keeps_what_it_was_sent_last(steps: list) -> None:
    """Oldest dispatch first, in it the deepest block first: that is the order of (dispatch, -position)."""
    index, held = LruIndex[RankId](), dict[RankId, dict[tuple[int, ...], int]]()
    for rank in (W1, W2):
        index.up(rank, 6)
        held[rank] = {}
    for turn, (kind, rank, prompt, _) in enumerate(steps):
        if kind == "drop":
            index.up(rank, 6)
            held[rank] = {}
        else:
            index.sent(rank, path(prompt), float(turn))
            held[rank] |= {tuple(prompt[:n]): turn for n in range(1, len(prompt) + 1)}
            while len(held[rank]) > 6:
                del held[rank][min(held[rank], key=lambda block: (held[rank][block], -len(block), block))]
        for one in (W1, W2):
            for seen in {tuple(prompt), *held[one]}:
                naive = next((n for n in range(len(seen)) if seen[: n + 1] not in held[one]), len(seen))
                assert depth(index, index.match(path(list(seen)), float(turn)), one) == naive
        assert len(index) == sum(map(len, held.values()))
