"""What mode kv supposes that workers have cached, from what they were sent: where their block events are off, or late.

It stands between the mode and `chains.approximate`, by worker. With events off it is all that there is to go by; with
events it only raises what they say. It must never be taken for what was found cached: no count of hits comes from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.cluster.blocks import BlockPath
from policies.cluster.events import WorkerUp
from policies.cluster.ids import Place
from policies.errors import ConfigError
from policies.router.chains.approximate import LruIndex, TtlIndex
from policies.router.settings import RouterSettings


class Guesses:
    """Leading blocks that each worker probably has. With `alone` nothing better is known."""

    __slots__ = ("_index", "alone")

    def __init__(self, index: TtlIndex[Place] | LruIndex[Place], *, alone: bool) -> None:
        self._index = index
        self.alone = alone

    def __len__(self) -> int:
        """Blocks held, over all workers."""
        return len(self._index)

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory."""
        return self._index.size

    @property
    def pruned_blocks(self) -> int:
        """Blocks given up for want of room."""
        return self._index.pruned_blocks

    def told(self, counted_blocks: int, known_blocks: int) -> str:
        """What the blocks of a choice are, for the log."""
        if self.alone:
            return "cached by guess"
        if counted_blocks > known_blocks:
            return f"cached or on their way ({known_blocks} reported)"
        return "cached"

    def up(self, up: WorkerUp, places: Sequence[Place]) -> None:
        """A worker is there, as these places, which were sent nothing and share its room. Raises ConfigError where that
        matters and is not known."""
        if up.total_blocks is None and isinstance(self._index, LruIndex):
            raise ConfigError(
                f"worker {up.worker_id} ({up.name}) does not say how many KV blocks it has, and router.index_policy = "
                f"lru goes by that; take ttl"
            )
        for place in places:
            self._index.up(place, (up.total_blocks or 0) // len(places))

    def lose(self, place: Place) -> None:
        """A worker is gone, with all that it was sent."""
        self._index.drop(place)

    def sent(self, place: Place, path: BlockPath, now_s: float) -> None:
        """A prompt goes to a worker; `now_s` never goes back."""
        self._index.sent(place, path, now_s)

    def expire(self, now_s: float) -> None:
        """Forget what is too old by now."""
        self._index.expire(now_s)

    def depths(self, path: BlockPath, now_s: float, most_blocks: int) -> Mapping[Place, int]:
        """Leading blocks of `path` that each worker probably has, `most_blocks` at most; who has none is left out."""
        return self._index.depths(self._index.match(path, now_s, most_blocks))

    def raised(self, real: Mapping[Place, int], path: BlockPath, now_s: float, most_blocks: int) -> Mapping[Place, int]:
        """Per worker the deeper of what its events say and what it was sent."""
        guessed = self.depths(path, now_s, most_blocks)
        if not guessed:
            return real
        return {**real, **{place: max(depth, real.get(place, 0)) for place, depth in guessed.items()}}


def guesses(settings: RouterSettings) -> Guesses:
    """What the settings ask for. Raises ConfigError."""
    if settings.use_kv_events:
        assert settings.predicted_ttl_s is not None
        return Guesses(TtlIndex(settings.predicted_ttl_s), alone=False)
    if settings.index_policy == "lru":
        return Guesses(LruIndex(), alone=True)
    return Guesses(TtlIndex(settings.approximate_ttl_s), alone=True)
