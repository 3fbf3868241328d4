"""What one worker knows of what it can read, of its own tiers and outside it: at once, or as far as a registry told it.

It plans nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.level import Level, TierBody
from policies.kvbm.look_up import Holding, Pieces, first_lacking
from policies.kvbm.peers import PeerView
from policies.kvbm.registry import NOTHING, Answer, Ask, RegistryView
from policies.kvbm.spans import Span, Spans


class Sight(NamedTuple):
    """Who has anything for a prompt: tiers, fastest first, and peers. `told` is how far an answer said that somebody
    has a branch; `ask` is what to ask before anything is planned."""

    stores: Sequence[tuple[Tier, Holding]]
    peers: Sequence[tuple[WorkerId, Holding]]
    told: Callable[[Branch, int], int] | None = None
    ask: Ask | None = None


class Outside:
    """Of one worker with these `levels`. Without a `registry` all is known at once."""

    __slots__ = ("_levels", "peers", "registry")

    def __init__(self, levels: Sequence[Level], peers: PeerView | None, registry: RegistryView | None) -> None:
        self._levels = levels
        self.peers = peers
        self.registry = registry

    def seen(
        self, pieces: Pieces, blocks: int, usable: int, device_blocks: int, now_s: float, answer: Answer | None
    ) -> Sight:
        """What is known for a prompt, the first `device_blocks` of which are on the device."""
        if self.registry is None:
            stores = [(body.tier, body.store) for body in self._readable]
            return Sight(stores, self.peers.holders(pieces, now_s) if self.peers is not None else ())
        ask = None
        if answer is None:
            answer, ask = NOTHING, self._question(pieces, blocks, usable, device_blocks, now_s)
        return self._told(answer)._replace(ask=ask)

    def asked(self, ask: Ask, now_s: float, *, is_out: bool = False) -> float:
        """A question is on its way to the registry (`is_out`: nobody answers there now); returns how long until it is
        `answered`."""
        assert self.registry is not None
        shared = {body.tier: _spans(ask.runs, body.listed) for body in self._readable if body.spec.is_shared}
        answer = Answer(shared, self.peers.listed(ask.pieces, ask.runs, now_s) if self.peers is not None else {})
        sight = self._told(answer)
        held = [*sight.stores, *((Tier.G2_HOST, store) for _, store in sight.peers)]
        unknown = first_lacking(ask.pieces, ask.first, ask.end, held)
        return self.registry.asks(ask, answer, unknown, is_out=is_out)

    def answered(self, ask: Ask, now_s: float) -> None:
        """An answer is there, or is waited for no longer."""
        assert self.registry is not None
        self.registry.answered(ask, now_s)

    def put(self, body: TierBody, runs: Sequence[BlockRun]) -> None:
        """Blocks have landed in a tier that all share: they are put on record, as far as this worker can."""
        if self.registry is not None:
            self.registry.put(body.unlisted, runs)
        elif body.unlisted.blocks:
            for run in runs:
                body.unlisted.remove(*run)

    def cut_off(self, now_s: float) -> None:
        """Nothing that this worker says gets to the registry any more."""
        if self.registry is not None:
            self.registry.cut()
        if self.peers is not None:
            self.peers.cut(now_s)

    def reached(self, now_s: float) -> None:
        """What this worker says gets to the registry again, with all that it could not say."""
        if self.registry is not None:
            self.registry.back()
        if self.peers is not None:
            self.peers.back(now_s)

    @property
    def _readable(self) -> list[TierBody]:
        return [level.body for level in self._levels if level.body.health.reads]

    def _told(self, answer: Answer) -> Sight:
        """All that has anything, as far as an answer told of it where it is not this worker's own."""
        stores = [
            (body.tier, answer.of_tier(body.tier, body.store) if body.spec.is_shared else body.store)
            for body in self._readable
        ]
        if self.peers is None:
            return Sight(stores, (), answer.reach)
        there = [(owner, self.peers.store(owner)) for owner in answer.peers]
        return Sight(
            stores, [(who, answer.of_peer(who, store)) for who, store in there if store is not None], answer.reach
        )

    def _question(self, pieces: Pieces, blocks: int, usable: int, device_blocks: int, now_s: float) -> Ask | None:
        """What to ask the registry for a prompt; None where this worker has all of it, or knows that nobody has."""
        assert self.registry is not None
        if self.peers is None and not any(body.spec.is_shared for body in self._readable):
            return None
        own = [(body.tier, body.store) for body in self._readable if not body.spec.is_shared]
        first = first_lacking(pieces, device_blocks, usable, own)
        return self.registry.question(pieces, first, usable, blocks, now_s) if first is not None else None


def _spans(runs: Sequence[BlockRun], listed: Callable[[Branch, int, int], list[Span]]) -> Spans:
    """What of these runs is on record."""
    found = Spans()
    for run in runs:
        for lo, hi in listed(*run):
            found.add(run.branch, lo, hi)
    return found
