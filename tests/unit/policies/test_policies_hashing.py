"""Block hashing: what is refused, what counts as the same, and what a trace's hash ids stand for."""

from __future__ import annotations

from array import array

import pytest

from policies.cluster.hashing import base_seed, chain_hashes, eagle_hashes, image_hash, local_hashes, trace_tokens
from policies.errors import ConfigError


def test_an_empty_name_is_no_name() -> None:
    assert base_seed("", "") == base_seed(None, None) == 1337


def test_repeated_text_is_not_the_same_block() -> None:
    first, second, third = chain_hashes(local_hashes([5] * 12, 4))
    assert len({first, second, third}) == 3


def test_a_block_size_of_zero_is_refused() -> None:
    for hashes in (local_hashes, eagle_hashes):
        with pytest.raises(ConfigError, match="block_size is 0 tokens, at least 1"):
            hashes([1, 2], 0)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_named(token: int) -> None:
    with pytest.raises(ConfigError, match=f"token {token} at position 1 does not fit 32 bits"):
        local_hashes([0, token], 1)


def test_an_array_of_tokens_is_hashed_as_it_lies() -> None:
    tokens = [0, 7, 2**32 - 1, 5, 9]
    assert local_hashes(array("I", tokens), 2) == local_hashes(tokens, 2) == local_hashes(tuple(tokens), 2)
    assert local_hashes(array("q", tokens), 2) == local_hashes(tokens, 2)
    assert eagle_hashes(array("I", tokens), 2) == eagle_hashes(tokens, 2)


def test_images_behind_the_last_complete_block_change_nothing() -> None:
    assert local_hashes(range(6), 4, image_hashes={1: [9]}) == local_hashes(range(6), 4)


def test_only_64_hex_digits_are_taken_as_a_hash() -> None:
    assert image_hash("0" * 15 + "A" + "f" * 48) == 0xA
    assert image_hash("0" * 63) != 0
    assert image_hash("g" * 64) != image_hash("0" * 64)


def test_trace_ids_stand_for_their_tokens() -> None:
    short, long = trace_tokens([7, 8], 4, 6), trace_tokens([7, 8], 4, 8)
    assert short == long[:6]
    assert long[:4] == trace_tokens([7], 4, 4)
    assert len(set(long)) == 8
    assert all(0 <= token < 2**31 for token in long)


def test_too_few_trace_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 hash ids of 4 tokens cover 8 tokens, the prompt has 9"):
        trace_tokens([7, 8], 4, 9)
