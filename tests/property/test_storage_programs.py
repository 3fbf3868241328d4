"""Random lives of a store of KV blocks whose copies are damaged, torn, late and lost: no wrong bytes, and no leak."""

from __future__ import annotations

import asyncio
from pathlib import Path

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_mover import NaiveMover

from executors.pool import HostPool
from executors.seals import Sealer
from executors.storage import DISK, HOST, OBJECTS, BlockStore, StoreSettings
from policies.cluster.ids import BlockHash

SEALER = Sealer("tiny", 96)
SLOTS, DISK_BLOCKS = 3, 2
BLOCKS = st.integers(0, 4).map(BlockHash)
TIERS = st.sampled_from([HOST, DISK, OBJECTS])
BELOW = st.sampled_from([DISK, OBJECTS])
STEP = st.one_of(
    st.tuples(st.just("put"), BLOCKS),
    st.tuples(st.just("get"), BLOCKS),
    st.tuples(st.just("offload"), BLOCKS, BELOW),
    st.tuples(st.just("evict"), BLOCKS, TIERS),
    st.tuples(st.just("erase"), BLOCKS),
    st.tuples(st.just("find"), BLOCKS),
    st.tuples(st.just("mood"), st.sampled_from(["ok", "ok", "fail", "torn", "nothing", "hang"])),
    st.tuples(st.just("release")),
    st.tuples(st.just("damage"), st.integers(0, 10_000)),
)


def payload(block: BlockHash) -> bytes:
    return bytes((17 * block + n) % 256 for n in range(96))


@examples(200)
@given(st.lists(STEP, max_size=40), st.sampled_from([0.0, 60.0]))
def test_what_is_read_is_what_was_put_or_nothing(steps: list[tuple], transfer_s: float) -> None:
    asyncio.run(live(steps, transfer_s))


async def live(steps: list[tuple], transfer_s: float) -> None:
    pool = HostPool(SLOTS, SEALER.slot_bytes)
    mover = NaiveMover(pool)
    settings = StoreSettings(
        disk_folder=Path("/tmp"), disk_blocks=DISK_BLOCKS, object_prefix="kv", transfer_s=transfer_s
    )
    store = await BlockStore.open(settings, SEALER, pool, mover)
    tasks = []
    for step in steps:
        match step:
            case ("put", block):
                store.put(block, payload(block))
            case ("get", block):
                tasks.append(asyncio.ensure_future(check(store, block)))
            case ("offload", block, tier):
                tasks.append(asyncio.ensure_future(store.offload(block, tier)))
            case ("evict", block, tier):
                store.evict(block, tier)
            case ("erase", block):
                tasks.append(asyncio.ensure_future(store.erase(block)))
            case ("find", block):
                await store.find_objects([block])
            case ("mood", mood):
                mover.mood = mood
            case ("release",):
                mover.release()
            case ("damage", at):
                for there in (*mover.files, *mover.objects.values()):
                    there[at % len(there)] ^= 1
        for _ in range(3):  # tasks get some turns, not always all that they need
            await asyncio.sleep(0)
    mover.mood = "ok"
    while mover.hanging:
        mover.release()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    await store.close()
    for block in range(5):
        for tier in (HOST, DISK, OBJECTS):
            store.evict(BlockHash(block), tier)
    await asyncio.sleep(0)
    assert (store.room(HOST), store.room(DISK)) == (SLOTS, DISK_BLOCKS), "all room has come back"
    pool.close()


async def check(store: BlockStore, block: BlockHash) -> None:
    assert await store.get(block, 60.0) in (None, payload(block))
