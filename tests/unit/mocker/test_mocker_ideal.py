"""The endless cache: the worked example, a naive set of prefixes, and where it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.ideal import IdealCache


def test_the_worked_example() -> None:
    cache = IdealCache(key_tokens=16, block_size=16)
    held = []
    for keys in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 7], [8, 9, 1, 2], [1, 2, 5, 6]):
        before = cache.blocks["hit_blocks"]
        cache.add(keys, 64)
        held.append(cache.blocks["hit_blocks"] - before)
    assert held == [0, 2, 3, 0, 3]
    assert cache.blocks == {"prompt_blocks": 20, "hit_blocks": 8}


PROMPTS = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 15), st.booleans())


@given(st.lists(PROMPTS, max_size=20), st.sampled_from([1, 4, 16, 48]))
def test_it_counts_what_a_set_of_token_prefixes_would(
    prompts: list[tuple[list[int], int, bool]], block_size: int
) -> None:
    """However many prompts are counted together: who looks in between has those counted that came before."""
    cache, seen, hits, blocks = IdealCache(16, block_size), set[tuple[int, ...]](), 0, 0
    for keys, short, looked_at in prompts:
        tokens = [16 * place + 1000 * key for key in keys for place in range(16)][: 16 * len(keys) - short]
        isl = len(tokens)
        full = [tuple(tokens[: end * block_size]) for end in range(1, isl // block_size + 1)]
        usable = full[: (isl - 1) // block_size]
        hits += sum(prefix in seen for prefix in usable)
        blocks += len(full)
        seen |= {tuple(tokens[:end]) for end in range(isl + 1)}
        cache.add([*keys, 7], isl)  # ids beyond the prompt say nothing
        if looked_at:
            assert cache.blocks == {"prompt_blocks": blocks, "hit_blocks": hits}
    assert cache.blocks == {"prompt_blocks": blocks, "hit_blocks": hits}


@pytest.mark.parametrize("odd", [-1, -(1 << 64), (1 << 64) - 1])
def test_an_id_may_be_any_number(odd: int) -> None:
    cache = IdealCache(16, 16)
    cache.add([odd, 1], 32)
    cache.add([odd, 2], 32)
    cache.add([1, odd], 32)
    assert cache.blocks == {"prompt_blocks": 6, "hit_blocks": 1}


def test_prompts_of_unknown_content_count_and_hit_nothing() -> None:
    cache = IdealCache(16, 16)
    cache.add(None, 100)
    cache.add(None, 100)
    assert cache.blocks == {"prompt_blocks": 12, "hit_blocks": 0}


def test_beyond_the_limit_there_is_no_figure() -> None:
    cache = IdealCache(16, 16, max_ids=4)
    cache.add([1, 2, 3, 4], 64)
    assert not cache.full
    cache.add([5], 16)
    assert cache.full
    assert cache.blocks == {}
    cache.add([1, 2], 32)  # and it goes on without keeping anything
