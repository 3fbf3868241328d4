"""What routers say to each other as bytes: it comes back the same among other numbers, or not at all."""

from __future__ import annotations

from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.peer_wire import Damaged, Sender, read, write
from policies.cluster.actions import PublishBooking
from policies.cluster.blocks import ContentTree
from policies.cluster.bookings import BookingOp, BookingStep, SyncKind
from policies.cluster.ids import BlockHash, Leg, WorkerId

ME = Sender(origin=2**62, address="tcp://127.0.0.1:7000", block_size=32)
THERE = {WorkerId(0): "http://a#0", WorkerId(1): "http://b#9"}
HERE = {"http://b#9": WorkerId(5)}


def add(worker_id: int, local: tuple[int, ...] = (2**64 - 1, 3)) -> BookingOp:
    tree = ContentTree(32, 32)
    return BookingOp(
        step=BookingStep.ADD, booking="r", leg=Leg.PREFILL, worker_id=WorkerId(worker_id), isl=100,
        blocks=tree.path(list(local), 32 * len(local)), overlap_blocks=1, dp_rank=0,
        local_hashes=tuple(map(BlockHash, local)),
    )  # fmt: skip


def message(*ops: BookingOp) -> bytes:
    told = PublishBooking(origin=ME.origin, seq=7, kind=SyncKind.NEWS, ops=ops, dest=3, reason="test")
    return write(told, ME, THERE.get)


def test_a_message_comes_back_with_the_numbers_and_branches_of_its_reader() -> None:
    tree = ContentTree(32, 32)
    mine = tree.path([2**64 - 1, 3, 4], 96)
    found = read(message(add(1), BookingOp(step=BookingStep.FREE, booking="r", leg=Leg.DECODE)), tree, HERE.get)
    assert (found.sender, found.seq, found.kind, found.dest, found.unknown) == (ME, 7, SyncKind.NEWS, 3, 0)
    first, second = found.ops
    assert (first.worker_id, first.isl, first.overlap_blocks, first.dp_rank) == (WorkerId(5), 100, 1, 0)
    assert (first.booking, first.leg, first.local_hashes) == ("r", Leg.PREFILL, add(1).local_hashes)
    assert first.blocks is not None
    assert (first.blocks.blocks, first.blocks.pieces[0][0]) == (2, mine.pieces[0][0]), "it shares our branch"
    assert second == BookingOp(step=BookingStep.FREE, booking="r", leg=Leg.DECODE)


def test_steps_of_workers_that_are_not_known_here_are_left_out_and_counted() -> None:
    found = read(message(add(0), add(1), add(2)), ContentTree(32, 32), HERE.get)
    assert [op.worker_id for op in found.ops] == [WorkerId(5)]
    assert found.unknown == 1, "and worker 2 nobody else can know"


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(Damaged, match=r"tcp://127.0.0.1:7000 has blocks of 32 tokens, here 16"):
        read(message(add(1)), ContentTree(16, 16), HERE.get)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "no message of this release"),
        ({"more": 1}, "no message of this release"),
        ({"kind": "shout"}, "damaged"),
        ({"seq": -1}, "-1 is not a whole number"),
        ({"origin": True}, "True is not a whole number"),
        ({"ops": [["free", "r"]]}, "damaged"),
        ({"ops": [["free", "r", "agg", "x"]]}, "more than it should"),
        ({"ops": [["add", "r", "agg", "http://b#9", 31, 0, None, b"12345678"]]}, "1 blocks do not fit"),
        ({"ops": [["add", "r", "agg", "http://b#9", 64, 0, None, b"123"]]}, "damaged"),
        ({"ops": 5}, "damaged"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(change: dict[str, object], said: str) -> None:
    good = msgpack.unpackb(message())
    with pytest.raises(Damaged, match=said):
        read(msgpack.packb(good | change), ContentTree(32, 32), HERE.get)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_break_nothing(text: bytes) -> None:
    with pytest.raises(Damaged):
        read(text, ContentTree(32, 32), HERE.get)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_message_with_one_byte_changed_is_read_or_refused(at: int, byte: int) -> None:
    text = bytearray(message(add(1), add(0)))
    text[at % len(text)] = byte
    with suppress(Damaged):
        found = read(bytes(text), ContentTree(32, 32), HERE.get)
        assert len(found.ops) + found.unknown == 2
