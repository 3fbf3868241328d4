"""What ranks probably hold, guessed from what they were sent: for engines that do not tell, and for what they have not
told yet.

A dispatched prompt counts as held until it is `ttl_s` old (`TtlIndex`), or until the rank's own room is used up by
later ones (`LruIndex`). It is a guess about the future of a cache: it must never feed the count of hits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from policies.cluster.blocks import BlockPath, Branch
from policies.errors import ConfigError, InvariantError
from policies.router.chains.holders import Columns, Holders, Mask, Reach, reach

MOST_BLOCKS = 2**20
"""Blocks over all ranks beyond which a `TtlIndex` is pruned."""

_KEPT_PERCENT = 80
"""What is left after pruning, of `MOST_BLOCKS`."""

_Rank = TypeVar("_Rank", bound=Hashable)
"""Who is sent prompts: a rank of a worker, or a worker that has one."""


class _Sent:
    """One dispatch: its prompt, when it expires, and how many of the blocks nobody was sent since."""

    __slots__ = ("blocks", "due_s", "guess", "path")

    def __init__(self, guess: _Guess, path: BlockPath, due_s: float) -> None:
        self.guess = guess
        self.path = path
        self.due_s = due_s
        self.blocks = 0


class _Guess:
    """One rank, holder `bit`. Per branch: how far which dispatch reaches, the farthest (and so the oldest) first."""

    __slots__ = ("bit", "blocks", "room", "sent", "steps")

    def __init__(self, bit: Mask, room: int) -> None:
        self.bit = bit
        self.room = room
        self.blocks = 0
        self.steps: dict[Branch, list[tuple[int, _Sent]]] = {}
        self.sent: OrderedDict[_Sent, None] = OrderedDict()  # a plain one is slow to say who is first


class _Approximate(Generic[_Rank]):
    """What both kinds share: a dispatch refreshes its prompt; the oldest goes first, from its deepest block."""

    def __init__(self) -> None:
        self._holders = Holders()
        self._ranks: dict[_Rank, _Guess] = {}
        self._names: list[_Rank | None] = []
        self._everyone: Mask = 0
        self._blocks = 0
        self.pruned_blocks = 0

    def __len__(self) -> int:
        """Blocks held, over all ranks."""
        return self._blocks

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory."""
        steps = sum(len(steps) for guess in self._ranks.values() for steps in guess.steps.values())
        return len(self._ranks) + steps + sum(len(guess.sent) for guess in self._ranks.values()) + self._holders.size

    def up(self, rank: _Rank, total_blocks: int) -> None:
        """A rank is there, with nothing that we know of and room for so many blocks."""
        self.drop(rank)
        if None not in self._names:
            self._names.append(None)
        number = self._names.index(None)
        self._names[number] = rank
        self._everyone |= 1 << number
        self._ranks[rank] = _Guess(1 << number, total_blocks)

    def drop(self, rank: _Rank) -> None:
        """A rank is gone, with everything that it was sent."""
        guess = self._ranks.pop(rank, None)
        if guess is None:
            return
        for branch, steps in guess.steps.items():
            self._holders.remove(guess.bit, branch, branch.start, steps[0][0])
        for sent in guess.sent:
            self._forgotten(sent)
        self._blocks -= guess.blocks
        self._names[guess.bit.bit_length() - 1] = None
        self._everyone &= ~guess.bit

    def depths(self, found: Reach) -> dict[_Rank, int]:
        """Leading blocks that each rank has of what was looked for; who has none is left out."""
        return found.depths(self._names)  # type: ignore[arg-type]  # nobody is at a place that is free

    def columns(self, found: Reach, ranks: Sequence[_Rank]) -> Columns:
        """The overlaps of these ranks, in this order, all of it as device memory."""
        bits = [guess.bit.bit_length() - 1 if (guess := self._ranks.get(rank)) else None for rank in ranks]
        return found.columns(bits, len(self._names))

    def _insert(self, rank: _Rank, path: BlockPath, due_s: float) -> _Sent:
        guess = self._ranks.get(rank)
        if guess is None:
            raise InvariantError(f"{rank} is not up; what it was sent cannot be noted")
        sent = _Sent(guess, path, due_s)
        for branch, end in path.pieces:
            steps = guess.steps.setdefault(branch, [])
            reached = steps[0][0] if steps else branch.start
            lo = branch.start
            while steps and lo < end:  # what was sent before, nearest first, is this dispatch's now
                upto, earlier = steps[-1]
                earlier.blocks -= min(upto, end) - lo
                if upto > end:
                    break
                lo = upto
                steps.pop()
                if not earlier.blocks:
                    self._over(earlier)
            steps.append((end, sent))
            sent.blocks += end - branch.start
            if end > reached:
                self._holders.add(guess.bit, branch, reached, end)
                guess.blocks += end - reached
                self._blocks += end - reached
        if sent.blocks:
            guess.sent[sent] = None
        return sent

    def _evict(self, sent: _Sent, most_blocks: int) -> None:
        """Up to so many blocks of a rank's oldest dispatch go, the deepest first."""
        guess = sent.guess
        for branch, _ in reversed(sent.path.pieces):
            steps = guess.steps.get(branch)
            if not steps or steps[0][1] is not sent:
                continue  # all that it had there was sent again
            end = steps[0][0]
            start = steps[1][0] if len(steps) > 1 else branch.start
            lo = max(start, end - most_blocks)
            self._holders.remove(guess.bit, branch, lo, end)
            guess.blocks -= end - lo
            self._blocks -= end - lo
            sent.blocks -= end - lo
            most_blocks -= end - lo
            if lo > start:
                steps[0] = (lo, sent)
            else:
                steps.pop(0)
                if not steps:
                    del guess.steps[branch]
            if not sent.blocks:
                self._over(sent)
            if not most_blocks:
                return

    def _over(self, sent: _Sent) -> None:
        del sent.guess.sent[sent]
        self._forgotten(sent)

    def _forgotten(self, sent: _Sent) -> None:
        """A dispatch has no block left."""


