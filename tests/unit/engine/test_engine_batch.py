"""The decode batch: lengths, block crossings and finishes as running totals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.blocks import NO_BLOCKS, ContentTree
from policies.cluster.ids import RequestId
from twin.engine.batch import DecodeBatch
from twin.engine.epoch import Epoch
from twin.engine.sequence import Sequence
from twin.perf.protocol import DecodePiece


def decoding(prompt: int, outputs: int, limit: int, order: int = 0) -> Sequence:
    own = ContentTree(16, 16).private()
    seq = Sequence(RequestId(f"{prompt}-{order}"), prompt, limit, NO_BLOCKS, own)
    seq.outputs = outputs
    seq.order = order
    return seq


def test_new_blocks_fall_where_lengths_cross() -> None:
    """Lengths 601, 640, 641, 705 with blocks of 64: two at step 0, one each at 1 and 40, then again from 64."""
    batch = DecodeBatch(64)
    for n, length in enumerate((601, 640, 641, 705)):
        batch.join(decoding(length - 1, 1, 10_000, n))
    taken = {k for k in range(1, 110) for _ in range(batch.crossings(k) - batch.crossings(k - 1 if k > 1 else 0))}
    assert {k - 1 for k in taken} == {0, 1, 40, 64, 65, 104}
    assert batch.crossings(1) == 2
    assert batch.crossings(65) == 6


@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 50),
)
def test_crossings_are_what_a_loop_over_members_counts(
    block_size: int, lengths: list[int], before: int, room: int, steps: int
) -> None:
    batch = DecodeBatch(block_size)
    for n, length in enumerate(lengths):
        batch.join(decoding(length, 1, 10_000, n))
    batch.advance(before)

    def blocks(k: int) -> int:
        def held(tokens: int) -> int:
            return -(-tokens // block_size)

        return sum(held(n + 1 + before + k - 1) - held(n + 1 + before - 1) for n in lengths)

    assert batch.crossings(steps) == blocks(steps)
    fitting = batch.steps_within(steps, room)
    assert blocks(fitting) <= room or fitting == 0
    assert fitting == steps or blocks(fitting + 1) > room
    assert batch.ctx_tokens == sum(n + 1 + before for n in lengths)


def test_members_finish_in_running_order() -> None:
    batch = DecodeBatch(16)
    late, early = decoding(10, 1, 5, order=2), decoding(50, 1, 5, order=1)
    batch.join(late)
    batch.join(early)
    assert batch.next_finish() == 4
    batch.advance(4)
    assert batch.pop_finished() == [early, late]
    assert (early.outputs, late.outputs, batch.size, batch.ctx_tokens) == (5, 5, 0, 0)


def test_who_leaves_knows_its_length() -> None:
    batch = DecodeBatch(16)
    seq = decoding(20, 1, 100)
    batch.join(seq)
    batch.advance(7)
    batch.leave(seq)
    assert (seq.outputs, seq.computed, seq.owned) == (8, 27, 2)
    assert batch.crossings(16) == 0


@pytest.mark.parametrize("planned", [1, 2, 5, 100])
def test_an_instant_is_found_in_the_step_that_it_falls_in(planned: int) -> None:
    epoch = Epoch()
    epoch.begin(DecodePiece(0.01, 1e-5, 1e-8, 2**62), 3.0)
    ends = [epoch.end_s(k) for k in range(1, planned + 1)]
    for k, end_s in enumerate(ends, start=1):
        assert epoch.steps_to(end_s, 3.0, ends[-1], planned) == k, "the end of a step belongs to that step"
        assert epoch.steps_to(end_s - 1e-6, 3.0, ends[-1], planned) == k


def test_step_times_add_up_to_the_closed_sum() -> None:
    epoch = Epoch()
    epoch.begin(DecodePiece(0.01, 1e-5, 1e-8, 2**62), 0.0)
    total_s = 0.0
    for j in range(500):
        total_s += 0.01 + 1e-5 * j + 1e-8 * j * j
        assert epoch.end_s(j + 1) == pytest.approx(total_s, abs=1e-9)
