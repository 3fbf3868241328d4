"""The helper process and its protocol, with a package that stands for NIXL: real processes, sockets, shared memory."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from executors.framing import LONGEST_BYTES, Unpacker, pack, read_message
from executors.nixl import NixlAgent, NixlSettings
from executors.pool import HostPool
from executors.seals import Sealer
from executors.storage import DISK, HOST, BlockStore, StoreSettings
from executors.transfers import FileMove, ObjectMove, Op, PeerMove, TransferDone, TransferFailed
from policies.cluster.ids import BlockHash
from policies.errors import CapabilityError, EngineError

FAKE = Path(__file__).parents[2] / "fake_nixl"
LIMIT_S = 60.0
A = BlockHash(11)


def settings(folder: Path, **wrong: object) -> NixlSettings:
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    return NixlSettings(
        python=Path(sys.executable),
        name="one",
        backends={"POSIX": {}, "OBJ": {"bucket": str(objects)}},
        environment={
            "PYTHONPATH": str(FAKE), "FAKE_NIXL": json.dumps(wrong),
            "AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "secret",
        },
    )  # fmt: skip


def run(folder: Path, play: Callable[[NixlAgent, HostPool], Awaitable[None]], **wrong: object) -> None:
    async def limited() -> None:
        pool = HostPool(4, 1024)
        async with asyncio.timeout(LIMIT_S):
            agent = await NixlAgent.start(settings(folder, **wrong), pool, folder / "nixl.log")
            try:
                await play(agent, pool)
            finally:
                await agent.close()
                pool.close()

    asyncio.run(limited())


def test_blocks_go_to_a_file_and_to_objects_and_come_back(tmp_path: Path) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        assert agent.plugins == {"POSIX": ["DRAM_SEG", "FILE_SEG"], "OBJ": ["DRAM_SEG", "OBJ_SEG"], "GDS": []}
        file = await agent.add_file(tmp_path / "kv", 4096)
        pool.view(0)[:], pool.view(1)[:] = b"a" * 1024, b"b" * 1024
        end = await agent.move(Op.WRITE, [FileMove(0, file, 2048, 1024), FileMove(1024, file, 0, 1024)]).end(LIMIT_S)
        assert isinstance(end, TransferDone)
        assert (end.bytes, end.backend, end.seconds >= 0) == (2048, "POSIX", True)
        assert (tmp_path / "kv").read_bytes() == b"b" * 1024 + bytes(1024) + b"a" * 1024 + bytes(1024)
        assert await agent.exist(["k", "l"]) == [False, False]
        await agent.move(Op.WRITE, [ObjectMove(0, "k", 1024)]).end(LIMIT_S)
        assert await agent.exist(["k", "l"]) == [True, False]
        await asyncio.gather(
            agent.move(Op.READ, [ObjectMove(2048, "k", 1024)]).end(LIMIT_S),
            agent.move(Op.READ, [FileMove(3072, file, 0, 1024)]).end(LIMIT_S),
        )
        assert (bytes(pool.view(2)), bytes(pool.view(3))) == (b"a" * 1024, b"b" * 1024)

    run(tmp_path, play)


@pytest.mark.parametrize(("state", "says"), [("ERR", "ERR"), ("raise", "Backend: NIXL_ERR_REMOTE_DISCONNECT")])
def test_a_transfer_that_fails_says_how_and_once_its_handle_is_released(tmp_path: Path, state: str, says: str) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        file = await agent.add_file(tmp_path / "kv", 4096)
        end = await agent.move(Op.READ, [FileMove(0, file, 0, 1024)]).end(LIMIT_S)
        assert isinstance(end, TransferFailed)
        assert (end.reason, end.late, end.bytes) == (says, False, 1024)

    run(tmp_path, play, state=state, refusals=3)


def test_a_late_transfer_settles_when_its_bytes_no_longer_move(tmp_path: Path) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        file = await agent.add_file(tmp_path / "kv", 4096)
        transfer = agent.move(Op.WRITE, [FileMove(0, file, 0, 1024)])
        end = await transfer.end(0.0)
        assert isinstance(end, TransferFailed)
        assert end.late
        assert not transfer.settled.done()
        (tmp_path / "gate").touch()
        assert isinstance(await transfer.settled, TransferDone)
        assert await transfer.end(LIMIT_S) == end, "it stays a failure"

    run(tmp_path, play, gate=str(tmp_path / "gate"))


def test_when_the_helper_dies_everything_under_way_has_failed(tmp_path: Path) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        file = await agent.add_file(tmp_path / "kv", 4096)
        transfers = [agent.move(Op.READ, [FileMove(0, file, 0, 1024)]) for _ in range(3)]
        for end in [await transfer.end(LIMIT_S) for transfer in transfers]:
            assert isinstance(end, TransferFailed)
            assert "the helper is gone: it ended (status -9)" in end.reason
        with pytest.raises(EngineError, match="the helper is gone"):
            await agent.exist(["k"])

    run(tmp_path, play, die=True)


def test_closing_fails_what_is_under_way(tmp_path: Path) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        file = await agent.add_file(tmp_path / "kv", 4096)
        transfer = agent.move(Op.READ, [FileMove(0, file, 0, 1024)])
        await agent.close()
        assert isinstance(transfer.settled.result(), TransferFailed)
        assert isinstance(await agent.move(Op.READ, [FileMove(0, file, 0, 1)]).end(0.0), TransferFailed)

    run(tmp_path, play, gate=str(tmp_path / "never"))


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (FileMove(4090, 0, 0, 1024), "not within a pool"),
        (FileMove(0, 0, 4000, 1024), "not within a file of 4096"),
        (FileMove(-1, 0, 0, 1024), "not within a pool"),
        (PeerMove(0, "nobody", 0, 1024), "KeyError: 'nobody'"),
    ],
)
def test_a_place_that_is_not_ours_is_refused_before_anything_moves(
    tmp_path: Path, move: FileMove | PeerMove, says: str
) -> None:
    async def play(agent: NixlAgent, pool: HostPool) -> None:
        await agent.add_file(tmp_path / "kv", 4096)
        end = await agent.move(Op.READ, [move]).end(LIMIT_S)  # type: ignore[arg-type]
        assert isinstance(end, TransferFailed)
        assert says in end.reason

    run(tmp_path, play)


def test_a_backend_that_cannot_be_made_says_what_nixl_said(tmp_path: Path) -> None:
    async def play() -> None:
        with pytest.raises(CapabilityError, match=r"NIXL with POSIX, OBJ does not start: .*NIXL_ERR_BACKEND"):
            await NixlAgent.start(settings(tmp_path, no_backend=True), HostPool(1, 10), tmp_path / "nixl.log")

    asyncio.run(play())


def test_an_environment_without_nixl_says_how_to_install_it(tmp_path: Path) -> None:
    async def play() -> None:
        bare = NixlSettings(python=Path(sys.executable), name="one", environment={"PYTHONPATH": ""})
        with pytest.raises(CapabilityError, match="has no NIXL; install it there: pip install"):
            await NixlAgent.start(bare, HostPool(1, 10), tmp_path / "nixl.log")

    asyncio.run(play())


def test_a_store_keeps_its_promise_over_the_helper(tmp_path: Path) -> None:
    sealer = Sealer("tiny", 1024 - 64)

    async def play(agent: NixlAgent, pool: HostPool) -> None:
        store = await BlockStore.open(StoreSettings(disk_folder=tmp_path, disk_blocks=2), sealer, pool, agent)
        store.put(A, b"x" * 960)
        assert isinstance(await store.offload(A, DISK), TransferDone)
        store.evict(A, HOST)
        assert await store.get(A, LIMIT_S) == b"x" * 960

    run(tmp_path, play)


# ---------------------------------------------------------------- messages


def test_messages_come_whole_however_they_are_cut() -> None:
    sent = [{"id": 1}, {"id": 2, "moves": [[0, 1, 2, 3]] * 50}, {"text": "ä"}]
    stream = b"".join(map(pack, sent))
    unpacker = Unpacker()
    assert [one for n in range(len(stream)) for one in unpacker.feed(stream[n : n + 1])] == sent

    async def read() -> list[dict | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(stream + pack({"cut": True})[:-1])
        reader.feed_eof()
        return [await read_message(reader) for _ in range(4)]

    assert asyncio.run(read()) == [*sent, None]


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\1\xff"])
def test_bytes_that_are_no_message_are_refused(stream: bytes) -> None:
    with pytest.raises(EngineError, match="a message"):
        list(Unpacker().feed(stream))


def test_a_message_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(EngineError, match="move fewer blocks at once"):
        pack({"text": "x" * LONGEST_BYTES})
    assert len(pack({})) == struct.calcsize(">I") + 2
