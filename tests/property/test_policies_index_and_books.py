"""Index and books against naive models: sets of blocks, and a list of open prompts. Both must agree at every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import keys_path
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.cluster.ids import RequestId, WorkerId
from policies.router.books import Books
from policies.router.index import PrefixIndex

WORKERS = [WorkerId(n) for n in range(3)]

# Few keys, so that prompts share, part and meet again; bounds in blocks, most often from the start.
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=8)
BOUNDS = st.tuples(st.sampled_from([0, 0, 0, 1, 2, 3, 5]), st.integers(1, 8))


class NaiveCache:
    """What each worker holds, as a set: block n of a prompt is named by all keys that its tokens depend on."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[tuple[int, ...]]] = {w: set() for w in WORKERS}
        self.duplicates = self.orphans = self.unknown = 0

    def store(self, worker_id: WorkerId, names: list[tuple[int, ...]], before: tuple[int, ...] | None) -> None:
        held = self.held[worker_id]
        if before is not None and before not in held:
            self.orphans += len(set(names) - held)
        self.duplicates += len(held.intersection(names))
        held.update(names)

    def remove(self, worker_id: WorkerId, names: list[tuple[int, ...]]) -> None:
        held = self.held[worker_id]
        self.unknown += len(set(names) - held)
        held.difference_update(names)

    def match(self, worker_id: WorkerId, names: list[tuple[int, ...]]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.held[worker_id]), len(names))


def runs(path: BlockPath, lo: int, hi: int) -> Iterator[BlockRun]:
    for run in path.runs():
        a, b = max(run.lo, lo), min(run.hi, hi)
        if a < b:
            yield BlockRun(run.branch, a, b)


STEPS = st.lists(
    st.tuples(st.sampled_from(["store"] * 6 + ["remove"] * 4 + ["clear"]), st.sampled_from(WORKERS), PROMPTS, BOUNDS),
    min_size=5,
    max_size=40,
)


@pytest.mark.parametrize("block_size", [1, 2])
@given(steps=STEPS, queries=st.lists(PROMPTS, min_size=2, max_size=6))
def test_the_index_is_the_set_of_blocks_held(block_size: int, steps: list, queries: list[list[int]]) -> None:
    """With two keys to a block, branches part inside blocks too."""
    tree, index, naive = ContentTree(1, block_size), PrefixIndex(), NaiveCache()

    def named(prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:n]) for n in range(block_size, len(prompt) + 1, block_size)]

    for kind, worker_id, prompt, (lo, length) in steps:
        names = named(prompt)
        hi = min(lo + length, len(names))
        path = keys_path(tree, prompt)
        if kind == "clear":
            index.clear(worker_id)
            naive.held[worker_id].clear()
        elif kind == "store":
            index.store(worker_id, runs(path, lo, hi))
            naive.store(worker_id, names[lo:hi], names[lo - 1] if 0 < lo < hi else None)
        else:
            index.remove(worker_id, runs(path, lo, hi))
            naive.remove(worker_id, names[lo:hi])
        del path
        for query in [prompt, *queries]:
            found = index.depths(keys_path(tree, query))
            assert {w: found.get(w, 0) for w in WORKERS} == {w: naive.match(w, named(query)) for w in WORKERS}
            assert 0 not in found.values()
        assert {w: index.blocks(w) for w in WORKERS} == {w: len(naive.held[w]) for w in WORKERS}
        assert (index.duplicate_stores, index.unknown_removals) == (naive.duplicates, naive.unknown)
        assert index.orphan_stores == naive.orphans
    for worker_id in WORKERS:
        for name in sorted(naive.held[worker_id], key=len, reverse=True):
            last = len(name) // block_size
            index.remove(worker_id, runs(keys_path(tree, list(name)), last - 1, last))
    assert (index.size, len(index), len(tree)) == (0, 0, 0)


BOOKINGS = st.lists(
    st.tuples(
        st.sampled_from(["book"] * 6 + ["prefill", "emit", "free", "free", "free", "lose"]),
        st.integers(0, 9),
        st.sampled_from(WORKERS),
        st.one_of(st.none(), PROMPTS),
        st.integers(0, 50),
    ),
    min_size=5,
    max_size=50,
)


class NaiveBooks:
    """Every open request with all it holds; totals are counted from scratch."""

    def __init__(self) -> None:
        self.open: dict[int, dict] = {}

    def total(self, worker_id: WorkerId) -> tuple[int, int, int]:
        here = [r for r in self.open.values() if r["worker"] == worker_id]
        shared = {tuple(r["prompt"][: n + 1]) for r in here for n in range(len(r["prompt"]))}
        own = sum(r["own"] + r["emitted"] // 4 for r in here)
        return sum(r["prefill"] for r in here), len(shared) + own, len(here)

    def active(self, worker_id: WorkerId, prompt: list[int]) -> int:
        here = [r["prompt"] for r in self.open.values() if r["worker"] == worker_id]
        return max((common(p, prompt) for p in here), default=0)


def common(one: list[int], two: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(BOOKINGS, PROMPTS)
def test_the_books_are_the_open_requests(steps: list, query: list[int]) -> None:
    tree, books, naive = ContentTree(1, 1), Books(4), NaiveBooks()
    unknown = 0
    for kind, n, worker_id, prompt, tokens in steps:
        request_id = RequestId(f"r{n}")
        held = naive.open.get(n)
        if kind == "book" and held is None:
            own = 3 if prompt is None else 0
            books.book(request_id, worker_id, keys_path(tree, prompt) if prompt else None, own, tokens)
            naive.open[n] = {"worker": worker_id, "prompt": prompt or [], "own": own, "emitted": 0, "prefill": tokens}
        elif kind == "prefill":
            books.prefill_done(request_id)
            if held is not None:
                held["prefill"] = 0
        elif kind == "emit":
            books.emit(request_id, tokens)
            if held is not None:
                held["emitted"] += tokens
        elif kind == "free":
            books.free(request_id)
            unknown += held is None
            naive.open.pop(n, None)
        elif kind == "lose":
            books.lose(worker_id)
            for request in naive.open.values():
                if request["worker"] == worker_id:
                    request["worker"] = None
        for w in WORKERS:
            load = books.load(w)
            assert (load.prefill_tokens, load.blocks, load.requests) == naive.total(w)
        found = books.depths(keys_path(tree, query))
        assert {w: found.get(w, 0) for w in WORKERS} == {w: naive.active(w, query) for w in WORKERS}
        assert books.unknown_frees == unknown
    for n in list(naive.open):
        books.free(RequestId(f"r{n}"))
    assert (books.size, len(books), len(tree)) == (0, 0, 0)
    assert all((load.prefill_tokens, load.blocks, load.requests) == (0, 0, 0) for load in books.loads.values())
