"""What routers tell each other of their bookings: the words of replica synchronisation.

Plain values in events and actions; who sends what, and what a router makes of it, is `policies.router.replicas`.
"""

from __future__ import annotations

from enum import Enum

from policies.cluster.blocks import BlockPath
from policies.cluster.ids import BlockHash, Leg, WorkerId
from policies.frozen import frozen


class BookingStep(Enum):
    """What became of a booking: made, its prompt computed, over."""

    ADD = "add"
    PREFILL_DONE = "prefill_done"
    FREE = "free"


class SyncKind(Enum):
    """A batch of news, all that is open (`RESYNC`), or the wish for that (`ASK`); of one that has lost everything
    (`LOST`) also the wish for its own bookings, which come back as its peers know them (`RETURN`)."""

    NEWS = "news"
    RESYNC = "resync"
    ASK = "ask"
    LOST = "lost"
    RETURN = "return"


@frozen
class BookingOp:
    """One step of the booking of a leg. `booking` is the name under which the request draws: another one for each
    attempt.

    The rest belongs to `ADD`: where the request went (`dp_rank` None: the worker chose), its prompt (`isl` tokens, the
    content of its blocks, by local hashes too where engines tell of theirs), and how many of these the worker had.
    """

    step: BookingStep
    booking: str
    leg: Leg = Leg.AGG
    worker_id: WorkerId | None = None
    isl: int = 0
    blocks: BlockPath | None = None
    overlap_blocks: int = 0
    dp_rank: int | None = None
    local_hashes: tuple[BlockHash, ...] | None = None
