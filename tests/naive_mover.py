"""A mover over two dictionaries, which fails, hangs and tears as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from executors.pool import HostPool
from executors.transfers import FileMove, Moves, ObjectMove, Op, Transfer


class NaiveMover:
    """`mood` is what becomes of the next transfers: "ok", "fail", "torn" or "nothing" (half or none of it moves, and
    nobody says so), or "hang": it ends when `release` is called, and then in the mood of that time."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.files: list[bytearray] = []
        self.objects: dict[str, bytearray] = {}
        self.mood = "ok"
        self.hanging: list[tuple[Transfer, Op, Moves]] = []
        self.moved = 0

    async def add_file(self, path: Path, nbytes: int) -> int:
        self.files.append(bytearray(nbytes))
        return len(self.files) - 1

    def move(self, op: Op, moves: Moves) -> Transfer:
        transfer = Transfer(self.moved, op, "naive", sum(one.nbytes for one in moves))
        self.moved += 1
        if self.mood == "hang":
            self.hanging.append((transfer, op, moves))
        else:
            self._run(transfer, op, moves)
        return transfer

    def release(self) -> None:
        hanging, self.hanging = self.hanging, []
        for one in hanging:
            self._run(*one)

    async def exist(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.objects for key in keys]

    async def close(self) -> None:
        for transfer, _, _ in self.hanging:
            transfer.fail("closed")

    def _run(self, transfer: Transfer, op: Op, moves: Moves) -> None:
        if self.mood == "fail":
            transfer.fail("as told")
            return
        for one in moves:
            nbytes = {"torn": one.nbytes // 2, "nothing": 0}.get(self.mood, one.nbytes)
            memory = self.pool.span(one.at, nbytes)
            match one:
                case FileMove():
                    there, at = self.files[one.file], one.offset
                case ObjectMove() if op is Op.READ and len(self.objects.get(one.key, b"")) != one.nbytes:
                    transfer.fail("no such object, or a shorter one")
                    return
                case ObjectMove():
                    if op is Op.WRITE:
                        self.objects[one.key] = bytearray(one.nbytes)
                    there, at = self.objects[one.key], 0
                case _:
                    raise NotImplementedError
            if op is Op.READ:
                memory[:] = there[at : at + nbytes]
            else:
                there[at : at + nbytes] = memory
        transfer.succeed(0.0)