class TtlIndex(_Approximate[_Rank]):
    """A dispatched prompt counts for `ttl_s` seconds; sent again, it counts from then."""

    def __init__(self, ttl_s: float) -> None:
        super().__init__()
        if not ttl_s > 0:
            raise ConfigError(f"ttl_s is {ttl_s} s, it must be above 0; 120 is usual")
        self._ttl_s = ttl_s
        self._queue: OrderedDict[_Sent, None] = OrderedDict()  # by expiry

    def sent(self, rank: _Rank, path: BlockPath, now_s: float) -> None:
        """A prompt goes to a rank; `now_s` never goes back."""
        self.expire(now_s)
        sent = self._insert(rank, path, now_s + self._ttl_s)
        if sent.blocks:
            self._queue[sent] = None
        if len(self) > MOST_BLOCKS:
            self._prune(MOST_BLOCKS * _KEPT_PERCENT // 100)

    def match(self, path: BlockPath, now_s: float, most_blocks: int | None = None) -> Reach:
        """How far along a prompt each rank probably gets."""
        self.expire(now_s)
        return reach((self._holders,), path, self._everyone, most_blocks)

    def expire(self, now_s: float) -> None:
        """Forget what is too old by now."""
        while self._queue:
            oldest = next(iter(self._queue))
            if oldest.due_s > now_s:
                return
            self._evict(oldest, oldest.blocks)

    def _prune(self, target_blocks: int) -> None:
        excess = len(self) - target_blocks
        self.pruned_blocks += excess
        while excess > 0:
            oldest = next(iter(self._queue))
            taken = min(excess, oldest.blocks)
            self._evict(oldest, taken)
            excess -= taken

    def _forgotten(self, sent: _Sent) -> None:
        self._queue.pop(sent, None)


class LruIndex(_Approximate[_Rank]):
    """A rank keeps what it was sent last, as many blocks as it has."""

    def sent(self, rank: _Rank, path: BlockPath, now_s: float) -> None:
        """A prompt goes to a rank. What the time is makes no difference here, nor below."""
        self._insert(rank, path, now_s)
        guess = self._ranks[rank]
        while guess.blocks > guess.room:
            excess = guess.blocks - guess.room
            oldest = next(iter(guess.sent))
            taken = min(excess, oldest.blocks)
            self.pruned_blocks += taken
            self._evict(oldest, taken)

    def match(self, path: BlockPath, now_s: float, most_blocks: int | None = None) -> Reach:
        """How far along a prompt each rank probably gets."""
        return reach((self._holders,), path, self._everyone, most_blocks)

    def expire(self, now_s: float) -> None:
        """Nothing is ever too old."""


def raised(real: Columns, predicted: Columns) -> Columns:
    """What is there, or will be when what was dispatched is computed: per rank the deeper of the two.

    For choosing only; what was really found cached is `real`.
    """
    out = Columns([], [], [], [])
    before = above = [0] * len(real.device_blocks)
    for column, raised_column in zip(real, out, strict=True):
        above = [a + b for a, b in zip(above, column, strict=True)]
        here = [max(a, p) for a, p in zip(above, predicted.device_blocks, strict=True)]
        raised_column.extend(a - b for a, b in zip(here, before, strict=True))
        before = here
    return out
