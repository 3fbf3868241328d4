"""Index and books against naive models: sets of blocks, and a list of open prompts. Both must agree at every step."""

from __future__ import annotations

from collections.abc import Iterator

from builders import keys_path
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.cluster.ids import RequestId, WorkerId
from policies.router.books import Books
from policies.router.index import PrefixIndex

WORKERS = [WorkerId(n) for n in range(3)]

# Few keys and short prompts, so that prompts share, part and meet again.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
BOUNDS = st.tuples(st.integers(0, 7), st.integers(0, 7))


class NaiveCache:
    """What each worker holds, as a set of prefixes: the block that ends prompt[:n] is named by prompt[:n]."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[tuple[int, ...]]] = {w: set() for w in WORKERS}
        self.duplicates = self.orphans = self.unknown = 0

    def store(self, worker_id: WorkerId, names: list[tuple[int, ...]]) -> None:
        held = self.held[worker_id]
        if names and len(names[0]) > 1 and names[0][:-1] not in held:
            self.orphans += len(set(names) - held)
        self.duplicates += len(held.intersection(names))
        held.update(names)

    def remove(self, worker_id: WorkerId, names: list[tuple[int, ...]]) -> None:
        held = self.held[worker_id]
        self.unknown += len(set(names) - held)
        held.difference_update(names)

    def match(self, worker_id: WorkerId, prompt: list[int]) -> int:
        depth = 0
        while depth < len(prompt) and tuple(prompt[: depth + 1]) in self.held[worker_id]:
            depth += 1
        return depth


def named(prompt: list[int], lo: int, hi: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[: n + 1]) for n in range(lo, hi)]


def runs(path: BlockPath, lo: int, hi: int) -> Iterator[BlockRun]:
    for run in path.runs():
        a, b = max(run.lo, lo), min(run.hi, hi)
        if a < b:
            yield BlockRun(run.branch, a, b)


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "store", "remove", "clear"]), st.sampled_from(WORKERS), PROMPTS, BOUNDS),
    max_size=30,
)


@given(STEPS, st.lists(PROMPTS, min_size=1, max_size=6))
def test_the_index_is_the_set_of_blocks_held(steps: list, queries: list[list[int]]) -> None:
    tree, index, naive = ContentTree(1, 1), PrefixIndex(), NaiveCache()
    for kind, worker_id, prompt, bounds in steps:
        lo, hi = min(bounds), min(max(bounds), len(prompt))
        path = keys_path(tree, prompt)
        if kind == "clear":
            index.clear(worker_id)
            naive.held[worker_id].clear()
        elif kind == "store":
            index.store(worker_id, runs(path, lo, hi))
            naive.store(worker_id, named(prompt, lo, hi))
        else:
            index.remove(worker_id, runs(path, lo, hi))
            naive.remove(worker_id, named(prompt, lo, hi))
        del path
        for query in [prompt, *queries]:
            found = index.depths(keys_path(tree, query))
            assert {w: found.get(w, 0) for w in WORKERS} == {w: naive.match(w, query) for w in WORKERS}
            assert 0 not in found.values()
        assert {w: index.blocks(w) for w in WORKERS} == {w: len(naive.held[w]) for w in WORKERS}
        assert (index.duplicate_stores, index.unknown_removals) == (naive.duplicates, naive.unknown)
        assert index.orphan_stores == naive.orphans
    for worker_id in WORKERS:
        for name in sorted(naive.held[worker_id], key=len, reverse=True):
            index.remove(worker_id, runs(keys_path(tree, list(name)), len(name) - 1, len(name)))
    assert (index.size, len(index), len(tree)) == (0, 0, 0)


BOOKINGS = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "book", "prefill", "emit", "free", "free", "lose"]),
        st.integers(0, 9),
        st.sampled_from(WORKERS),
        st.one_of(st.none(), PROMPTS),
        st.integers(0, 50),
    ),
    max_size=40,
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
