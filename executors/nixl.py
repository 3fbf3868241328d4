"""Our own moves of KV over NIXL: memory to files, to objects, and to the memory of another process.

NIXL runs in a helper process, in the environment that has it; this process imports nothing of it. The pool is shared
memory, so no byte goes over the socket. When the helper is gone, nothing moves any more and every transfer has failed.
NIXL 1.5.1 calls the read of an object done that is shorter than what was asked for: readers check what came.

Metadata of an agent is the right to read and write its whole pool: hand a card only to who may do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final

import executors
from executors.framing import Message, pack, read_message
from executors.pool import HostPool
from executors.process import EngineProcess
from executors.transfers import FileMove, Moves, ObjectMove, Op, PeerMove, Transfer
from policies.errors import CapabilityError, EngineError
from policies.frozen import frozen

CALL_S: Final = 120.0
"""Making an agent takes 0.6 s on an idle machine, and more than 30 s on a busy one."""
STOP_S: Final = 5.0
BOOT: Final = """
import sys
sys.path.insert(0, place := sys.argv.pop(1))
from executors.nixl_agent import main
sys.path.remove(place)
main(sys.argv[1:])
"""
"""The helper's own modules are ours; NIXL and what it needs are taken from its environment, never from our folder."""
INSTALL: Final = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 && pip install numpy"


@frozen
class NixlSettings:
    """`python` is the interpreter of the environment with NIXL. `backends`: UCX for other processes, POSIX or GDS for
    files, OBJ for objects, with NIXL's parameters. Keys of the object store come from AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY of the environment."""

    python: Path
    name: str
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"POSIX": {}})
    environment: Mapping[str, str] = field(default_factory=dict)


