"""What our policies keep of a tier inside an engine: which blocks are there, which may come, and who goes for them.

The engine names blocks by keys and owns the bytes; here is the very store, filter and eviction order of
`policies.kvbm`, so that the same events lead to the same decisions as in the twin. No clock, no bytes, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NewType

from policies.cluster.blocks import BlockRun, Branch, ContentTree
from policies.errors import InvariantError
from policies.kvbm.build import KvSettings, build_eviction, build_offload
from policies.kvbm.lifecycle import BlockState, Cause
from policies.kvbm.offload import Candidate, OffloadFilter, joined
from policies.kvbm.sketch import Sketch
from policies.kvbm.spans import Span, Spans
from policies.kvbm.store import Hold, Lot, TierStore

Key = NewType("Key", bytes)
"""A block as the engine names it: the hash of its content and of all before it, then its KV group."""
GROUP_BYTES: Final = 4
EVICT, DROP = "evict", "drop"
_SKETCH_BLOCKS: Final = 1 << 20
"""As many blocks as a sketch counts at most."""


class Prompt:
    """The blocks of one request in one KV group, first to last. `found`: so many of them were not computed for it;
    `used`: of so many the policies have been told."""

    __slots__ = ("_last_looked", "at", "found", "keys", "runs", "used")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.at: dict[Key, int] = {}
        self.runs: list[BlockRun] = []
        self.found: int | None = None
        self.used = 0
        self._last_looked = -1

    def looked_up(self, key: Key) -> None:
        """The engine asks for this block, and for those behind it next: what stands before it is on its device."""
        block = self.at[key]
        if self.found is None or block <= self._last_looked:
            self.found = block
        self._last_looked = block

    def loaded(self, keys: Iterable[Key]) -> None:
        """These blocks come up, instead of being computed."""
        self.found = max([self.found or 0, *(self.at[key] + 1 for key in keys if key in self.at)])

    def begin_computed(self) -> int:
        """The first block that was computed for it. An engine does not look below its device for a prompt of which the
        device has all, or which has but one block."""
        return self.found if self.found is not None else max(0, len(self.keys) - 1)

    def run(self, lo: int, hi: int) -> list[BlockRun]:
        """Blocks [lo, hi) as content."""
        return [BlockRun(branch, max(a, lo), min(b, hi)) for branch, a, b in self.runs if max(a, lo) < min(b, hi)]


class Contents:
    """Content of prompts, and the place in it that a key has. A key is known while a prompt or a tier knows it."""

    def __init__(self) -> None:
        self._tree = ContentTree(1, 1)

    def extend(self, prompt: Prompt, keys: Sequence[Key]) -> None:
        """A prompt goes on with these blocks."""
        numbers = [int.from_bytes(key) for key in keys]
        if prompt.runs:  # what its answer adds
            prompt.runs += self._tree.below(prompt.runs[-1].branch, prompt.runs[-1].hi, numbers)
        else:
            prompt.runs += self._tree.path(numbers, len(numbers)).runs()
        for key in keys:
            prompt.at[key] = len(prompt.keys)
            prompt.keys.append(key)


class Counting:
    """How often blocks were used, for all filters and orders of an engine that ask."""

    def __init__(self) -> None:
        self.sketch: Sketch | None = None
        self._filters: list[OffloadFilter] = []

    def settings(self, told: dict[str, Any], blocks: int) -> KvSettings:
        """What a policy of a tier with so many blocks may ask for."""

        def sketch() -> Sketch:
            if self.sketch is None:
                self.sketch = Sketch(min(blocks, _SKETCH_BLOCKS))
            return self.sketch

        return KvSettings(sketch=sketch, min_lfu_count=told["min_lfu_count"], decay_s=told["decay_s"])

    def filter(self, name: str, settings: KvSettings) -> OffloadFilter:
        """The filter of that name, which hears of uses from now on."""
        made = build_offload(name, settings)
        self._filters.append(made)
        return made

    def used(self, prompt: Prompt, hi: int, now_s: float) -> None:
        """The first `hi` blocks of a prompt were completed for it, or found; each is counted once for a request."""
        for branch, a, b in prompt.run(prompt.used, hi):
            if self.sketch is not None:
                self.sketch.touch_run(branch, a, b)
            for each in self._filters:
                each.used(branch, a, b, now_s)
        prompt.used = max(prompt.used, hi)


class Books:
    """One tier of `blocks`: what is here, what is coming, what may not go, by key. Makes room as its order says."""

    def __init__(self, name: str, blocks: int, order: str, offload: OffloadFilter, settings: KvSettings) -> None:
        self.name = name
        self.offload = offload
        self._new_store: Callable[[], TierStore] = lambda: TierStore(blocks, build_eviction(order, settings), name=name)
        self.clear()

    def clear(self) -> None:
        """Forget everything, whoever uses it."""
        self.store = self._new_store()
        self._lot = Lot(0)  # what is coming, all together
        self._lot.state = BlockState.LOADING
        self._coming = Spans()
        self._place: dict[Key, tuple[Branch, int]] = {}
        self._key: dict[tuple[Branch, int], Key] = {}
        self._here: set[Key] = set()
        self._pins: list[_Pin] = []
        self._pinned: dict[Key, int] = {}

    # ------------------------------------------------------------ what is there

    def has(self, key: Key) -> bool:
        """Whether a block can be read."""
        return key in self._here

    def knows(self, key: Key) -> bool:
        """Whether it is here, or on its way here."""
        return key in self._place

    def held(self) -> frozenset[Key]:
        """All that can be read."""
        return frozenset(self._here)

    def absent(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """As filters ask: the blocks of [lo, hi) that are neither here nor on their way here."""
        return [gap for a, b in self.store.lacking(branch, lo, hi) for gap in self._coming.lacking(branch, a, b)]

    def blocks_of(self, tenant: str) -> int:
        """An engine knows no tenants."""
        return 0

    # ------------------------------------------------------------ coming in

    def wanted(self, prompt: Prompt, keys: Iterable[Key], now_s: float) -> list[Key]:
        """Those of a prompt's blocks that pass the filter and are not known here, first to last."""
        passed = []
        for branch, lo, hi in as_runs(prompt, keys):
            for a, b in self.offload.passes(Candidate(BlockRun(branch, lo, hi)), self, now_s):
                passed += [key for key in prompt.keys[a:b] if key not in self._place]
        return passed

    def take(self, prompt: Prompt, keys: Sequence[Key], now_s: float, when_full: str = EVICT) -> tuple[int, list[Key]]:
        """Room for the first of these blocks, which are coming: for how many there is, and who went for them."""
        gone: list[Key] = []
        free = self.store.gauges[BlockState.FREE]
        if free < len(keys) and when_full != DROP:
            gone = self._forget(self.store.evict(len(keys) - free, now_s))
            free = self.store.gauges[BlockState.FREE]
        taken = min(free, len(keys))
        if taken:
            lot = self.store.reserve(taken)
            assert lot is not None
            self.store.advance(lot, Cause.LOAD)
            self._lot.blocks += taken
        for key in keys[:taken]:
            block = prompt.at[key]
            (run,) = prompt.run(block, block + 1)
            self._place[key] = (run.branch, block)
            self._key[run.branch, block] = key
            self._coming.add(run.branch, block, block + 1)
        return taken, gone

    def landed(self, keys: Iterable[Key], now_s: float) -> list[Key]:
        """These blocks have come, and can be read and evicted from now on; those of them that were coming."""
        came = [key for key in keys if key in self._place and key not in self._here]
        holds: list[Hold] = []
        for branch, lo, hi in self._runs(came):
            self._coming.remove(branch, lo, hi)
            held, _ = self.store.register(self._lot, BlockRun(branch, lo, hi), now_s)
            holds += held
        self._here.update(came)
        self.store.release(holds)
        return came

    def failed(self, keys: Iterable[Key]) -> list[Key]:
        """These blocks do not come after all; those of them that were coming."""
        lost = [key for key in keys if key in self._place and key not in self._here]
        for key in lost:
            branch, block = self._place.pop(key)
            del self._key[branch, block]
            self._coming.remove(branch, block, block + 1)
        if lost:
            part = Lot(len(lost))
            part.state = self._lot.state
            self._lot.blocks -= len(lost)
            self.store.free(part, Cause.LOAD_FAILED)
        return lost

    # ------------------------------------------------------------ in use

    def pin(self, keys: Iterable[Key]) -> None:
        """These blocks are being read: they stay. Raises InvariantError for one that is not here."""
        fresh = []
        for key in keys:
            if key not in self._here:
                raise InvariantError(f"{self.name}: block {key.hex()} is read and is not there")
            self._pinned[key] = self._pinned.get(key, 0) + 1
            if self._pinned[key] == 1:
                fresh.append(key)
        self._hold(fresh)

    def unpin(self, keys: Iterable[Key]) -> None:
        """They have been read."""
        free: dict[Key, None] = {}
        for key in keys:
            self._pinned[key] -= 1
            if not self._pinned[key]:
                del self._pinned[key]
                free[key] = None
        last = self._held(free)  # they are let go together, whoever began to read them
        for pin in [pin for pin in self._pins if not free.keys().isdisjoint(pin.keys)]:
            self._pins.remove(pin)
            self._hold([key for key in pin.keys if key not in free])
            self.store.release(pin.holds)
        self.store.release(last)

    def drop(self, keys: Iterable[Key], now_s: float) -> list[Key]:
        """Forget blocks that cannot be read, as far as nobody else reads them; those that have gone."""
        gone: list[Key] = []
        for key in keys:
            if key in self._here and key not in self._pinned:
                branch, block = self._place[key]
                gone += self._forget(self.store.drop(branch, block, block + 1, now_s))
        return gone

    @property
    def reading(self) -> int:
        """Blocks that are in use."""
        return len(self._pinned)

    @property
    def coming(self) -> int:
        """Blocks that are on their way."""
        return self._lot.blocks

    # ------------------------------------------------------------ inside

    def _hold(self, keys: Sequence[Key]) -> None:
        if keys:
            self._pins.append(_Pin(tuple(keys), self._held(keys)))

    def _held(self, keys: Iterable[Key]) -> list[Hold]:
        return [hold for run in self._runs(keys) for hold in self.store.upgrade(self.store.find(*run))]

    def _runs(self, keys: Iterable[Key]) -> list[BlockRun]:
        """Blocks that are known here as runs, first to last: an engine names those of a prompt in any order."""
        runs: list[BlockRun] = []
        for branch, block in sorted((self._place[key] for key in keys), key=_by_block):
            if runs and runs[-1].branch is branch and runs[-1].hi == block:
                runs[-1] = runs[-1]._replace(hi=block + 1)
            else:
                runs.append(BlockRun(branch, block, block + 1))
        return runs

    def _forget(self, gone: Iterable[Any]) -> list[Key]:
        keys = []
        for run, *_ in gone:
            for block in range(run.hi - 1, run.lo - 1, -1):
                key = self._key.pop((run.branch, block))
                del self._place[key]
                self._here.remove(key)
                keys.append(key)
        return keys


class _Pin:
    """Blocks that are held together."""

    __slots__ = ("holds", "keys")

    def __init__(self, keys: tuple[Key, ...], holds: list[Hold]) -> None:
        self.keys = keys
        self.holds = holds


def _by_block(place: tuple[Branch, int]) -> int:
    return place[1]


def as_runs(prompt: Prompt, keys: Iterable[Key]) -> list[BlockRun]:
    """Blocks of a prompt, first to last, as content."""
    return [run for lo, hi in joined(sorted(prompt.at[key] for key in keys)) for run in prompt.run(lo, hi)]
