"""The real NIXL, in its own environment: memory to memory of another process, to a file, to an S3 server on loopback.

DYNATWIN_NIXL_PYTHON names the interpreter of that environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from executors.nixl import INSTALL, NixlAgent, NixlSettings
from executors.pool import HostPool
from executors.ports import LOOPBACK, PortAllocator, PortNeed
from executors.probe import Environment
from executors.process import EngineProcess
from executors.seals import Sealer
from executors.storage import DISK, HOST, OBJECTS, BlockStore, Miss, StoreSettings
from executors.transfers import ObjectMove, Op, PeerMove, TransferDone, TransferFailed
from policies.cluster.ids import BlockHash, Tier

pytestmark = pytest.mark.live

VARIABLE = "DYNATWIN_NIXL_PYTHON"
BUCKET = "kvbucket"
LIMIT_S = 120.0
BLOCK = 64 << 10
SEALER = Sealer("tiny", BLOCK)
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
BLOCKS = [BlockHash(1000 + n) for n in range(8)]


def skip(what: str, reason: str, install: str) -> None:
    pytest.skip(f"SKIP {what}: {reason}; install with {install}, and name its interpreter in {VARIABLE}")


@pytest.fixture(scope="module")
def python() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        skip("NIXL", f"{VARIABLE} is not set", INSTALL)
    if Environment.of(Path(str(named))).version("nixl") is None:
        skip("NIXL", f"{named} has no nixl", INSTALL)
    return Path(str(named))


def payload(block: BlockHash) -> bytes:
    return block.to_bytes(8, "big") * (BLOCK // 8)


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await play()

    asyncio.run(limited())


@asynccontextmanager
async def agent(
    python: Path, folder: Path, name: str, backends: dict[str, dict[str, str]]
) -> AsyncIterator[tuple[NixlAgent, HostPool]]:
    pool = HostPool(len(BLOCKS), SEALER.slot_bytes)
    settings = NixlSettings(python=python, name=name, backends=backends, environment=KEYS)
    made = await NixlAgent.start(settings, pool, folder / f"{name}.log")
    try:
        yield made, pool
    finally:
        await made.close()
        pool.close()


@asynccontextmanager
async def s3_server(python: Path, folder: Path) -> AsyncIterator[str]:
    """A throw-away S3 server with an empty bucket; its address."""
    if Environment.of(python).version("moto") is None:
        skip("NIXL to objects", f"{python} has no moto", "pip install 'moto[server]' there")
    ports = PortAllocator()
    port = ports.take("s3", [PortNeed(name="http")])["http"]
    command = [str(python), "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    server = await EngineProcess.start("s3", command, folder / "s3.log", environment={**os.environ, **KEYS})
    address = f"http://{LOOPBACK}:{port}"
    async with aiohttp.ClientSession() as session:

        async def bucket() -> bool:
            async with session.put(f"{address}/{BUCKET}") as answer:
                return answer.status == 200

        try:
            await server.wait_ready(bucket, LIMIT_S)
            yield address
        finally:
            await server.stop(10.0)
            ports.close()


async def round_trip(store: BlockStore, tier: Tier) -> None:
    for block in BLOCKS[:-1]:
        assert store.put(block, payload(block))
        assert isinstance(await store.offload(block, tier), TransferDone)
        assert store.evict(block, HOST)
    found = await asyncio.gather(*(store.get(block, LIMIT_S) for block in BLOCKS[:-1]))
    assert found == [payload(block) for block in BLOCKS[:-1]]
    assert not store.misses


def test_blocks_cross_to_another_process_and_back(python: Path, tmp_path: Path) -> None:
    async def play() -> None:
        ucx: dict[str, dict[str, str]] = {"UCX": {}}
        async with (
            agent(python, tmp_path, "one", ucx) as (one, ours),
            agent(python, tmp_path, "two", ucx) as (two, theirs),
        ):
            peer = await one.meet(await two.card())
            size = ours.slot_bytes
            for slot, block in enumerate(BLOCKS):
                SEALER.write(ours.view(slot), block, payload(block))
            there = [PeerMove(ours.offset(slot), peer, (7 - slot) * size, size) for slot in range(8)]
            end = await one.move(Op.WRITE, there, note="kv of r1").end(LIMIT_S)
            assert isinstance(end, TransferDone), end
            assert (end.bytes, end.backend) == (8 * size, "UCX")
            assert (await two.note())[1] == "kv of r1"
            assert [SEALER.read(theirs.view(7 - slot), block) for slot, block in enumerate(BLOCKS)] == [
                payload(block) for block in BLOCKS
            ]
            ours.span(0, ours.nbytes)[:] = bytes(ours.nbytes)
            end = await one.move(Op.READ, there).end(LIMIT_S)
            assert isinstance(end, TransferDone), end
            assert SEALER.read(ours.view(3), BLOCKS[3]) == payload(BLOCKS[3])

    run(play)


def test_moves_to_a_process_that_has_gone_fail_and_settle(python: Path, tmp_path: Path) -> None:
    async def play() -> None:
        ucx: dict[str, dict[str, str]] = {"UCX": {}}
        async with agent(python, tmp_path, "one", ucx) as (one, ours):
            async with agent(python, tmp_path, "two", ucx) as (two, _):
                peer = await one.meet(await two.card())
            transfer = one.move(Op.READ, [PeerMove(0, peer, 0, ours.slot_bytes)])
            assert isinstance(await transfer.end(LIMIT_S), TransferFailed)
            assert transfer.settled.done()
            await one.forget(peer)
            end = await one.move(Op.READ, [PeerMove(0, peer, 0, ours.slot_bytes)]).end(LIMIT_S)
            assert isinstance(end, TransferFailed)
            assert "KeyError" in end.reason

    run(play)


def test_a_store_over_a_file(python: Path, tmp_path: Path) -> None:
    async def play() -> None:
        async with agent(python, tmp_path, "files", {"POSIX": {}}) as (mover, pool):
            assert set(mover.plugins["POSIX"]) == {"DRAM_SEG", "FILE_SEG"}
            store = await BlockStore.open(StoreSettings(disk_folder=tmp_path, disk_blocks=8), SEALER, pool, mover)
            await round_trip(store, DISK)

    run(play)


def test_a_store_over_objects(python: Path, tmp_path: Path) -> None:
    async def play() -> None:
        async with s3_server(python, tmp_path) as address:
            params = {
                "bucket": BUCKET, "endpoint_override": address, "scheme": "http", "region": "us-east-1",
                "use_virtual_addressing": "false",
            }  # fmt: skip
            async with agent(python, tmp_path, "objects", {"OBJ": params}) as (mover, pool):
                settings = StoreSettings(object_prefix="kv", transfer_s=LIMIT_S)
                store = await BlockStore.open(settings, SEALER, pool, mover)
                await round_trip(store, OBJECTS)
                other = await BlockStore.open(settings, SEALER, pool, mover)
                assert await other.find_objects(BLOCKS) == len(BLOCKS) - 1
                assert isinstance(await store.erase(BLOCKS[0]), TransferDone)
                assert await other.get(BLOCKS[0], LIMIT_S) is None
                assert other.misses == {Miss.DAMAGED: 1}, "NIXL says DONE of an object that is shorter than was asked"
                end = await mover.move(Op.READ, [ObjectMove(0, "nothing", 64)]).end(LIMIT_S)
                assert isinstance(end, TransferFailed)

    run(play)


def test_a_bucket_that_is_not_there_is_told(python: Path, tmp_path: Path) -> None:
    async def play() -> None:
        async with s3_server(python, tmp_path) as address:
            params = {"bucket": "no-such-bucket", "endpoint_override": address, "scheme": "http",
                      "region": "us-east-1", "use_virtual_addressing": "false"}  # fmt: skip
            async with agent(python, tmp_path, "objects", {"OBJ": params}) as (mover, _):
                end = await mover.move(Op.WRITE, [ObjectMove(0, "k", 64)]).end(LIMIT_S)
                assert isinstance(end, TransferFailed)
                assert "NIXL_ERR_BACKEND" in end.reason, "it does not say more"

    run(play)
