"""Laws of choosing: fair draws, the batch cost equal to the terms, the cheapest taken, content equal to its hashes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
from builders import Scene, router
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.actions import Dispatch
from policies.cluster.blocks import ContentTree
from policies.cluster.draws import draw, pick
from policies.cluster.hashing import chain_hashes, local_hashes, trace_tokens
from policies.cluster.ids import RequestId, WorkerId
from policies.router.cost import Load, Weights, costs, terms
from policies.router.select import Ties, shares, softmax
from twin.mocker.kvnames import BlockNames

DRAWS = 3000


def within_three_sigma(counts: Counter, expected: dict[int, float]) -> bool:
    total = sum(counts.values())
    return all(abs(counts[i] - total * p) <= 3 * math.sqrt(total * p * (1 - p)) for i, p in expected.items())


@pytest.mark.parametrize("n", [2, 3, 7])
def test_ties_are_fair(n: int) -> None:
    ties, ids = Ties("seeded", 42), [WorkerId(i) for i in range(n)]
    counts = Counter(ties.lowest(RequestId(f"r{k}"), [1.0] * n, ids)[0] for k in range(DRAWS))
    assert within_three_sigma(counts, dict.fromkeys(range(n), 1 / n))


def test_softmax_draws_by_its_shares() -> None:
    cost = [14.0, 10.0, 11.0]
    counts = Counter(softmax(draw(42, "softmax", f"r{k}"), cost, 0.5) for k in range(DRAWS))
    assert within_three_sigma(counts, dict(enumerate(shares(cost, 0.5))))


def test_power_of_two_is_fair_among_idle_workers() -> None:
    n, counts = 4, Counter()
    for k in range(600):
        counts[Scene(router("power-of-two"), workers=n).send(f"r{k}")] += 1
    assert within_three_sigma(counts, dict.fromkeys(range(n), 1 / n))


def test_draws_of_other_purposes_and_indices_are_unrelated() -> None:
    names = [f"r{k}" for k in range(DRAWS)]
    for (a, j), (b, k) in [(("tie", 0), ("random", 0)), (("p2c", 0), ("p2c", 1))]:
        cells = Counter((pick(draw(1, a, r, j), 3), pick(draw(1, b, r, k), 3)) for r in names)
        flat = Counter({3 * x + y: cells[x, y] for x, y in product(range(3), repeat=2)})
        assert within_three_sigma(flat, dict.fromkeys(range(9), 1 / 9))


@given(st.integers(0, 2**64 - 1), st.text(max_size=8), st.integers(0, 5), st.integers(1, 10**9))
def test_a_draw_is_in_the_unit_interval_and_a_pick_in_range(seed: int, name: str, k: int, n: int) -> None:
    u = draw(seed, "any", name, k)
    assert 0 <= u < 1
    assert 0 <= pick(u, n) < n


def test_the_largest_draw_picks_the_last() -> None:
    largest = 1 - 2.0**-53
    assert all(pick(largest, n) == n - 1 for n in (*range(1, 2000), 2**20, 2**30 + 1))


# ---------------------------------------------------------------- cost

SIZES = st.integers(0, 100_000)
FACTORS = st.floats(0, 10)


@given(
    w=st.builds(
        Weights,
        overlap_credit=FACTORS,
        credit_decay=st.just(0.0) | FACTORS,
        prefill_load_scale=FACTORS,
        host=st.floats(0, 1),
        disk=st.floats(0, 1),
        shared=st.floats(0, 1),
        active_request=FACTORS,
        track_prefill=st.booleans(),
        decode_leg=st.booleans(),
    ),
    isl=st.integers(1, 200_000),
    block_size=st.sampled_from([1, 16, 64, 100, 512]),
    rows=st.lists(st.tuples(SIZES, SIZES, st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_the_batch_cost_is_the_sum_of_its_terms(w: Weights, isl: int, block_size: int, rows: list) -> None:
    loads = [(p, d, r, int(share * (isl // block_size))) for p, d, r, share in rows]
    least = min(p for p, *_ in loads)
    told = [terms(w, isl, block_size, Load(*load), least) for load in loads]
    assert costs(w, isl, block_size, *zip(*loads, strict=True)) == [t.cost_blocks for t in told]
    for t in told:
        assert t.cost_blocks >= 0
        assert min(t) >= 0


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=4, max_size=4)), max_size=25))
def test_kv_takes_a_cheapest_worker(requests: list) -> None:
    scene = Scene(router("kv", explain=True), workers=3)
    for n, (worker_id, keys) in enumerate(requests):
        sent = scene.arrive(f"r{n}", isl=256, keys=keys)
        assert isinstance(sent, Dispatch)
        chosen = next(c for c in sent.candidates if c.worker_id == sent.worker_id)
        assert chosen.cost == min(c.cost for c in sent.candidates)
        assert sent.overlap_blocks == chosen.overlap_blocks <= 3  # the last block is never taken from the cache
        scene.stored(worker_id % 3, keys)
        if worker_id == 3:
            scene.first_token(f"r{n}")
            scene.finish(f"r{n}")


# ---------------------------------------------------------------- content

PROMPT = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 60))


@given(
    prompts=st.lists(PROMPT, min_size=2, max_size=5),
    key_tokens=st.integers(1, 10),
    block_size=st.integers(1, 12),
)
def test_paths_share_what_chained_hashes_of_the_tokens_share(prompts: list, key_tokens: int, block_size: int) -> None:
    tree = ContentTree(key_tokens, block_size)
    paths, chains = [], []
    for keys, cut in prompts:
        isl = max(1, len(keys) * key_tokens - cut)
        paths.append(tree.path(keys, isl))
        chains.append(chain_hashes(local_hashes(trace_tokens(keys, key_tokens, isl), block_size)))
    for (one, hashes_one), (two, hashes_two) in product(zip(paths, chains, strict=True), repeat=2):
        assert one.blocks == len(hashes_one)
        assert len(set(blocks_of(one)) & set(blocks_of(two))) == len(set(hashes_one) & set(hashes_two))


@given(
    prompts=st.lists(PROMPT, min_size=2, max_size=5),
    key_tokens=st.integers(1, 10),
    block_size=st.integers(1, 12),
)
def test_simulated_engines_name_blocks_as_their_tokens_would(prompts: list, key_tokens: int, block_size: int) -> None:
    """Chained, their local hashes are equal where those of the tokens are; and so are the ids that they give."""
    tree = ContentTree(key_tokens, block_size)
    names = BlockNames(key_tokens, block_size)
    of_tokens, of_names, of_ids, held = [], [], [], []
    for keys, cut in prompts:
        isl = max(1, len(keys) * key_tokens - cut)
        path = tree.path(keys, isl)
        held.append(path)
        of_tokens.append(chain_hashes(local_hashes(trace_tokens(keys, key_tokens, isl), block_size)))
        of_names.append(chain_hashes(names.prompt(path)))
        of_ids.append([ext for run in path.runs() for ext in names.of(*run).exts])
        if path.blocks:
            assert names.hashes_to(path.pieces[-1][0], path.blocks) == names.prompt(path)
    for one, two in product(range(len(prompts)), repeat=2):
        shared = len(set(of_tokens[one]) & set(of_tokens[two]))
        assert len(set(of_names[one]) & set(of_names[two])) == shared
        assert len(set(of_ids[one]) & set(of_ids[two])) == shared


def blocks_of(path: object) -> list[tuple]:
    return [(run.branch, n) for run in path.runs() for n in range(run.lo, run.hi)]  # type: ignore[attr-defined]
