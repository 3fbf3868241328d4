"""The tiers inside an engine decide as the twin does: the same blocks come, stay and go for the same events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from executors.engines.in_vllm.books import DROP, EVICT, Books, Contents, Counting, Key, Prompt
from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.cluster.ids import Tier
from policies.errors import InvariantError
from policies.kvbm.build import EVICTIONS, KvSettings, build_eviction, build_offload
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import Level, TierBody
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Offload
from policies.kvbm.sketch import Sketch
from policies.kvbm.tiers import TierSpec

GROUP = bytes(4)
FLUSH_S = 0.01
"""In which the blocks of a prompt come together in the twin."""
TOLD: dict[str, Any] = {"min_lfu_count": 1, "decay_s": 3.0}


def key(number: int) -> Key:
    """As vLLM has them: 32 bytes of a hash that covers all before it, and the group."""
    return Key(number.to_bytes(32) + GROUP)


def prompt_of(contents: Contents, numbers: list[int]) -> Prompt:
    prompt = Prompt()
    contents.extend(prompt, [key(number) for number in numbers])
    return prompt


class Ours:
    """A host tier of an engine, told what its scheduler would tell."""

    def __init__(self, blocks: int, eviction: str, offload: str, when_full: str = EVICT) -> None:
        self.contents = Contents()
        self.counting = Counting()
        self.when_full = when_full
        settings = self.counting.settings(TOLD, blocks)
        self.books = Books("host", blocks, eviction, self.counting.filter(offload, settings), settings)

    def completed(self, numbers: list[int], found: int, now_s: float) -> None:
        """A prompt whose blocks from `found` on were computed."""
        prompt = prompt_of(self.contents, numbers)
        prompt.looked_up(prompt.keys[found])
        self.counting.used(prompt, len(numbers), now_s)
        wanted = self.books.wanted(prompt, prompt.keys[prompt.begin_computed() :], now_s)
        taken, _ = self.books.take(prompt, wanted, now_s, self.when_full)
        self.books.landed(set(wanted[:taken]), now_s)  # as vLLM does it, in any order

    def load(self, numbers: list[int], now_s: float) -> list[Key]:
        held = []
        for each in numbers:
            if not self.books.has(key(each)):
                break
            held.append(key(each))
        self.books.pin(set(held))
        return held

    def held(self) -> set[int]:
        return {int.from_bytes(each[:32]) for each in self.books.held()}


class Twin:
    """The twin's manager with the same tier, which moves what it orders at once."""

    def __init__(self, blocks: int, eviction: str, offload: str, when_full: str = EVICT) -> None:
        self.tree = ContentTree(1, 1)
        self.sketch = Sketch(blocks)
        settings = KvSettings(sketch=lambda: self.sketch, **TOLD)
        spec = TierSpec(tier=Tier.G2_HOST, capacity_bytes=blocks, block_bytes=1, bytes_per_s=1e9, latency_s=0.0)
        self.body = TierBody(spec, lambda: build_eviction(eviction, settings))
        rules = BatchRules(max_blocks=10**6, min_blocks=10**6, flush_s=FLUSH_S)
        level = Level(self.body, build_offload(offload, settings), when_full=when_full, batches=rules)
        self.manager = BlockManager([level], lambda branch, lo, hi: [], sketch=self.sketch)

    def path(self, numbers: list[int]) -> BlockPath:
        """Under the names that the engine has, so that a sketch counts both in the same places."""
        return self.tree.path([int.from_bytes(key(number)) for number in numbers], len(numbers))

    def runs(self, numbers: list[int], lo: int) -> list[BlockRun]:
        path = self.path(numbers)
        return [BlockRun(run.branch, max(run.lo, lo), run.hi) for run in path.runs() if run.hi > lo]

    def completed(self, numbers: list[int], found: int, now_s: float) -> None:
        path = self.path(numbers)
        self.manager.found(path.pieces, found, now_s)
        for branch, lo, hi in self.runs(numbers, found):
            self.manager.completed(branch, lo, hi, now_s)
        for order in self.manager.poll(now_s + FLUSH_S):
            if isinstance(order, Offload):
                self.manager.moved(order.batch_id, now_s)

    def load(self, numbers: list[int], now_s: float) -> Any:
        path = self.path(numbers)
        store = self.body.store
        return store.upgrade(store.match(path.pieces, 0, len(numbers)))

    def held(self) -> set[int]:
        return {
            run.branch.keys[block - run.branch.start] >> 8 * len(GROUP)
            for run in self.body.store.findable()
            for block in range(run.lo, run.hi)
            if run.branch.keys is not None
        }


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that share beginnings, as a tree of numbers: a block's covers all before it."""
    grown: dict[tuple[int, ...], int] = {}
    made = []
    for _ in range(12):
        path: tuple[int, ...] = ()
        numbers = []
        for _ in range(rng.randint(1, 9)):
            path = (*path, rng.choice([0, 0, 0, 1, 2]))
            numbers.append(grown.setdefault(path, 1000 + len(grown)))
        made.append(numbers)
    return made


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
@pytest.mark.parametrize("offload", ["presence", "presence_lfu", "presence+frequency_filter"])
@pytest.mark.parametrize("when_full", [EVICT, DROP])
def test_the_same_events_leave_the_same_blocks_as_in_the_twin(eviction: str, offload: str, when_full: str) -> None:
    evictions = 0
    for seed in range(12):
        rng = random.Random(f"{seed} {eviction} {offload}")
        ours, twin = Ours(12, eviction, offload, when_full), Twin(12, eviction, offload, when_full)
        loads: list[tuple[list[Key], Any]] = []
        known = prompts(rng)
        # A sketch counts by the names of branches, which are what they are for as long as somebody knows them.
        kept = [(prompt_of(ours.contents, numbers), twin.path(numbers)) for numbers in known]
        for step in range(40):
            now_s = step * 0.5
            numbers = rng.choice(known)
            before = ours.held()
            if loads and rng.random() < 0.4:
                held, holds = loads.pop(rng.randrange(len(loads)))
                ours.books.unpin(set(held))
                twin.body.store.release(holds)
            elif rng.random() < 0.3:
                loads.append((ours.load(numbers, now_s), twin.load(numbers, now_s)))
            else:
                found = rng.randrange(len(numbers))
                ours.completed(numbers, found, now_s)
                twin.completed(numbers, found, now_s)
            assert ours.held() == twin.held(), f"seed {seed}, step {step}"
            ours.books.store.audit()
            evictions += len(before - ours.held())
        del kept
    assert (evictions > 0) == (when_full == EVICT)


