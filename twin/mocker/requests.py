"""A request that has arrived and not ended, as the world keeps it: its row, where its legs are, what the client has."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from policies.cluster.blocks import NO_BLOCKS, BlockPath, Branch, ContentTree
from policies.cluster.ids import Leg, RequestId, WorkerId
from twin.engine.sequence import Phase, Sequence
from twin.mocker.demand import Row

if TYPE_CHECKING:
    from twin.mocker.handoff import Handoff


class Heard(NamedTuple):
    """What the client had when its worker was cut off from it."""

    first_s: float | None
    last_s: float | None
    made: int


class OpenRequest:
    """`sequence` is the leg that answers, `prefill` the one that computes the prompt for it elsewhere (None: nobody).

    `first_token_s`, `last_token_s` and `outputs` are set where the client has tokens that `sequence` does not know of.
    After a migration, `carried` of these are prompt, with content of its own (`own`) behind the complete blocks of the
    client's prompt, and `before` is the leg of the first attempt that was admitted. `heard` is all that the client has
    while the worker of `sequence` is cut off.
    """

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
    migrations: int = 0
    carried: int = 0
    readmissions: int = 0
    own: Branch | None = None
    before: Sequence | None = None
    prefill_token: bool = False  # this attempt's first token came from the leg that computed the prompt
    heard: Heard | None = None

    def __init__(self, request_id: RequestId, row: Row, arrival_s: float, path: BlockPath | None) -> None:
        self.request_id = request_id  # most requests need little of the rest: what is not set is that of the class
        self.row = row
        self.arrival_s = arrival_s
        self.path = path

    @property
    def moving(self) -> bool:
        """Whether it waits for KV that is being moved."""
        if self.handoff is not None and self.handoff.move is not None:
            return True
        return any(leg is not None and leg.phase is Phase.LOADING for leg in (self.sequence, self.prefill))

    def leg(self, leg: Leg, tree: ContentTree, now_s: float, block_size: int | None = None) -> Sequence:
        """A new sequence for one leg, dispatched now. Both legs of a request have one content.

        `tree` is that of the worker, `block_size` that of `path` (None: the same).
        """
        row, path = self.row, self.path
        prompt = row.isl + self.carried
        own = self.own if self.own is not None else tree.private()
        if path is None:
            other = self.sequence or self.prefill
            if other is not None:
                own, path = other.own, other.path
            else:
                blocks = prompt // tree.block_size
                path = BlockPath(((own, blocks),), blocks) if blocks else NO_BLOCKS
        elif block_size is not None and tree.block_size != block_size:
            own, path = self._content_in(tree)
        limit = 1 if leg is Leg.PREFILL else row.osl - self.carried
        seq = Sequence(
            self.request_id,
            prompt,
            limit,
            path,
            own,
            row=row.row,
            arrival_s=self.arrival_s,
            dispatch_s=now_s,
            leg=leg,
            lora=row.lora,
        )
        if leg is Leg.PREFILL:
            self.prefill = seq
        else:
            self.sequence = seq
        return seq

    def lose_decode_leg(self) -> None:
        """Whoever was to answer is gone before it began; the prompt, and the token that came with it, are there."""
        self.sequence = self.worker_id = self.heard = None

    def _content_in(self, tree: ContentTree) -> tuple[Branch, BlockPath]:
        """The same content cut into the blocks of another tree."""
        path = tree.path(self.row.keys or [], self.row.isl)
        own = tree.private(path.blocks, path.pieces[-1][0] if path.pieces else None)
        blocks = (self.row.isl + self.carried) // tree.block_size
        pieces = (*path.pieces, (own, blocks)) if blocks > path.blocks else path.pieces
        return own, BlockPath(pieces, blocks)

    def has_prefill_token(self, now_s: float) -> None:
        """The client has a token that the leg made that computed the prompt."""
        self.prefill_token = True
        if self.heard is not None:
            self.heard = Heard(self.first_s or now_s, now_s, self.carried + 1)
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s

    # ------------------------------------------------------------ cut off and back

    def cut_off(self, outputs: int, last_token_s: float | None) -> None:
        """The client hears no more of `sequence`, which has made `outputs` by now, the last of them at
        `last_token_s`."""
        last_s = last_token_s if last_token_s is not None else self.last_s
        self.heard = Heard(self.first_s, last_s, self._with(outputs))

    def catch_up(self, outputs: int, since_s: float, now_s: float) -> tuple[float | None, int]:
        """All that `sequence` has made since it was cut off, at `since_s`, reaches the client now.

        Returns when the token before these was delivered, where one of the gaps begins then, and how many they are.
        """
        heard, seq = self.heard, self.sequence
        assert heard is not None
        assert seq is not None
        self.heard = None
        if seq.first_token_s is not None and seq.first_token_s >= since_s:
            seq.first_token_s = now_s
        if seq.last_token_s is not None and seq.last_token_s >= since_s:
            seq.last_token_s = now_s
        return heard.last_s if heard.made > self.carried else None, self._with(outputs) - heard.made

    def interrupt(self, tree: ContentTree) -> None:
        """Its legs are gone with their worker: what the client has is prompt from here on."""
        admitted = self.admitted
        if admitted is not None:
            self.before = admitted if admitted.admit_s is not None else None
        self.first_token_s, self.last_token_s = self.first_s, self.last_s
        self.readmissions += self.sequence.readmissions if self.sequence is not None else 0
        self.carried, self.outputs, self.prefill_token, self.heard = self.made, None, False, None
        self.sequence = self.prefill = self.handoff = None
        if self.path is None:
            return
        if self.own is None:
            self.own = tree.private(self.path.blocks, self.path.pieces[-1][0] if self.path.pieces else None)
        pieces = tuple(piece for piece in self.path.pieces if piece[0] is not self.own)
        blocks = (self.row.isl + self.carried) // tree.block_size
        if blocks > self.own.start:
            pieces = (*pieces, (self.own, blocks))
        self.path = BlockPath(pieces, blocks)

    # ------------------------------------------------------------ what the record says

    def told(self) -> tuple[Sequence | None, float | None, float | None, int]:
        """What the record says: `admitted`, `first_s`, `last_s`, `made`."""
        seq = self.sequence
        if seq is None or self.first_token_s is not None or self.outputs is not None or self.heard:
            return self.admitted, self.first_s, self.last_s, self.made
        admitted = self.before or self.prefill or seq
        made = self._with(seq.outputs) if self.prefill_token else self.carried + seq.outputs
        return admitted, seq.first_token_s, seq.last_token_s or self.last_token_s, made

    @property
    def admitted(self) -> Sequence | None:
        """The leg whose admission counts: the one that first computed the prompt."""
        if self.before is not None:
            return self.before
        return self.prefill if self.prefill is not None else self.sequence

    @property
    def first_s(self) -> float | None:
        """When the client had its first token."""
        if self.heard is not None:
            return self.heard.first_s
        if self.first_token_s is not None:
            return self.first_token_s
        return self.sequence.first_token_s if self.sequence is not None else None

    @property
    def last_s(self) -> float | None:
        """When the client had its last token so far."""
        if self.heard is not None:
            return self.heard.last_s
        last_s = self.sequence.last_token_s if self.sequence is not None else None
        return last_s if last_s is not None else self.last_token_s or self.first_token_s

    @property
    def made(self) -> int:
        """Tokens that the client has."""
        if self.heard is not None:
            return self.heard.made
        if self.outputs is not None:
            return self.outputs
        return self._with(self.sequence.outputs if self.sequence is not None else 0)

    def _with(self, outputs: int) -> int:
        """Tokens that the client has when `sequence` has made `outputs`."""
        return self.carried + (max(outputs, 1) if self.prefill_token else outputs)
