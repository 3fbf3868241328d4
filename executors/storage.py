"""Blocks of KV by the hash of their chain, in host memory, in a file, and in an object store below it.

Policies decide what moves; this carries it out, and makes one promise: what is read is what was put, or nothing. Every
copy carries who it is and a checksum, and is checked whenever it is read. A copy that is damaged, another block's, late
or missing means "compute it again", never an error and never wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from tempfile import mkstemp

from executors.pool import HostPool
from executors.seals import SEAL_BYTES, Sealer
from executors.transfers import FileMove, Mover, Moves, ObjectMove, Op, Transfer, TransferDone, TransferEnd
from policies.cluster.ids import BlockHash, Tier
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen

HOST, DISK, OBJECTS = Tier.G2_HOST, Tier.G3_DISK, Tier.G4_REMOTE


@frozen
class StoreSettings:
    """At most `disk_blocks` blocks lie in a file in `disk_folder`, which has no name once it is open. Objects are named
    `object_prefix` and the hash; None: there is no object store. A transfer that takes longer than `transfer_s` has
    failed.
    """

    disk_folder: Path | None = None
    disk_blocks: int = 0
    object_prefix: str | None = None
    transfer_s: float = 10.0


class Miss(Enum):
    """Why a block has to be computed again."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    LATE = "late"
    FAILED = "failed"
    NO_ROOM = "no_room"


