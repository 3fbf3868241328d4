"""A request inside an engine: what it asks for, how far it is, what it holds.

Only the scheduler and the block pool write here. While a sequence is in the decode batch its length is not stored
but follows from the step counter (`Batch.length`).
"""

from __future__ import annotations

from enum import Enum

from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.ids import Leg, RequestId
from twin.engine.pool import Hold


class Phase(Enum):
    """Where a sequence stands in its engine."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"  # prompt computed, blocks kept for whoever fetches them
    RESERVED = "reserved"  # room for a prompt that is on its way
    ACTIVATED = "activated"  # the prompt is here; it runs with the next step
    LOADING = "loading"  # blocks are coming up from a lower tier
    LOADED = "loaded"  # they are here; it runs as soon as the rest fits
    DONE = "done"


class Sequence:
    """One request in one engine. Tokens and blocks are counts; times are seconds of the run's clock.

    `outputs_limit` is the number of tokens that it will make (the true output length, cut by the model's context).
    `own` is the branch that its generated tokens fill, private to it. `asked` orders the sequences that ask one engine
    for room (the decode side of a hand-off). `lora` is the adapter that it runs with.
    """

    __slots__ = (
        "admit_s",
        "arrival_s",
        "asked",
        "cached_tokens",
        "computed",
        "dispatch_s",
        "expected",
        "finish_reason",
        "first_token_s",
        "holds",
        "host_blocks",
        "join_len",
        "join_step",
        "last_token_s",
        "leg",
        "lora",
        "order",
        "outputs",
        "outputs_limit",
        "own",
        "owned",
        "path",
        "phase",
        "prompt",
        "published",
        "readmissions",
        "request_id",
        "reused_tokens",
        "row",
        "session_id",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt: int,
        outputs_limit: int,
        path: BlockPath,
        own: Branch,
        *,
        row: int = 0,
        arrival_s: float = 0.0,
        dispatch_s: float = 0.0,
        session_id: str | None = None,
        leg: Leg = Leg.AGG,
        lora: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.row = row
        self.session_id = session_id
        self.prompt = prompt
        self.outputs_limit = outputs_limit
        self.path = path
        self.own = own
        self.arrival_s = arrival_s
        self.dispatch_s = dispatch_s
        self.leg = leg
        self.lora = lora
        self.asked = 0
        self.expected = 0  # outputs that will come with the prompt (made by its prefill worker)
        self.phase = Phase.WAITING
        self.outputs = 0
        self.computed = 0
        self.owned = 0
        self.published = 0
        self.holds: list[Hold] = []
        self.order = 0
        self.join_step = 0
        self.join_len = 0
        self.admit_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.cached_tokens: int | None = None
        self.reused_tokens = 0
        self.host_blocks = 0  # of its first admission's hits, how many came from the host
        self.readmissions = 0
        self.finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Prompt plus the outputs known; stale while in the decode batch."""
        return self.prompt + self.outputs

    def let_in(self, now_s: float, hit_tokens: int) -> None:
        """It is admitted with so many tokens found in a cache: for the first time, or again."""
        if self.admit_s is None:
            self.admit_s = now_s
            self.cached_tokens = hit_tokens
        else:
            self.readmissions += 1
        if hit_tokens > self.reused_tokens:
            self.reused_tokens = hit_tokens

    def pieces(self, block_size: int) -> tuple[tuple[Branch, int], ...]:
        """The content of all complete blocks of the known tokens, generated ones included."""
        if not self.outputs:
            return self.path.pieces
        end = (self.prompt + self.outputs) // block_size
        return self.pieces_to(end) if end > self.path.blocks else self.path.pieces

    def pieces_to(self, end: int) -> tuple[tuple[Branch, int], ...]:
        """The content up to block `end`, beyond the prompt: the last piece is what only this request has.

        The prompt of a request that was sent again ends with such a piece, which goes on then: no branch comes twice.
        """
        pieces = self.path.pieces
        if pieces and pieces[-1][0] is self.own:
            pieces = pieces[:-1]
        return (*pieces, (self.own, end))

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.phase.value}, prompt={self.prompt}, outputs={self.outputs}"
            f"/{self.outputs_limit}, computed={self.computed}, owned={self.owned})"
        )
