"""What is asked and what is on record, block by block against sets: answers, blocks known to be nowhere, peers that
change, are cut off, come back and go."""

from __future__ import annotations

from itertools import pairwise

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kvbm_builders import Chains, fill, level

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.health import NegativeCache
from policies.kvbm.peers import PeerMemory, PeerView
from policies.kvbm.registry import Lease, Told
from policies.kvbm.spans import Spans

LAST = 12
SPANS = st.tuples(st.integers(0, LAST - 1), st.integers(1, 5)).map(lambda s: (s[0], min(s[0] + s[1], LAST)))
LEASE_S = 9.0


@examples(500)
@given(st.lists(SPANS, max_size=5), st.lists(SPANS, max_size=5), SPANS)
def test_what_was_told_of_and_is_there(held: list, told: list, asked: tuple[int, int]) -> None:
    chains = Chains()
    branch, store, spans = chains.branch("a"), level(Tier.G4_REMOTE, 99).body.store, Spans()
    for lo, hi in held:
        for a, b in store.lacking(branch, lo, hi):
            fill(store, BlockRun(branch, a, b))
    for lo, hi in told:
        spans.add(branch, lo, hi)
    lo, hi = asked
    there = _blocks(held) & _blocks(told)
    view = Told(store, spans)
    gaps = view.lacking(branch, lo, hi)
    assert _blocks(gaps) == set(range(lo, hi)) - there
    assert all(a[1] < b[0] for a, b in pairwise(gaps)), "ascending, and none touches the next"
    found = view.find(branch, lo, hi)
    upto = found[-1].hi if found else lo
    assert upto == next((block for block in range(lo, hi) if block not in there), hi)


@examples(500)
@given(st.lists(st.tuples(st.sampled_from(["add", "forget"]), SPANS, st.sampled_from([0.0, 0.3, 0.7])), max_size=12))
def test_what_is_known_to_be_nowhere(steps: list) -> None:
    branch, known, until_s = Chains().branch("a"), NegativeCache(1.0), dict.fromkeys(range(LAST), 0.0)
    now_s = 0.0
    for what, (lo, hi), later_s in steps:
        now_s += later_s
        if what == "add":
            known.add(BlockRun(branch, lo, hi), now_s)
            until_s |= {block: now_s + 1.0 for block in range(lo, hi) if until_s[block] <= now_s}
        else:
            known.forget(BlockRun(branch, lo, hi))
            until_s |= dict.fromkeys(range(lo, hi), 0.0)
        for at in range(LAST):
            expected = next((block for block in range(at, LAST) if until_s[block] > now_s), None)
            assert known.first_in(BlockRun(branch, at, LAST), now_s) == expected


WHAT = st.sampled_from(["store", "store", "store", "drop", "clear", "cut", "back", "lose"])


@examples(500)
@given(st.lists(st.tuples(WHAT, st.integers(0, 2), SPANS, st.sampled_from([0.0, 1.0, 4.0])), max_size=15))
def test_peers_on_record(steps: list) -> None:
    chains, memory = Chains(), PeerMemory()
    branch, now_s = chains.branch("a"), 0.0
    bodies = [level(Tier.G2_HOST, 99).body for _ in range(3)]
    views = [PeerView(memory, WorkerId(n), b, b.spec, "same", Lease(LEASE_S, 0.0)) for n, b in enumerate(bodies)]
    there: list[set[int]] = [set(), set(), set()]
    frozen: list[set[int] | None] = [None, None, None]
    since_s, cut_s, lost = [0.0] * 3, [0.0] * 3, set()
    for what, who, (lo, hi), later_s in steps:
        now_s += later_s
        body, view = bodies[who], views[who]
        if who in lost:
            continue
        match what:
            case "store":
                fresh = [BlockRun(branch, a, b) for a, b in body.store.lacking(branch, lo, hi)]
                fill(body.store, *fresh)
                view.changed(True, fresh)
                there[who] |= set(range(lo, hi))
            case "drop":
                view.changed(False, [gone.run for gone in body.store.drop(branch, lo, hi, now_s)])
                there[who] -= set(range(lo, hi))
            case "clear":
                body.lose()
                body.health.restored()
                view.cleared()
                there[who] = set()
            case "cut":
                view.cut(now_s)
                if frozen[who] is None:
                    frozen[who], cut_s[who] = set(there[who]), now_s
            case "back":
                view.back(now_s)
                if frozen[who] is not None:
                    frozen[who], since_s[who] = None, now_s
            case "lose":
                view.close()
                lost.add(who)
        for reader in range(3):
            pieces, runs = [(branch, LAST)], [BlockRun(branch, 0, LAST)]
            told = views[reader].listed(pieces, runs, now_s)
            listed = {int(owner): _blocks([run[1:] for run in spans]) for owner, spans in told.items()}
            expected = {}
            for n in {0, 1, 2} - lost - {reader}:
                on_record, snapshot = there[n], frozen[n]
                if snapshot is not None:
                    renewed_s = since_s[n] + (cut_s[n] - since_s[n]) // (LEASE_S / 3) * (LEASE_S / 3)
                    on_record = snapshot if now_s < renewed_s + LEASE_S else set()
                if on_record:
                    expected[n] = on_record
            assert listed == expected


def _blocks(spans: list) -> set[int]:
    return {block for lo, hi in spans for block in range(lo, hi)}
