"""Moves by plain system calls, where there is no NIXL: files, and a folder that stands for an object store.

A few threads do the calls, since a disk may hang; an object appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from executors.pool import HostPool
from executors.transfers import FileMove, Moves, ObjectMove, Op, PeerMove, Transfer
from policies.errors import EngineError

THREADS: Final = 4


class PlainMover:
    """`objects` is the folder of the object store; None: there is none."""

    def __init__(self, pool: HostPool, objects: Path | None = None) -> None:
        self._pool = pool
        self._objects = objects
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-moves")
        self._files: list[int] = []
        self._open: set[asyncio.Future[None]] = set()
        self._next = 0
        self._closed = False

    async def add_file(self, path: Path, nbytes: int) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files.append(fd)
            os.ftruncate(fd, nbytes)
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror}") from error
        return len(self._files) - 1

    def move(self, op: Op, moves: Moves) -> Transfer:
        transfer = Transfer(self._next, op, "plain", sum(one.nbytes for one in moves))
        self._next += 1
        if self._closed:
            transfer.fail("the mover is closed")
            return transfer
        start = time.perf_counter()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._run, op, moves)
        self._open.add(work)

        def over(work: asyncio.Future[None]) -> None:
            self._open.discard(work)
            error = work.exception()
            if error is None:
                transfer.succeed(time.perf_counter() - start)
            else:
                transfer.fail(str(error))

        work.add_done_callback(over)
        return transfer

    async def exist(self, keys: Sequence[str]) -> list[bool]:
        return [self._object(key).exists() for key in keys]

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.gather(*self._open, return_exceptions=True)
            self._threads.shutdown()
            for fd in self._files:
                os.close(fd)

    def _run(self, op: Op, moves: Moves) -> None:
        for one in moves:
            memory = self._pool.span(one.at, one.nbytes)
            match one:
                case FileMove() if op is Op.READ:
                    moved = os.preadv(self._files[one.file], [memory], one.offset)
                case FileMove():
                    moved = os.pwrite(self._files[one.file], memory, one.offset)
                case ObjectMove() if op is Op.READ:
                    with self._object(one.key).open("rb") as source:
                        moved = source.readinto(memory)
                case ObjectMove():
                    moved = self._put(self._object(one.key), memory)
                case PeerMove():
                    raise EngineError("moves between processes need NIXL")
            if moved != one.nbytes:
                raise EngineError(f"{moved} of {one.nbytes} bytes moved")

    def _put(self, path: Path, memory: memoryview) -> int:
        draft = path.with_name(f".{path.name}.{self._next}")
        draft.write_bytes(memory)
        draft.replace(path)
        return len(memory)

    def _object(self, key: str) -> Path:
        if self._objects is None:
            raise EngineError("there is no object store")
        return self._objects / urllib.parse.quote(key, safe="")