class NixlAgent:
    """An agent and its helper. A `Mover` of one pool, which it shares and does not own. `start` makes one.

    `plugins` are all that NIXL has, with the memory that each reaches (none: it cannot be loaded on this host).
    """

    def __init__(self, pool: HostPool, process: EngineProcess, ours: socket.socket) -> None:
        self._pool = pool
        self._process = process
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, Callable[[Message], None]] = {}
        self._next = 0
        self._closed = False
        self._gone: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._notes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._files_by = "file"
        self.plugins: Mapping[str, Sequence[str]] = {}

    @staticmethod
    async def start(settings: NixlSettings, pool: HostPool, log: Path) -> NixlAgent:
        """Raises CapabilityError where a backend cannot be made (with what NIXL said), EngineError where the helper
        does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            place = str(Path(executors.__file__).parents[1])
            command = [str(settings.python), "-P", "-c", BOOT, place, str(theirs.fileno())]
            process = await EngineProcess.start(
                f"nixl {settings.name}", command, log,
                environment={**os.environ, **settings.environment}, keep_open=(theirs.fileno(), pool.fd),
            )  # fmt: skip
        agent = NixlAgent(pool, process, ours)
        try:
            await agent._begin(settings)
        except BaseException:
            await agent.close()
            raise
        return agent

    # ------------------------------------------------------------ moves

    async def add_file(self, path: Path, nbytes: int) -> int:
        return int((await self._ask("file", path=str(path), bytes=nbytes))["file"])

    def move(self, op: Op, moves: Moves, note: str = "") -> Transfer:
        """`note` comes to a peer with the bytes, once they are there."""
        kind, backend = self._kind(moves)
        transfer = Transfer(self._next, op, backend, sum(one.nbytes for one in moves))

        def over(answer: Message) -> None:
            error = answer.get("error")
            if error is None:
                transfer.succeed(float(answer["seconds"]))
            else:
                transfer.fail(str(error))

        told = [_plain(one) for one in moves]
        self._send("move", over, op=op.value, kind=kind, moves=told, note=note)
        return transfer

    async def exist(self, keys: Sequence[str]) -> list[bool]:
        return [bool(one) for one in (await self._ask("exist", keys=list(keys)))["there"]]

    # ------------------------------------------------------------ other processes

    async def card(self) -> bytes:
        """What another agent needs to reach our pool."""
        answer = await self._ask("card")
        return json.dumps({key: answer[key] for key in ("metadata", "base", "bytes")}).encode()

    async def meet(self, card: bytes) -> str:
        """Connect to the agent that gave us its card; its name, for PeerMove. Raises EngineError."""
        told = json.loads(card)
        return str((await self._ask("meet", **{key: told[key] for key in ("metadata", "base", "bytes")}))["peer"])

    async def forget(self, peer: str) -> None:
        """That agent is gone; its card is void."""
        await self._ask("forget", peer=peer)

    async def note(self) -> tuple[str, str]:
        """The next note that came with a transfer of another agent: its name, and the text."""
        return await self._notes.get()

    async def close(self) -> None:
        """What is under way fails; the helper ends. May be called twice."""
        if not self._closed:
            with contextlib.suppress(EngineError):
                await self._ask("stop", deadline_s=STOP_S)
            self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        await self._process.stop(STOP_S)
        if self._reading is not None:
            await self._reading

    # ------------------------------------------------------------ the socket

    async def _begin(self, settings: NixlSettings) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name=f"nixl {settings.name}")
        try:
            answer = await self._ask(
                "start", name=settings.name, pool_fd=self._pool.fd, pool_bytes=self._pool.nbytes,
                backends={name: dict(params) for name, params in settings.backends.items()},
            )  # fmt: skip
        except EngineError as error:
            if "No module named 'nixl" in str(error):
                raise CapabilityError(f"{settings.python} has no NIXL; install it there: {INSTALL}") from error
            raise CapabilityError(
                f"NIXL with {', '.join(settings.backends)} does not start: {error}; {self._process.tail()}"
            ) from error
        self._files_by, self.plugins = answer["files"] or "file", answer["plugins"]

    async def _ask(self, do: str, deadline_s: float = CALL_S, **more: object) -> Message:
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def take(answer: Message) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._send(do, take, **more)
        try:
            async with asyncio.timeout(deadline_s):
                answer = await answered
        except TimeoutError:
            raise EngineError(f"{self._process.name} does not answer {do} within {deadline_s:g} s") from None
        if "error" in answer:
            raise EngineError(f"{self._process.name}: {do}: {answer['error']}")
        return answer

    def _send(self, do: str, take: Callable[[Message], None], **more: object) -> None:
        number = self._next
        self._next += 1
        if self._gone is not None or self._closed or self._writer is None:
            take({"error": f"the helper is gone: {self._gone or 'it was closed'}"})
            return
        try:
            message = pack({"do": do, "id": number, **more})
        except EngineError as error:
            take({"error": str(error)})
            return
        self._waiting[number] = take
        self._writer.write(message)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "it ended"
        try:
            while (message := await read_message(reader)) is not None:
                if "note" in message:
                    self._notes.put_nowait((message["from"], message["note"]))
                elif (take := self._waiting.pop(message["id"], None)) is not None:
                    take(message)
        except EngineError as error:
            why = str(error)
        self._process.kill()  # only then is it sure that nothing moves
        ended = await self._process.wait()
        self._lost(f"{why} (status {ended.code}); {self._process.tail()}")

    def _lost(self, why: str) -> None:
        self._gone = why
        waiting, self._waiting = self._waiting, {}
        for take in waiting.values():
            take({"error": f"the helper is gone: {self._gone}"})

    def _kind(self, moves: Moves) -> tuple[str, str]:
        kinds = {type(one) for one in moves}
        if kinds == {FileMove}:
            return "file", self._files_by
        if kinds == {ObjectMove}:
            return "object", "OBJ"
        if kinds == {PeerMove} and len({one.peer for one in moves if isinstance(one, PeerMove)}) == 1:
            return "peer", "UCX"
        raise ValueError("a transfer moves at least one block, to files, to objects or to one peer")


def _plain(move: FileMove | ObjectMove | PeerMove) -> list[Any]:
    match move:
        case FileMove():
            return [move.at, move.file, move.offset, move.nbytes]
        case ObjectMove():
            return [move.at, move.key, 0, move.nbytes]
        case PeerMove():
            return [move.at, move.peer, move.offset, move.nbytes]
