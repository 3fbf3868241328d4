"""A store of KV blocks: what is read is what was put or nothing, whatever becomes of copies on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from naive_mover import NaiveMover

from executors.plain_mover import PlainMover
from executors.pool import HostPool
from executors.seals import SEAL_BYTES, Sealer
from executors.storage import DISK, HOST, OBJECTS, BlockStore, Miss, StoreSettings
from executors.transfers import FileMove, ObjectMove, Op, PeerMove, TransferDone, TransferFailed
from policies.cluster.ids import BlockHash, Tier
from policies.errors import CapabilityError, ConfigError, EngineError, InvariantError

A, B = BlockHash(2**64 - 1), BlockHash(7)
BLOCK = 1000
SEALER = Sealer("tiny bf16 layers-first", BLOCK)
LIMIT_S = 60.0


def payload(block: BlockHash) -> bytes:
    return bytes((block + n) % 251 for n in range(BLOCK))


class Scene:
    """A store with room for few blocks, over a mover that does as it is told."""

    def __init__(self, slots: int = 2, **settings: object) -> None:
        known = {"disk_folder": Path("/tmp"), "disk_blocks": 2, "object_prefix": "kv"}
        self.settings = StoreSettings(**(known | settings))  # type: ignore[arg-type]
        self.pool = HostPool(slots, SEALER.slot_bytes)
        self.mover = NaiveMover(self.pool)

    async def open(self) -> BlockStore:
        self.store = await BlockStore.open(self.settings, SEALER, self.pool, self.mover)
        return self.store

    async def put_below(self, block: BlockHash, *tiers: Tier) -> None:
        """A block in these tiers and no longer in host memory."""
        assert self.store.put(block, payload(block))
        for tier in tiers:
            assert isinstance(await self.store.offload(block, tier), TransferDone)
        self.store.evict(block, HOST)

    def damage(self, at: int) -> None:
        for there in (*self.mover.files, *self.mover.objects.values()):
            there[at] ^= 1


def run(play: Callable[[Scene, BlockStore], Awaitable[None]], **settings: object) -> None:
    async def limited() -> None:
        scene = Scene(**settings)  # type: ignore[arg-type]
        async with asyncio.timeout(LIMIT_S):
            await play(scene, await scene.open())

    asyncio.run(limited())


@pytest.mark.parametrize("tier", [DISK, OBJECTS])
def test_a_block_comes_back_from_below(tier: Tier) -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, tier)
        assert store.tiers(A) == {tier}
        assert await store.get(A, LIMIT_S) == payload(A)
        assert store.tiers(A) == {HOST, tier}
        assert not store.misses
        assert store.ends == {(Op.WRITE, tier, True): 1, (Op.READ, tier, True): 1}

    run(play)


def test_a_block_that_nobody_put_is_absent() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.ABSENT: 1}

    run(play)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 9, BLOCK + SEAL_BYTES - 1])
@pytest.mark.parametrize("tier", [DISK, OBJECTS])
def test_one_damaged_bit_anywhere_means_compute_it_again(tier: Tier, at: int) -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, tier)
        scene.damage(at)
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.DAMAGED: 1}
        assert store.tiers(A) == frozenset(), "a damaged copy is dropped"
        assert (store.room(HOST), store.room(DISK)) == (2, 2)

    run(play)


def test_damage_in_host_memory_is_told_too() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        store.put(A, payload(A))
        scene.pool.span(0, scene.pool.nbytes)[5] ^= 1
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.DAMAGED: 1}

    run(play)


def test_a_damaged_copy_is_made_up_for_by_the_next_tier() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, DISK, OBJECTS)
        scene.mover.files[0][3] ^= 1
        assert await store.get(A, LIMIT_S) == payload(A)
        assert store.tiers(A) == {HOST, OBJECTS}

    run(play)


def test_another_blocks_bytes_and_another_models_are_not_taken() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, OBJECTS)
        await scene.put_below(B, OBJECTS)
        keys = sorted(scene.mover.objects)
        scene.mover.objects[keys[0]], scene.mover.objects[keys[1]] = (scene.mover.objects[key] for key in keys[::-1])
        assert await store.get(A, LIMIT_S) is None
        assert await store.get(B, LIMIT_S) is None
        foreign = Sealer("another model", BLOCK)
        slot = scene.pool.view(0)
        foreign.write(slot, A, payload(A))
        assert (SEALER.read(slot, A), foreign.read(slot, A)) == (None, payload(A))

    run(play)


def test_a_torn_write_is_told_when_it_is_read() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        scene.mover.mood = "torn"
        await scene.put_below(A, DISK)
        scene.mover.mood = "ok"
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.DAMAGED: 1}

    run(play)


def test_a_read_that_brought_nothing_is_not_taken_for_what_was_there_before() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, OBJECTS)
        for there in scene.mover.objects.values():
            there[:] = bytes(len(there))
        scene.mover.mood = "nothing"
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.DAMAGED: 1}

    run(play)


def test_a_late_read_is_no_answer_now_and_a_copy_later() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, DISK)
        scene.mover.mood = "hang"
        assert await store.get(A, 0.0) is None
        assert await store.get(A, 0.0) is None
        assert store.misses == {Miss.LATE: 2}
        assert scene.mover.moved == 2, "one write, and one read for both who asked"
        scene.mover.mood = "ok"
        scene.mover.release()
        assert await store.onboard(A, LIMIT_S) is None
        assert await store.get(A, LIMIT_S) == payload(A)

    run(play)


def test_memory_of_a_transfer_that_timed_out_is_not_free_until_it_has_settled() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, DISK)
        scene.mover.mood = "hang"
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.LATE: 1}
        assert store.evict(A, DISK)
        assert (store.room(HOST), store.room(DISK)) == (0, 0), "bytes may still be moving between the two"
        scene.mover.mood = "ok"
        scene.mover.release()
        await asyncio.sleep(0)
        assert (store.room(HOST), store.room(DISK)) == (1, 1)

    run(play, slots=1, disk_blocks=1, transfer_s=0.0)


def test_a_write_that_fails_or_is_late_leaves_no_copy_and_its_room_comes_back() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        store.put(A, payload(A))
        scene.mover.mood = "fail"
        end = await store.offload(A, DISK)
        assert isinstance(end, TransferFailed)
        assert (end.reason, end.late, end.bytes) == ("as told", False, SEALER.slot_bytes)
        scene.mover.mood = "hang"
        end = await store.offload(A, DISK)
        assert isinstance(end, TransferFailed)
        assert end.late
        assert store.tiers(A) == {HOST}
        assert store.room(DISK) == 1
        scene.mover.mood = "ok"
        scene.mover.release()
        await asyncio.sleep(0)
        assert store.room(DISK) == 2
        assert store.tiers(A) == {HOST}, "what came late does not count"

    run(play, transfer_s=0.0)


def test_without_room_nothing_is_lost_and_nothing_is_taken() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, DISK)
        for block in (3, 4):
            assert store.put(BlockHash(block), payload(BlockHash(block)))
        assert not store.put(B, payload(B))
        assert await store.get(A, LIMIT_S) is None
        assert store.misses == {Miss.NO_ROOM: 1}
        store.evict(BlockHash(3), HOST)
        assert await store.get(A, LIMIT_S) == payload(A)
        assert await store.offload(B, DISK) is None, "it is not in host memory"

    run(play)


def test_what_others_put_into_the_object_store_is_found_and_what_is_erased_is_gone() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        await scene.put_below(A, OBJECTS)
        other = await BlockStore.open(scene.settings, SEALER, scene.pool, scene.mover)
        assert await other.find_objects([A, B]) == 1
        assert await other.get(A, LIMIT_S) == payload(A)
        assert isinstance(await store.erase(A), TransferDone)
        assert not any(payload(A)[:16] in there for there in scene.mover.objects.values())
        other.evict(A, HOST)
        assert await other.get(A, LIMIT_S) is None

    run(play)


def test_a_tier_that_is_not_there_is_refused_by_name() -> None:
    async def play(scene: Scene, store: BlockStore) -> None:
        store.put(A, payload(A))
        for tier in (DISK, OBJECTS):
            with pytest.raises(CapabilityError, match=f"keeps no blocks in {tier.value}"):
                await store.offload(A, tier)
        with pytest.raises(ValueError, match="a block of 3 bytes"):
            store.put(B, b"abc")
        assert store.room(HOST) == 1

    run(play, disk_folder=None, object_prefix=None)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    pool = HostPool(2, BLOCK)
    with pytest.raises(ConfigError, match=f"slots of {BLOCK} bytes; a block and its seal have {SEALER.slot_bytes}"):
        BlockStore(StoreSettings(), SEALER, pool, NaiveMover(pool))
    slot = pool.take()
    assert slot is not None
    pool.give_back(slot)
    with pytest.raises(InvariantError, match="given back twice"):
        pool.give_back(slot)
    pool.close()


# ---------------------------------------------------------------- plain system calls


def test_the_plain_mover_keeps_blocks_in_a_nameless_file_and_in_objects(tmp_path: Path) -> None:
    disk, objects = tmp_path / "disk", tmp_path / "objects"
    disk.mkdir()
    objects.mkdir()

    async def play() -> None:
        pool = HostPool(2, SEALER.slot_bytes)
        mover = PlainMover(pool, objects)
        settings = StoreSettings(disk_folder=disk, disk_blocks=4, object_prefix="kv")
        store = await BlockStore.open(settings, SEALER, pool, mover)
        assert list(disk.iterdir()) == [], "what was KV ends with the process"
        for block, tier in ((A, DISK), (B, OBJECTS)):
            store.put(block, payload(block))
            assert isinstance(await store.offload(block, tier), TransferDone)
            store.evict(block, HOST)
            assert await store.get(block, LIMIT_S) == payload(block)
        (there,) = objects.iterdir()
        there.write_bytes(there.read_bytes()[:-1])
        store.evict(B, HOST)
        assert await store.get(B, LIMIT_S) is None
        assert store.misses == {Miss.FAILED: 1}
        await store.close()
        await mover.close()
        pool.close()

    asyncio.run(play())


def test_the_plain_mover_tells_failures_and_raises_none(tmp_path: Path) -> None:
    async def play() -> None:
        pool = HostPool(1, 4096)
        mover = PlainMover(pool)
        with pytest.raises(EngineError, match="nowhere"):
            await mover.add_file(tmp_path / "nowhere" / "kv", 10)
        file = await mover.add_file(tmp_path / "kv", 100)
        for move in (FileMove(0, file, 50, 100), ObjectMove(0, "k", 10), PeerMove(0, "p", 0, 10)):
            end = await mover.move(Op.READ, [move]).end(LIMIT_S)  # type: ignore[arg-type]
            assert isinstance(end, TransferFailed)
            assert not end.late
        assert end.reason == "moves between processes need NIXL"
        await mover.close()
        await mover.close()
        assert isinstance(await mover.move(Op.READ, [FileMove(0, file, 0, 1)]).end(LIMIT_S), TransferFailed)
        pool.close()

    asyncio.run(play())
