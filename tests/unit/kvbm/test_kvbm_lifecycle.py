"""The life of blocks in one tier: what may follow what, conservation, duplicates (D1 to D4), weak references."""

from __future__ import annotations

import pytest
from kvbm_builders import Chains, fill, put, states

from policies.errors import InvariantError
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.lifecycle import TRANSITIONS, BlockState, Cause, Gauges
from policies.kvbm.store import TierStore

ALLOWED = {
    ("free", "reserve", "reserved"),
    ("reserved", "first write", "filling"),
    ("reserved", "load started", "loading"),
    ("reserved", "load cancelled", "free"),
    ("reserved", "request ends", "free"),
    ("filling", "block full", "complete"),
    ("filling", "request ends", "free"),
    ("complete", "register", "registered"),
    ("complete", "duplicate rejected", "free"),
    ("complete", "request ends", "free"),
    ("loading", "load ok", "registered"),
    ("loading", "duplicate rejected", "free"),
    ("loading", "load failed", "free"),
    ("loading", "load cancelled", "free"),
    ("registered", "last strong reference dropped", "inactive"),
    ("inactive", "match", "registered"),
    ("inactive", "evict", "free"),
}


def test_the_table_is_the_one_of_the_rules() -> None:
    table = {(s.value, c.value, after.value) for s, row in TRANSITIONS.items() for c, after in row.items()}
    assert table == ALLOWED


@pytest.mark.parametrize("state", BlockState)
@pytest.mark.parametrize("cause", Cause)
def test_anything_else_raises_with_the_story(state: BlockState, cause: Cause) -> None:
    gauges = Gauges(2, "g2")
    path = {
        BlockState.FREE: (),
        BlockState.RESERVED: (Cause.RESERVE,),
        BlockState.FILLING: (Cause.RESERVE, Cause.WRITE),
        BlockState.COMPLETE: (Cause.RESERVE, Cause.WRITE, Cause.FULL),
        BlockState.LOADING: (Cause.RESERVE, Cause.LOAD),
        BlockState.REGISTERED: (Cause.RESERVE, Cause.LOAD, Cause.LANDED),
        BlockState.INACTIVE: (Cause.RESERVE, Cause.LOAD, Cause.LANDED, Cause.RELEASE),
    }[state]
    at = BlockState.FREE
    for step in path:
        at = gauges.move(2, at, step)
    assert at is state
    if cause in TRANSITIONS[state]:
        gauges.move(2, state, cause)
        gauges.check()
        return
    with pytest.raises(InvariantError, match=r"g2: .* cannot follow .* before: ") as error:
        gauges.move(2, state, cause)
    assert all(step.value in str(error.value) for step in path)


def test_more_blocks_than_there_are_cannot_move() -> None:
    gauges = Gauges(3)
    gauges.move(2, BlockState.FREE, Cause.RESERVE)
    with pytest.raises(InvariantError, match="3 blocks of 2 that are reserved"):
        gauges.move(3, BlockState.RESERVED, Cause.WRITE)


def test_a_reservation_is_all_or_nothing() -> None:
    store = TierStore(4, Lru())
    assert store.reserve(3) is not None
    assert store.reserve(2) is None
    assert states(store) == {"free": 1, "reserved": 3}


def test_nothing_is_found_before_it_has_landed() -> None:
    chains = Chains()
    store = TierStore(2, Lru())
    lot = store.reserve(2)
    assert lot is not None
    store.advance(lot, Cause.LOAD)
    run = chains.run("a1", "a2")
    assert store.find(*run) == []
    store.register(lot, run, 0.0)
    assert [(part.lo, part.hi) for part in store.find(*run)] == [(0, 2)]


@pytest.mark.parametrize(
    ("steps", "cause"),
    [((), Cause.REQUEST_ENDS), ((Cause.WRITE,), Cause.REQUEST_ENDS), ((Cause.WRITE, Cause.FULL), Cause.REQUEST_ENDS),
     ((Cause.LOAD,), Cause.LOAD_FAILED), ((Cause.LOAD,), Cause.LOAD_CANCELLED)],
)  # fmt: skip
def test_what_comes_to_nothing_is_free_again(steps: tuple[Cause, ...], cause: Cause) -> None:
    store = TierStore(2, Lru())
    lot = store.reserve(2)
    assert lot is not None
    for step in steps:
        store.advance(lot, step)
    store.free(lot, cause)
    assert states(store) == {"free": 2}


# ---------------------------------------------------------------- duplicates


def copies(store: TierStore) -> int:
    return store.resident


def test_d1_to_d3_both_copies_stay_and_the_last_one_to_leave_is_told() -> None:
    run = Chains().run("x1")
    store = TierStore(4, Lru(), duplicates="allow")
    first, second = put(store, run), put(store, run)
    assert (copies(store), store.lacking(*run)) == (2, []), "D1"
    assert store.find(*run)[0].stretch is first[0].stretch, "a match takes the oldest"
    store.release(first)
    store.release(second)
    gone = store.evict(1, 0.0)
    assert (copies(store), store.lacking(*run), [g.is_last for g in gone]) == (1, [], [False]), "D2"
    gone = store.evict(1, 0.0)
    assert (copies(store), [g.is_last for g in gone]) == (0, [True]), "D3"


def test_d4_the_newcomer_is_freed_and_its_user_moved_to_the_first() -> None:
    run = Chains().run("x1")
    store = TierStore(4, Lru(), duplicates="reject")
    first, second = put(store, run), put(store, run)
    assert copies(store) == 1
    assert states(store) == {"free": 3, "registered": 1}
    assert second[0].stretch is first[0].stretch
    store.release(first)
    assert states(store) == {"free": 3, "registered": 1}, "the second user still has it"
    store.release(second)
    assert states(store) == {"free": 3, "inactive": 1}


# ---------------------------------------------------------------- references


def test_a_weak_reference_becomes_strong_or_says_that_the_block_is_gone() -> None:
    chains = Chains()
    store = TierStore(3, Lru())
    fill(store, chains.run("a1", "a3"))
    weak = store.find(*chains.run("a1", "a3"))
    store.evict(1, 0.0)  # a3: the suffix first
    holds = store.upgrade(weak)
    assert [(hold.lo, hold.hi) for hold in holds] == [(0, 2)]
    store.release(holds)
    store.evict(2, 0.0)
    assert store.upgrade(weak) == []


def test_blocks_that_came_back_are_not_those_that_a_weak_reference_meant() -> None:
    run = Chains().run("a1")
    store = TierStore(1, Lru())
    fill(store, run)
    weak = store.find(*run)
    store.evict(1, 0.0)
    fill(store, run)
    assert store.upgrade(weak) == []
    assert store.find(*run) != []


def test_nothing_that_somebody_holds_is_evicted() -> None:
    chains = Chains()
    store = TierStore(3, Lru())
    fill(store, chains.run("a1"), chains.run("b1"))
    holds = store.upgrade(store.find(*chains.run("a1")))
    gone = store.evict(3, 0.0)
    assert [chains.names(g.run) for g in gone] == [["b1"]]
    assert states(store) == {"free": 2, "registered": 1}, "pinned and resident are two gauges"
    store.release(holds)
    assert store.resident == 1
