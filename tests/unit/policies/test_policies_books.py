"""The books: examples B1 to B8, lost workers, and nothing left when all is over."""

from __future__ import annotations

import pytest
from builders import keys_path

from policies.cluster.blocks import ContentTree
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import InvariantError
from policies.router.books import Books, DecayingBooks

W0, W1 = WorkerId(0), WorkerId(1)
R1, R2 = RequestId("r1"), RequestId("r2")
TREE = ContentTree(4, 4)
PROMPT = keys_path(TREE, [1, 2, 3, 4])


def after(books: Books, worker_id: WorkerId = W0) -> tuple[int, int, int]:
    load = books.load(worker_id)
    return load.prefill_tokens, load.blocks, load.requests


def booked(*requests: RequestId) -> Books:
    """A 16-token prompt of 4 blocks, 2 of them cached, booked on worker 0 for each request."""
    books = Books(4)
    for request_id in requests:
        books.book(request_id, W0, PROMPT, 0, 8)
    return books


def test_b1_and_b2_a_shared_prompt_counts_its_blocks_once() -> None:
    assert after(booked(R1)) == (8, 4, 1)
    assert after(booked(R1, R2)) == (16, 4, 2)


def test_b3_potential_blocks() -> None:
    books = booked(R1, R2)
    half_shared = keys_path(TREE, [1, 2, 7, 8])
    shared = books.depths(half_shared)[W0]
    assert books.load(W0).blocks + half_shared.blocks - shared == 6


def test_b4_prefill_done_once() -> None:
    books = booked(R1, R2)
    books.prefill_done(R1)
    assert after(books) == (8, 4, 2)
    books.prefill_done(R1)
    assert after(books) == (8, 4, 2)


def test_b5_an_output_block_at_each_full_one() -> None:
    books = booked(R1, R2)
    books.prefill_done(R1)
    books.emit(R1, 3)
    assert after(books) == (8, 4, 2)
    books.emit(R1, 1)
    assert after(books) == (8, 5, 2)
    books.emit(R1, 9)
    assert after(books) == (8, 7, 2)


def test_b6_and_b7_free_once() -> None:
    books = booked(R1, R2)
    books.prefill_done(R1)
    books.emit(R1, 4)
    books.free(R1)
    assert (after(books), books.unknown_frees) == ((8, 4, 1), 0)
    books.free(R1)
    assert (after(books), books.unknown_frees) == ((8, 4, 1), 1)


def test_b8_an_end_before_the_first_token_frees_the_prefill() -> None:
    books = booked(R2)
    books.free(R2)
    assert after(books) == (0, 0, 0)
    assert books.size == 0


def test_b9_the_oldest_prompt_shrinks_while_it_is_computed() -> None:
    books = DecayingBooks(4, tokens_per_s=4.0)  # 8 tokens in 2 s
    books.now_s = 10.0
    books.book(R1, W0, PROMPT, 0, 8)
    for at_s, expected in ((10.0, 8), (10.5, 6), (13.0, 0)):
        books.now_s = at_s
        assert books.prefill_tokens(W0) == expected
    books.book(R2, W0, PROMPT, 0, 8)
    assert books.prefill_tokens(W0) == 8  # it waits behind the first
    books.now_s = 14.0
    books.prefill_done(R1)
    assert books.prefill_tokens(W0) == 8  # and begins to shrink now
    books.now_s = 14.5
    assert books.prefill_tokens(W0) == 6
    books.free(R2)
    books.free(R1)
    assert (books.prefill_tokens(W0), books.prefill_tokens(W1), books.size) == (0, 0, 0)


def test_the_prompts_of_a_lost_worker_shrink_no_more() -> None:
    books = DecayingBooks(4, tokens_per_s=4.0)
    books.book(R1, W0, PROMPT, 0, 8)
    books.lose(W0)
    books.prefill_done(R1)
    books.book(R2, W0, PROMPT, 0, 8)
    assert books.prefill_tokens(W0) == 8
    books.free(R1)
    books.free(R2)
    assert books.size == 0


