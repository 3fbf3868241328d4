"""What one rank holds by its engine's own word, and the events that this makes for the policies.

An engine may hold a block twice and announces each copy, so copies are counted and only the first and the last make an
event. Blocks that are told by id alone are joined to what their tokens were. Events are numbered here, without a gap
unless something was lost for good: then one number is left out and everything is cleared, so that whoever follows the
numbers finds out, asks, and is told that nobody knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

from executors.engines.kv_wire import Cleared, Refused, Removed, Said, Stored
from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.hashing import base_seed, local_hashes
from policies.cluster.ids import BlockHash, RankId, Tier
from policies.cluster.kv_events import (
    DumpEntry,
    IndexAnswer,
    IndexDump,
    IndexRecoveryFailed,
    KvCleared,
    KvEvent,
    KvRefused,
    KvRemoved,
    KvStored,
)


@dataclass(slots=True)
class BooksCounts:
    """`refused` events; `unjoined` blocks told by an id that nobody had explained, `unknown_removals` of blocks that
    were not held, `further_copies` of blocks held already; `voids`, when all that was known was dropped."""

    refused: int = 0
    unjoined: int = 0
    unknown_removals: int = 0
    further_copies: int = 0
    voids: int = 0

    def table(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(slots=True)
class _Block:
    """A block whose content is known: held somewhere, or only the parent of one that is."""

    local: BlockHash
    seed: int
    parent: BlockHash | None
    copies: Counter[tuple[Tier, int]] = field(default_factory=Counter)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        held = {tier for tier, _ in self.copies}
        return tuple(tier for tier in Tier if tier in held)


class KvBooks:
    """The books of one registration of one rank; `block_size` is its engine's, in tokens."""

    def __init__(self, rank: RankId, epoch: int, block_size: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.block_size = block_size
        self.counts = BooksCounts()
        self._blocks: dict[BlockHash, _Block] = {}
        self._below: dict[BlockHash, dict[BlockHash, None]] = {}  # of parents that are not known (yet) too
        self._held: Counter[Tier] = Counter()
        self._next_id = 0
        self._unsure: str | None = None  # why the content is not all that the rank holds

    @property
    def exact(self) -> bool:
        """Whether nothing was lost on the way."""
        return self._unsure is None

    def copies(self) -> Counter[Tier]:
        """Blocks held in each tier; one that is held twice counts twice."""
        return +self._held

    # ------------------------------------------------------------ what an engine says

    def take(self, said: Iterable[Said], at_s: float) -> Iterator[KvEvent]:
        """The events that follow; none for what changes nothing."""
        for one in said:
            match one:
                case Stored():
                    yield from self._store(one, at_s)
                case Removed():
                    yield from self._remove(one, at_s)
                case Cleared():
                    self._clear(one.tier)
                    yield self._event(KvCleared, at_s, tier=one.tier)
                case Refused():
                    yield self._refuse(one.what, at_s)

    def void(self, why: str, at_s: float) -> KvEvent:
        """Something was lost and cannot be told again: nothing that is known holds any more."""
        self.counts.voids += 1
        self._unsure = why
        self._forget_all()
        self._next_id += 1  # the number of what was lost
        return self._event(KvCleared, at_s)

    def restarted(self, at_s: float) -> KvEvent:
        """The rank began anew, with nothing."""
        self._unsure = None
        self._forget_all()
        return self._event(KvCleared, at_s)

    def _refuse(self, what: str, at_s: float) -> KvEvent:
        self.counts.refused += 1
        return self._event(KvRefused, at_s, what=what)

    def _event(self, kind: Callable[..., KvEvent], at_s: float, **what: Any) -> KvEvent:
        event = kind(
            at_s=at_s,
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            epoch=self.epoch,
            event_id=self._next_id,
            **what,
        )
        self._next_id += 1
        return event

    # ------------------------------------------------------------ storing

    def _store(self, said: Stored, at_s: float) -> Iterator[KvEvent]:
        if said.tokens and (said.block_size, len(said.tokens)) != (self.block_size, self.block_size * len(said.exts)):
            sizes = f"{len(said.exts)} blocks of {said.block_size} tokens with {len(said.tokens)} tokens"
            yield self._refuse(f"{sizes}; blocks here have {self.block_size}", at_s)
            return
        self._learn(said)
        known = [ext in self._blocks for ext in said.exts]
        if not all(known):
            self.counts.unjoined += known.count(False)
            yield self._refuse(f"{known.count(False)} blocks in {said.tier.value} by ids that nothing explains", at_s)
        first = [known[i] and self._add(ext, said) for i, ext in enumerate(said.exts)]
        at = 0
        for is_first, run in groupby(first):
            count = len(list(run))
            if is_first:
                exts = said.exts[at : at + count]
                yield from self._announce(exts, said.tier, at_s)
            at += count

    def _learn(self, said: Stored) -> None:
        """Remember the content of blocks that come with their tokens."""
        if not said.tokens or all(ext in self._blocks for ext in said.exts):
            return
        above = self._blocks.get(said.parent) if said.parent is not None else None
        inherits = above is not None and said.salt is None  # engines tell the salt with the first block alone
        seed = above.seed if above is not None and inherits else base_seed(said.lora, said.salt)
        parent = said.parent
        for ext, local in zip(said.exts, local_hashes(said.tokens, self.block_size, seed=seed), strict=True):
            if ext not in self._blocks:
                self._blocks[ext] = _Block(BlockHash(local), seed, parent)
                if parent is not None:
                    self._below.setdefault(parent, {})[ext] = None
            parent = ext

    def _add(self, ext: BlockHash, said: Stored) -> bool:
        """Whether the copy is the first one in its tier."""
        copies = self._blocks[ext].copies
        is_first = all(tier is not said.tier for tier, _ in copies)
        copies[said.tier, said.group] += 1
        self._held[said.tier] += 1
        self.counts.further_copies += not is_first
        return is_first

    def _announce(self, exts: Sequence[BlockHash], tier: Tier, at_s: float) -> Iterator[KvEvent]:
        """One event for each chain among the blocks: ids told without tokens need not be one below the other."""
        chain: list[BlockHash] = []
        for ext in exts:
            if chain and self._blocks[ext].parent != chain[-1]:
                yield self._stored(chain, tier, at_s)
                chain = []
            chain.append(ext)
        yield self._stored(chain, tier, at_s)

    def _stored(self, chain: Sequence[BlockHash], tier: Tier, at_s: float) -> KvEvent:
        blocks = [self._blocks[ext] for ext in chain]
        return self._event(
            KvStored,
            at_s,
            exts=tuple(chain),
            local_hashes=tuple(block.local for block in blocks),
            parent_ext=blocks[0].parent,
            tier=tier,
        )

    # ------------------------------------------------------------ removing

    def _remove(self, said: Removed, at_s: float) -> Iterator[KvEvent]:
        gone: dict[Tier, list[BlockHash]] = {}
        for ext in said.exts:
            for tier in self._drop(ext, said):
                gone.setdefault(tier, []).append(ext)
        for tier, exts in gone.items():
            yield self._event(KvRemoved, at_s, exts=tuple(exts), tier=tier)

    def _drop(self, ext: BlockHash, said: Removed) -> Sequence[Tier]:
        """The tiers that the block has left with its last copy."""
        block = self._blocks.get(ext)
        if block is None or not block.copies or (said.tier is not None and not block.copies[said.tier, said.group]):
            self.counts.unknown_removals += 1
            return ()
        before = block.tiers
        if said.tier is None:
            for (tier, _), count in block.copies.items():
                self._held[tier] -= count
            block.copies.clear()
        else:
            self._held[said.tier] -= 1
            block.copies[said.tier, said.group] -= 1
            block.copies = +block.copies
        left = [tier for tier in before if tier not in block.tiers]
        self._forget(ext)
        return left

    def _clear(self, tier: Tier) -> None:
        for ext, block in list(self._blocks.items()):
            for held in [held for held in block.copies if held[0] is tier]:
                del block.copies[held]
            self._forget(ext)
        del self._held[tier]

    def _forget(self, ext: BlockHash | None) -> None:
        """Forget a block that is held nowhere and has none below it; then the one above it, if that was the last."""
        while ext is not None and ext in self._blocks and not self._blocks[ext].copies and ext not in self._below:
            parent = self._blocks.pop(ext).parent
            if parent is not None:
                del self._below[parent][ext]
                if not self._below[parent]:
                    del self._below[parent]
            ext = parent

    def _forget_all(self) -> None:
        self._blocks.clear()
        self._below.clear()
        self._held.clear()

    # ------------------------------------------------------------ saying it again

    def answer(
        self, request: RequestIndexReplay | RequestIndexDump, at_s: float, why_not: str | None = None
    ) -> IndexAnswer:
        """All that the rank holds, for whoever asks for that or for earlier events; or that nobody knows it, because of
        `why_not` or of what was lost."""
        rank: dict[str, Any] = {
            "at_s": at_s,
            "worker_id": self.rank.worker_id,
            "dp_rank": self.rank.dp_rank,
            "epoch": self.epoch,
            "ask": request.ask,
            "origin": request.origin,
        }
        unsure = why_not or self._unsure
        if unsure is not None:
            return IndexRecoveryFailed(reason=unsure, **rank)
        last_id = self._next_id - 1 if self._next_id else None
        return IndexDump(last_id=last_id, entries=tuple(self._entries()), **rank)

    def _entries(self) -> Iterator[DumpEntry]:
        """Parents before children; a chain of blocks in the same tiers is one entry."""
        tops = [ext for ext, block in self._blocks.items() if block.parent not in self._blocks]
        while tops:
            chain = [tops.pop()]
            tiers = self._blocks[chain[0]].tiers
            while True:
                below = [*self._below.get(chain[-1], ())]
                if len(below) != 1 or self._blocks[below[0]].tiers != tiers:
                    break
                chain += below
            tops += below
            blocks = [self._blocks[ext] for ext in chain]
            yield DumpEntry(
                parent_ext=blocks[0].parent,
                exts=tuple(chain),
                local_hashes=tuple(block.local for block in blocks),
                tiers=tiers,
            )