def test_what_fails_to_come_leaves_its_room_to_others() -> None:
    ours = Ours(3, "lru", "presence")
    prompt = prompt_of(ours.contents, [1, 2, 3])
    assert ours.books.take(prompt, prompt.keys, 0.0) == (3, [])
    assert (ours.books.knows(key(2)), ours.books.has(key(2))) == (True, False)
    assert ours.books.failed(prompt.keys[1:]) == prompt.keys[1:]
    assert ours.books.landed(prompt.keys, 1.0) == prompt.keys[:1]
    other = prompt_of(ours.contents, [7, 8])
    assert ours.books.take(other, other.keys, 2.0) == (2, [])
    ours.books.store.audit()


def test_what_is_read_stays_and_what_is_not_there_is_not_read() -> None:
    ours = Ours(2, "lru", "presence")
    ours.completed([1, 2], 0, 0.0)
    ours.books.pin([key(1), key(2)])
    ours.books.pin([key(2)])
    ours.books.unpin([key(1), key(2)])
    assert (ours.books.reading, ours.books.drop([key(2)], 1.0)) == (1, [])
    ours.completed([5, 6], 0, 1.0)
    assert ours.held() == {2, 5}
    with pytest.raises(InvariantError, match="is read and is not there"):
        ours.books.pin([key(9)])


def test_a_prompt_that_the_device_has_is_used_and_not_offered_again() -> None:
    contents = Contents()
    prompt = prompt_of(contents, [1, 2, 3, 4])
    prompt.looked_up(key(3))
    prompt.looked_up(key(4))
    prompt.loaded([key(3)])
    assert prompt.begin_computed() == 3
    prompt.looked_up(key(2))  # it was preempted, and looks again
    assert prompt.begin_computed() == 1
    assert prompt_of(contents, [8]).begin_computed() == 0


def test_groups_of_a_hybrid_model_are_different_content() -> None:
    contents = Contents()
    first, second = Prompt(), Prompt()
    contents.extend(first, [Key(bytes(32) + bytes(4))])
    contents.extend(second, [Key(bytes(32) + (1).to_bytes(4))])
    assert first.runs[0].branch is not second.runs[0].branch