def test_b10_an_answer_of_known_length_weighs_less_the_more_of_it_is_made() -> None:
    books = Books(4)
    books.book(R1, W0, None, 3, 0)
    books.expect(R1, 100)
    books.emit(R1, 3)
    load = books.load(W0)
    assert load.blocks - load.spared_blocks == 3 * 0.97
    books.free(R1)
    books.book(R1, W0, None, 1, 0)
    books.expect(R1, 100)
    books.emit(R1, 25)  # six more blocks of four
    assert load.blocks - load.spared_blocks == 7 * 0.75
    books.emit(R1, 200)
    assert load.blocks - load.spared_blocks == 0
    books.free(R1)
    wide = Books(16)
    wide.book(R1, W0, None, 2, 0)
    wide.expect(R1, 100)
    wide.emit(R1, 25)  # one more block of 16, so three of its own
    assert wide.load(W0).blocks - wide.load(W0).spared_blocks == 3 * 0.75 == 2.25
    assert (load.blocks, load.spared_blocks) == (0, 0.0)


def test_blocks_without_content_are_nobody_elses() -> None:
    books = Books(4)
    books.book(R1, W0, None, 4, 16)
    books.book(R2, W0, None, 4, 16)
    assert after(books) == (32, 8, 2)
    assert books.depths(PROMPT) == {}


def test_paths_of_different_length_leave_in_any_order() -> None:
    books = Books(4)
    paths = {f"r{n}": keys_path(TREE, list(range(1, n + 1))) for n in (2, 5, 3, 5)}
    for request_id, path in paths.items():
        books.book(RequestId(request_id), W0, path, 0, 0)
    assert books.load(W0).blocks == 5
    books.free(RequestId("r5"))
    assert books.load(W0).blocks == 3
    books.free(RequestId("r2"))
    assert books.load(W0).blocks == 3
    books.free(RequestId("r3"))
    assert (books.load(W0).blocks, books.size) == (0, 0)


def test_how_far_open_requests_reach_follows_the_farthest_of_them() -> None:
    books = Books(4)
    prompts = {"r1": [1, 2, 3, 4], "r2": [1, 2, 8, 9], "r3": [1, 2, 8]}
    query = keys_path(TREE, [1, 2, 8, 9, 9])
    kept = [keys_path(TREE, keys) for keys in prompts.values()]
    for request_id, path in zip(["r3", "r1", "r2"], [kept[2], kept[0], kept[1]], strict=True):
        books.book(RequestId(request_id), W0, path, 0, 0)
    assert books.depths(query) == {W0: 4}
    books.free(RequestId("r2"))
    assert books.depths(query) == {W0: 3}
    books.free(RequestId("r3"))
    assert books.depths(query) == {W0: 2}


def test_a_lost_worker_frees_everything_at_once() -> None:
    books = booked(R1)
    books.book(R2, W1, PROMPT, 0, 8)
    books.lose(W0)
    assert books.depths(PROMPT) == {W1: 4}
    assert after(books, W0) == (0, 0, 0)
    assert after(books, W1) == (8, 4, 1)
    books.prefill_done(R1)
    books.emit(R1, 100)
    books.free(R1)  # its end still comes
    books.free(R2)
    assert (books.unknown_frees, books.size, len(books)) == (0, 0, 0)


def test_a_lost_worker_keeps_no_content_alive() -> None:
    tree, books = ContentTree(4, 4), Books(4)
    books.book(R1, W0, keys_path(tree, [1, 2]), 0, 8)
    assert len(tree) == 1
    books.lose(W0)
    assert (len(tree), len(books)) == (0, 1)


def test_a_request_of_a_lost_worker_can_be_sent_again() -> None:
    books = booked(R1)
    books.lose(W0)
    books.book(R1, W1, PROMPT, 0, 16)
    books.free(R1)
    assert (after(books, W1), books.size) == ((0, 0, 0), 0)


def test_a_request_is_on_one_worker() -> None:
    with pytest.raises(InvariantError, match="'r1' is booked already"):
        booked(R1, R1)