class _Place:
    """Room for one copy: given back when it is dropped and nothing moves in it any more."""

    def __init__(self, number: int, free: Callable[[int], None]) -> None:
        self.number = number
        self._free = free
        self._users = 1

    def use(self) -> None:
        self._users += 1

    def done(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._free(self.number)


class BlockStore:
    """One store over one pool, whose slots are as long as the sealer's. `open` makes one.

    `misses` counts what had to be computed again, by why; `ends` how transfers ended, by direction and tier.
    """

    def __init__(self, settings: StoreSettings, sealer: Sealer, pool: HostPool, mover: Mover) -> None:
        if pool.slot_bytes != sealer.slot_bytes:
            raise ConfigError(
                f"a pool with slots of {pool.slot_bytes} bytes; a block and its seal have {sealer.slot_bytes}"
            )
        self._settings = settings
        self._sealer = sealer
        self._pool = pool
        self._mover = mover
        self._copies: dict[Tier, dict[BlockHash, _Place]] = {HOST: {}, DISK: {}, OBJECTS: {}}
        self._free_disk = list(range(settings.disk_blocks - 1, -1, -1)) if settings.disk_folder is not None else []
        self._file = -1
        self._loads: dict[BlockHash, asyncio.Task[Miss | None]] = {}
        self.misses: Counter[Miss] = Counter()
        self.ends: Counter[tuple[Op, Tier, bool]] = Counter()

    @staticmethod
    async def open(settings: StoreSettings, sealer: Sealer, pool: HostPool, mover: Mover) -> BlockStore:
        """Raises ConfigError for a pool that does not fit, EngineError where the file cannot be made."""
        store = BlockStore(settings, sealer, pool, mover)
        if settings.disk_folder is not None and settings.disk_blocks:
            handle, name = mkstemp(prefix="kv-", dir=settings.disk_folder)
            path = Path(name)
            try:
                with open(handle, "rb"):
                    store._file = await mover.add_file(path, settings.disk_blocks * pool.slot_bytes)
            finally:
                path.unlink()  # what was KV can be turned back into text: it ends with this process
        return store

    # ------------------------------------------------------------ blocks

    def tiers(self, block: BlockHash) -> frozenset[Tier]:
        """Where there is a copy now."""
        return frozenset(tier for tier, copies in self._copies.items() if block in copies)

    def room(self, tier: Tier) -> int | None:
        """How many more blocks fit; None: as many as one likes."""
        return {HOST: self._pool.free, DISK: len(self._free_disk)}.get(tier)

    def put(self, block: BlockHash, payload: bytes | memoryview) -> bool:
        """Keep a block in host memory; False where there is no room. Raises ValueError for one of another length."""
        if block in self._copies[HOST]:
            return True
        place = self._host_place()
        if place is None:
            return False
        try:
            self._sealer.write(self._pool.view(place.number), block, payload)
        except ValueError:
            place.done()
            raise
        self._copies[HOST][block] = place
        return True

    async def get(self, block: BlockHash, deadline_s: float) -> bytes | None:
        """The bytes that were put; None where they have to be computed again. A block of a lower tier is brought up
        first; if that takes longer than `deadline_s` it goes on, and may serve the next who asks."""
        missed = None
        if block not in self._copies[HOST]:
            missed = await self._brought_up(block, deadline_s)
        found = self._read(block) if missed is None else missed
        if isinstance(found, Miss):
            self.misses[found] += 1
            return None
        return found

    # ------------------------------------------------------------ between tiers

    async def offload(self, block: BlockHash, to: Tier) -> TransferEnd | None:
        """Copy a block from host memory down; None where it is not there, is there already, or has no room. Raises
        CapabilityError for a tier that this store does not have."""
        self._check(to)
        source = self._copies[HOST].get(block)
        target = self._place(to) if source is not None and block not in self._copies[to] else None
        if source is None or target is None:
            return None
        end = await self._moved(Op.WRITE, block, source, to, target)
        if isinstance(end, TransferDone) and block not in self._copies[to]:
            self._copies[to][block] = target
        else:
            target.done()
        return end

    async def onboard(self, block: BlockHash, deadline_s: float) -> Miss | None:
        """Bring a block up to host memory; None: it is there."""
        return None if block in self._copies[HOST] else await self._brought_up(block, deadline_s)

    def evict(self, block: BlockHash, tier: Tier) -> bool:
        """Drop a copy; its room is free when nothing moves there any more. False where there was none. The bytes of an
        object stay in its store until `erase`."""
        place = self._copies[tier].pop(block, None)
        if place is not None:
            place.done()
        return place is not None

    async def erase(self, block: BlockHash) -> TransferEnd | None:
        """Overwrite a block's object, which no mover can delete, with a short one that holds nothing; None where there
        is no room for that in host memory."""
        self._check(OBJECTS)
        self.evict(block, OBJECTS)
        place = self._host_place()
        if place is None:
            return None
        self._pool.view(place.number)[:SEAL_BYTES] = bytes(SEAL_BYTES)
        move = ObjectMove(self._pool.offset(place.number), self._key(block), SEAL_BYTES)
        end = await self._ended(self._mover.move(Op.WRITE, [move]), OBJECTS, place)
        place.done()
        return end

    async def find_objects(self, blocks: list[BlockHash]) -> int:
        """Learn which of these blocks others have put into the object store; how many. Raises EngineError."""
        self._check(OBJECTS)
        there = await self._mover.exist([self._key(block) for block in blocks])
        found = [block for block, is_there in zip(blocks, there, strict=True) if is_there]
        for block in found:
            self._copies[OBJECTS].setdefault(block, _Place(0, _no_room_to_free))
        return len(found)

    async def close(self) -> None:
        """Wait for what is being brought up. The mover and the pool are closed behind this, by who made them."""
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    # ------------------------------------------------------------ one block on its way

    async def _brought_up(self, block: BlockHash, deadline_s: float) -> Miss | None:
        load = self._loads.get(block)
        if load is None:
            load = asyncio.get_running_loop().create_task(self._load(block))
            self._loads[block] = load
            load.add_done_callback(lambda _: self._loads.pop(block))
        done, _ = await asyncio.wait({load}, timeout=deadline_s)
        return load.result() if done else Miss.LATE

    async def _load(self, block: BlockHash) -> Miss | None:
        """From the highest tier that has it; a copy that cannot be read is dropped, and the next one tried."""
        missed = Miss.ABSENT
        for tier in (DISK, OBJECTS):
            source = self._copies[tier].get(block)
            if source is None:
                continue
            target = self._host_place()
            if target is None:
                return Miss.NO_ROOM
            self._sealer.blank(self._pool.view(target.number))
            end = await self._moved(Op.READ, block, target, tier, source)
            if isinstance(end, TransferDone) and self._is(block, target):
                if block in self._copies[HOST]:
                    target.done()
                else:
                    self._copies[HOST][block] = target
                return None
            target.done()
            if not isinstance(end, TransferDone) and end.late:
                return Miss.LATE
            missed = Miss.DAMAGED if isinstance(end, TransferDone) else Miss.FAILED
            if self._copies[tier].get(block) is source:
                self.evict(block, tier)
        return missed

    async def _moved(self, op: Op, block: BlockHash, host: _Place, tier: Tier, below: _Place) -> TransferEnd:
        at, nbytes = self._pool.offset(host.number), self._pool.slot_bytes
        moves: Moves
        if tier is DISK:
            moves = [FileMove(at, self._file, below.number * nbytes, nbytes)]
        else:
            moves = [ObjectMove(at, self._key(block), nbytes)]
        return await self._ended(self._mover.move(op, moves), tier, host, below)

    async def _ended(self, transfer: Transfer, tier: Tier, *places: _Place) -> TransferEnd:
        """How it ended; the places stay taken until nothing touches them, which may be later."""

        def free(_: object) -> None:
            for place in places:
                place.done()

        for place in places:
            place.use()
        transfer.settled.add_done_callback(free)
        end = await transfer.end(self._settings.transfer_s)
        self.ends[transfer.op, tier, isinstance(end, TransferDone)] += 1
        return end

    def _is(self, block: BlockHash, place: _Place) -> bool:
        return self._sealer.read(self._pool.view(place.number), block) is not None

    def _read(self, block: BlockHash) -> bytes | Miss:
        place = self._copies[HOST].get(block)
        if place is None:
            return Miss.ABSENT
        payload = self._sealer.read(self._pool.view(place.number), block)
        if payload is None:
            self.evict(block, HOST)
            return Miss.DAMAGED
        return payload

    # ------------------------------------------------------------ room

    def _host_place(self) -> _Place | None:
        slot = self._pool.take()
        return None if slot is None else _Place(slot, self._pool.give_back)

    def _place(self, tier: Tier) -> _Place | None:
        if tier is OBJECTS:
            return _Place(0, _no_room_to_free)
        with suppress(IndexError):
            return _Place(self._free_disk.pop(), self._free_disk.append)
        return None

    def _check(self, tier: Tier) -> None:
        there = {DISK: self._file >= 0, OBJECTS: self._settings.object_prefix is not None}
        if not there.get(tier, False):
            raise CapabilityError(f"this store keeps no blocks in {tier.value}; set disk_folder or object_prefix")

    def _key(self, block: BlockHash) -> str:
        return f"{self._settings.object_prefix}/{self._sealer.namespace:016x}/{block:016x}"


def _no_room_to_free(_: int) -> None:
    """An object store has no places."""
