"""A request that has arrived and not ended, as the live world keeps it, and the answer that its client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from executors.backend import Ask, Delta, End
from executors.clock import Timer
from executors.engines.protocol import NOTHING, Logprob, Piece
from executors.leases import LeaseKey
from executors.prefill_gate import Pass
from policies.cluster.blocks import NO_BLOCKS, BlockPath, Branch, ContentTree
from policies.cluster.hashing import base_seed, local_hashes
from policies.cluster.ids import BlockHash, Leg, WorkerId


class Stream:
    """`backend.Answer`: what came and was not read yet, and how it ended."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._at_s = 0.0
        self._end: End | None = None
        self._news = asyncio.Event()

    @property
    def end(self) -> End | None:
        return self._end

    def cancel(self, reason: str) -> None:
        if self._end is None:
            self._cancel(reason)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            if self._tokens:
                delta = Delta(token_ids=tuple(self._tokens), at_s=self._at_s, logprobs=tuple(self._logprobs))
                self._tokens.clear()
                self._logprobs.clear()
                yield delta
            elif self._end is not None:
                return
            else:
                self._news.clear()
                await self._news.wait()

    def add(self, piece: Piece, at_s: float) -> None:
        """Tokens came."""
        self._tokens += piece.token_ids
        self._logprobs += piece.logprobs
        self._at_s = at_s
        self._news.set()

    def close(self, end: End) -> None:
        """It is over."""
        self._end = end
        self._news.set()


@dataclass(slots=True)
class RunningLeg:
    """One leg under way: where, since when, and the task that reads it."""

    leg: Leg
    leg_id: str
    worker_id: WorkerId
    epoch: int
    since_s: float
    sent_s: float | None = None
    """When its engine was told; None while it waits for its turn."""
    task: asyncio.Task[None] | None = None
    heard_s: float | None = None
    """When it last made something; None before that."""
    deadline: Timer | None = None
    turn: Pass | None = None
    """Its place at a worker that keeps KV for so long only."""

    def over(self) -> None:
        """Nobody waits for it any more: nothing of it is kept until a deadline."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        if self.turn is not None:
            self.turn.over()
            self.turn = None


@dataclass(slots=True)
class OpenRequest:
    """`emitted` are the tokens that the client was given; after a migration `carried` of them are prompt.

    `handoff` is what the prefill leg left for the decode leg. `legs` are those under way: an answering one, a prefill
    leg, or both.
    """

    ask: Ask
    arrival_s: float
    stream: Stream
    content: Content
    worker_id: WorkerId | None = None
    prefill_worker_id: WorkerId | None = None
    dispatch_s: float | None = None
    prefilled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    emitted: list[int] = field(default_factory=list)
    carried: int = 0
    migrations: int = 0
    attempts: int = 0
    cached_tokens: int | None = None
    handoff: Mapping[str, object] = field(default_factory=lambda: NOTHING)
    lease: LeaseKey | None = None
    """Of the KV that `handoff` is about, where its worker keeps it for so long only."""
    legs: dict[Leg, RunningLeg] = field(default_factory=dict)
    closed: bool = False
    retry_after_s: float | None = None

    @property
    def isl(self) -> int:
        """Tokens of the prompt as it is sent now."""
        return len(self.ask.token_ids) + self.carried

    @property
    def left(self) -> int:
        """Tokens that may still be made."""
        return self.ask.max_tokens - self.carried

    def prompt(self) -> Sequence[int]:
        """The prompt as it is sent now."""
        return self.ask.token_ids if not self.carried else [*self.ask.token_ids, *self.emitted[: self.carried]]

    def next_leg_id(self) -> str:
        """A name that no leg had before."""
        self.attempts += 1
        return f"{self.ask.request_id}-{self.attempts}"


class Content:
    """What a prompt is made of, for policies and for engines that keep no tokens: by its tokens, or as a trace says."""

    __slots__ = ("local", "own", "path", "tree")

    def __init__(self, tree: ContentTree, ask: Ask, *, hashes: bool) -> None:
        self.tree = tree
        self.own: Branch | None = None
        self.local: tuple[BlockHash, ...] | None = None
        self.path: BlockPath | None = ask.path
        if ask.path is None and hashes:
            self._read(ask, ask.token_ids)

    def carry(self, ask: Ask, prompt: Sequence[int]) -> None:
        """Tokens of the answer are prompt now."""
        if self.local is not None:
            self._read(ask, prompt)
        elif self.path is not None:
            if self.own is None:
                self.own = self.tree.private(self.path.blocks, self.path.pieces[-1][0] if self.path.pieces else None)
            blocks = len(prompt) // self.tree.block_size
            pieces = tuple(piece for piece in self.path.pieces if piece[0] is not self.own)
            if blocks > self.own.start:
                pieces = (*pieces, (self.own, blocks))
            self.path = BlockPath(pieces, blocks)

    def for_engine(self, tokens: int) -> tuple[BlockPath, Branch]:
        """The content of a prompt of so many tokens, and the branch that its answer fills."""
        own = self.own if self.own is not None else self.tree.private()
        if self.path is not None:
            return self.path, own
        blocks = tokens // self.tree.block_size
        return (BlockPath(((own, blocks),), blocks) if blocks else NO_BLOCKS), own

    def _read(self, ask: Ask, tokens: Sequence[int]) -> None:
        seed = base_seed(ask.lora, ask.cache_salt)
        found = local_hashes(tokens, self.tree.block_size, seed=seed)
        self.local = tuple(BlockHash(one) for one in found)
        self.path = self.tree.path(found, len(found) * self.tree.block_size)
