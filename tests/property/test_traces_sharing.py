"""Laws of shared prefixes, duplicates and slices: what is computed in one pass equals what is found by comparing every
pair of rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from traces.arrow import int_lists, strings, valid_flags, values_under
from traces.duplicates import DuplicateCounter
from traces.errors import TraceError
from traces.prefixes import PrefixTree
from traces.rows import IdLists, Numbers, Rows
from traces.schema import canonical_schema
from traces.transform import transform

BLOCK = 4

Prompt = tuple[tuple[int, ...], int]


@st.composite
def prompts(draw: st.DrawFn) -> list[Prompt]:
    """Prompts as (ids, tokens); few ids, so that much is shared."""
    found = []
    for ids in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=25)):
        found.append((tuple(ids), draw(st.integers(1, BLOCK * len(ids)))))
    return found


def tokens(prompt: Prompt) -> list[tuple[int, int]]:
    ids, isl = prompt
    return [(ids[j // BLOCK], j % BLOCK) for j in range(isl)]


def common(one: Prompt, other: Prompt) -> int:
    pairs = list(zip(tokens(one), tokens(other), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(prompts())
def test_the_tree_knows_the_longest_prefix_shared_with_any_earlier_prompt(found: list[Prompt]) -> None:
    tree = PrefixTree(BLOCK)
    for i, prompt in enumerate(found):
        expected = max((common(prompt, earlier) for earlier in found[:i]), default=0)
        assert tree.add(prompt[0], prompt[1]) == expected
    covered = {ids[: n + 1] for ids, isl in found for n in range(-(-isl // BLOCK))}
    assert len(tree) == len(covered)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), st.lists(st.integers(0, 1), max_size=2))
    ),
    st.integers(1, 10),
)
def test_duplicates_are_counted_across_chunks(found: list[tuple[int, int, int, list[int]]], size: int) -> None:
    found = sorted(found, key=lambda row: row[0])
    expected = sum(row in found[:i] for i, row in enumerate(found))
    counter = DuplicateCounter()
    counted = 0
    for at in range(0, len(found), size):
        part = found[at : at + size]
        lengths = [len(row[3]) for row in part]
        columns = (np.array([row[i] for row in part], np.int64) for i in range(3))
        counted += counter.count(
            Rows(
                count=len(part),
                numbers=dict(zip(("arrival_s", "isl", "osl"), map(Numbers, columns), strict=True)),
                place=lambda i: i,
                ids=IdLists(np.cumsum([0, *lengths]), np.array([each for row in part for each in row[3]], np.int64)),
            )
        )
    assert counted == expected


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=40).map(sorted),
    st.integers(1, 10),
    st.one_of(st.none(), st.integers(1, 50)),
    st.floats(0, 100),
    st.one_of(st.none(), st.floats(0, 120)),
    st.floats(0.01, 100),
)
def test_a_cut_trace_has_the_rows_and_gaps_of_its_part(
    arrivals: list[float], size: int, limit: int | None, start_s: float, end_s: float | None, speedup: float
) -> None:
    columns = {"arrival_s": arrivals, "isl": list(range(1, len(arrivals) + 1)), "osl": [1] * len(arrivals)}
    whole = pa.RecordBatch.from_pydict(columns, schema=canonical_schema(columns))
    batches = [whole.slice(at, size) for at in range(0, len(arrivals), size)]
    kept = [i for i, at_s in enumerate(arrivals) if at_s >= start_s and (end_s is None or at_s < end_s)][:limit]
    try:
        cut = transform(batches, limit=limit, start_s=start_s, end_s=end_s, speedup=speedup)
        found = [row for batch in cut for row in batch.to_pylist()]
    except TraceError:
        assert not kept or (end_s is not None and end_s <= start_s)
        return
    assert [row["isl"] for row in found] == [i + 1 for i in kept]
    assert [row["arrival_s"] for row in found] == [(arrivals[i] - arrivals[kept[0]]) / speedup for i in kept]


@given(
    st.lists(st.one_of(st.none(), st.text(max_size=5))),
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
    st.lists(st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)), min_size=1),
    st.integers(0, 5),
)
def test_arrays_from_buffers_are_those_that_pyarrow_makes(
    names: list[str | None], lists: list[list[int]], numbers: list[int | None], skip: int
) -> None:
    assert strings(names).equals(pa.array(names, pa.string()))
    values = np.array([each for ids in lists for each in ids], np.int64)
    made = int_lists(np.array([len(ids) for ids in lists], np.int64), values)
    made.validate(full=True)
    assert made.to_pylist() == [ids or None for ids in lists]
    part = pa.array(numbers, pa.int32()).slice(skip)
    assert valid_flags(part).tolist() == [value is not None for value in numbers[skip:]]
    assert values_under(part).tolist() == [value or 0 for value in numbers[skip:]]
