"""How routers of several processes tell each other of bookings: one message as bytes, and back.

Workers have numbers of their own in every process, so a message names them by address and life; content has branches of
its own, so a message holds the local hashes of its blocks, from which the receiver makes the same path. Messages come
from the network: whatever is not as it should be is refused as a whole, and nothing in it is ever run or opened.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgpack

from policies.cluster.actions import PublishBooking
from policies.cluster.blocks import ContentTree
from policies.cluster.bookings import BookingOp, BookingStep, SyncKind
from policies.cluster.ids import BlockHash, Leg, WorkerId
from policies.frozen import frozen

VERSION: Final = 1
_KEYS: Final = frozenset({"v", "origin", "from", "block_size", "seq", "kind", "dest", "ops"})


class Damaged(ValueError):
    """A message that is none of ours, or of another release."""


@frozen
class Sender:
    """Who speaks: the number of this router, its address, and how many tokens its blocks have."""

    origin: int
    address: str
    block_size: int


@frozen
class Message:
    """What was received. `unknown` steps were left out, for their workers are not known here."""

    sender: Sender
    seq: int
    kind: SyncKind
    dest: int | None
    ops: tuple[BookingOp, ...]
    unknown: int = 0


def write(action: PublishBooking, sender: Sender, name_of: Callable[[WorkerId], str | None]) -> bytes:
    """A message. `name_of` gives the name that all processes know a worker by (None: nobody else knows it)."""
    told = [_written(op, name_of) for op in action.ops]
    return bytes(
        msgpack.packb(
            {
                "v": VERSION,
                "origin": sender.origin,
                "from": sender.address,
                "block_size": sender.block_size,
                "seq": action.seq,
                "kind": action.kind.value,
                "dest": action.dest,
                "ops": [one for one in told if one is not None],
            }
        )
    )


def read(text: bytes, tree: ContentTree, worker_of: Callable[[str], WorkerId | None]) -> Message:
    """What `write` wrote. `worker_of` finds a worker by its name (None: it is not known here). Raises Damaged."""
    try:
        found = msgpack.unpackb(text)
        if not isinstance(found, Mapping) or set(found) != _KEYS or found["v"] != VERSION:
            raise Damaged("it is no message of this release")
        dest = found["dest"]
        sender = Sender(
            origin=_whole(found["origin"]), address=_text(found["from"]), block_size=_whole(found["block_size"])
        )
        if sender.block_size != tree.block_size:
            raise Damaged(f"router {sender.address} has blocks of {sender.block_size} tokens, here {tree.block_size}")
        ops = [_read(one, tree, worker_of) for one in found["ops"]]
        known = tuple(op for op in ops if op is not None)
        return Message(
            sender=sender,
            seq=_whole(found["seq"]),
            kind=SyncKind(found["kind"]),
            dest=None if dest is None else _whole(dest),
            ops=known,
            unknown=len(ops) - len(known),
        )
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, struct.error, msgpack.UnpackException) as error:
        raise Damaged(f"it is damaged ({type(error).__name__}: {error})") from error


def _written(op: BookingOp, name_of: Callable[[WorkerId], str | None]) -> Sequence[object] | None:
    """A step, without what it does not have. None: of a worker that nobody else can know."""
    if op.step is not BookingStep.ADD:
        return (op.step.value, op.booking, op.leg.value)
    assert op.worker_id is not None
    name = name_of(op.worker_id)
    if name is None:
        return None
    local = None if op.local_hashes is None else struct.pack(f"<{len(op.local_hashes)}Q", *op.local_hashes)
    return (op.step.value, op.booking, op.leg.value, name, op.isl, op.overlap_blocks, op.dp_rank, local)


def _read(told: Any, tree: ContentTree, worker_of: Callable[[str], WorkerId | None]) -> BookingOp | None:
    step, booking, leg, *rest = told
    if BookingStep(step) is not BookingStep.ADD:
        if rest:
            raise Damaged(f"a step {step} has more than it should")
        return BookingOp(step=BookingStep(step), booking=_text(booking), leg=Leg(leg))
    name, isl, overlap, dp_rank, packed = rest
    local = None if packed is None else tuple(map(BlockHash, struct.unpack(f"<{len(packed) // 8}Q", packed)))
    if local is not None and len(local) > _whole(isl) // tree.block_size:
        raise Damaged(f"{len(local)} blocks do not fit into a prompt of {isl} tokens")
    worker_id = worker_of(_text(name))
    if worker_id is None:
        return None
    return BookingOp(
        step=BookingStep.ADD,
        booking=_text(booking),
        leg=Leg(leg),
        worker_id=worker_id,
        isl=_whole(isl),
        blocks=None if local is None else tree.path(list(local), len(local) * tree.block_size),
        overlap_blocks=_whole(overlap),
        dp_rank=None if dp_rank is None else _whole(dp_rank),
        local_hashes=local,
    )


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Damaged(f"{value!r} is not a whole number of 0 or more")


def _text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise Damaged(f"{value!r} is not a text")
