"""A request that has arrived and not ended, as the world keeps it: its row, where its legs are, what the client has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.cluster.blocks import NO_BLOCKS, BlockPath, ContentTree
from policies.cluster.ids import Leg, RequestId, WorkerId
from twin.engine.sequence import Sequence
from twin.mocker.demand import Row

if TYPE_CHECKING:
    from twin.mocker.handoff import Handoff


@dataclass(slots=True, eq=False)
class OpenRequest:
    """`sequence` is the leg that answers, `prefill` the one that computes the prompt for it elsewhere (None: nobody).

    `first_token_s`, `last_token_s` and `outputs` are set where the client has tokens that `sequence` does not know of.
    """

    request_id: RequestId
    row: Row
    arrival_s: float
    path: BlockPath | None
    worker_id: WorkerId | None = None
    prefill_worker_id: WorkerId | None = None
    dispatch_s: float | None = None
    sequence: Sequence | None = None
    prefill: Sequence | None = None
    handoff: Handoff | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    outputs: int | None = None
    closed: bool = False

    def leg(self, leg: Leg, tree: ContentTree, now_s: float) -> Sequence:
        """A new sequence for one leg, dispatched now. Both legs of a request have one content."""
        row, path = self.row, self.path
        own = tree.private()
        if path is None:
            other = self.sequence or self.prefill
            if other is not None:
                own, path = other.own, other.path
            else:
                blocks = row.isl // tree.block_size
                path = BlockPath(((own, blocks),), blocks) if blocks else NO_BLOCKS
        limit = 1 if leg is Leg.PREFILL else row.osl
        seq = Sequence(
            self.request_id,
            row.isl,
            limit,
            path,
            own,
            row=row.row,
            arrival_s=self.arrival_s,
            dispatch_s=now_s,
            leg=leg,
        )
        if leg is Leg.PREFILL:
            self.prefill = seq
        else:
            self.sequence = seq
        return seq

    # ------------------------------------------------------------ what the record says

    @property
    def admitted(self) -> Sequence | None:
        """The leg whose admission counts: the one that computes the prompt."""
        return self.prefill if self.prefill is not None else self.sequence

    @property
    def first_s(self) -> float | None:
        """When the client had its first token."""
        if self.first_token_s is not None:
            return self.first_token_s
        return self.sequence.first_token_s if self.sequence is not None else None

    @property
    def last_s(self) -> float | None:
        """When the client had its last token so far."""
        last_s = self.sequence.last_token_s if self.sequence is not None else None
        return last_s if last_s is not None else self.last_token_s or self.first_token_s

    @property
    def made(self) -> int:
        """Tokens that the client has."""
        if self.outputs is not None:
            return self.outputs
        made = self.sequence.outputs if self.sequence is not None else 0
        return max(made, 1) if self.first_token_s is not None else made
