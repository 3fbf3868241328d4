"""Workers in a folder that their hosts share: one JSON file each, whose modification time is the heartbeat.

A file appears whole or not at all. A watcher judges a lease by its own clock: a heartbeat is a time that *moved*, so
clocks of hosts need not agree. A file that looks old when it is first seen counts once it moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executors.discovery.protocol import LEASE_S, Registration, StoreError, Watch
from executors.discovery.record import WorkerRecord, read_entry, write_entry
from policies.errors import ConfigError

LOOK_S: Final = 0.5
SUFFIX: Final = ".json"


class FolderDiscovery:
    """`look_s`: how often the folder is looked at. Raises ConfigError where there is no such folder."""

    def __init__(self, folder: Path, look_s: float = LOOK_S) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; make it where all hosts see it")
        self._folder = folder
        self._look_s = look_s
        self.name = f"folder {folder}"

    async def register(self, record: WorkerRecord, lease_s: float = LEASE_S) -> Registration:
        return await _Entry(self._folder, record, lease_s).begin()

    def watch(self) -> Watch:
        return Watch(self._follow, grace_s=LEASE_S)

    async def close(self) -> None:
        pass

    async def _follow(self, watch: Watch) -> None:
        look = _Look(self._folder)
        while True:
            now_s = asyncio.get_running_loop().time()
            try:
                records = await asyncio.to_thread(look.live, now_s, watch.stale is not None)
                watch.told(records, look.skipped)
            except OSError as error:
                watch.lost_sight(f"{self._folder}: {error.strerror}")
            await asyncio.sleep(self._look_s)


@dataclass(slots=True)
class _File:
    """`moved_s`: when its heartbeat last moved, on our clock; None for one that was old when it was first seen."""

    inode: int
    mtime_ns: int
    moved_s: float | None
    record: WorkerRecord
    lease_s: float


class _Look:
    """What a watcher knows of the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self.skipped: dict[str, str] = {}

    def live(self, now_s: float, was_away: bool) -> list[WorkerRecord]:
        """The workers whose lease has not run out. Raises OSError where the folder cannot be read."""
        there = {}
        skipped = {}
        for entry in list(os.scandir(self._folder)):
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                try:
                    there[entry.name] = self._look(entry, now_s)
                except FileNotFoundError:
                    continue
                except ConfigError as error:
                    skipped[entry.name] = str(error)
        if was_away:
            for file in there.values():
                file.moved_s = now_s
        self._files, self.skipped = there, skipped
        return [f.record for f in there.values() if f.moved_s is not None and now_s - f.moved_s <= f.lease_s]

    def _look(self, entry: os.DirEntry[str], now_s: float) -> _File:
        found = os.stat(entry.path)
        known = self._files.get(entry.name)
        if known is not None and known.inode == found.st_ino:
            if known.mtime_ns != found.st_mtime_ns:
                known.mtime_ns, known.moved_s = found.st_mtime_ns, now_s
            return known
        record, lease_s = read_entry(Path(entry.path).read_bytes(), entry.path)
        age_s = max(0.0, time.time() - found.st_mtime)
        moved_s = now_s - age_s if known is None else now_s
        fresh = moved_s if now_s - moved_s <= lease_s else None
        return _File(found.st_ino, found.st_mtime_ns, fresh, record, lease_s)


class _Entry(Registration):
    """One file. Its older lives are removed; a newer one ends it."""

    def __init__(self, folder: Path, record: WorkerRecord, lease_s: float) -> None:
        super().__init__(record, lease_s)
        self._folder = folder
        self._path = folder / f"{record.name}@{record.incarnation}{SUFFIX}"

    async def _create(self) -> None:
        await asyncio.to_thread(_store, self._create_now)

    async def _write(self) -> None:
        await asyncio.to_thread(_store, self._write_now)

    async def _renew(self) -> None:
        await asyncio.to_thread(_store, self._renew_now)

    async def _remove(self) -> None:
        await asyncio.to_thread(_store, lambda: self._path.unlink(missing_ok=True))

    def _create_now(self) -> None:
        draft = self._draft()
        try:
            os.link(draft, self._path)
        except FileExistsError:
            raise ConfigError(
                f"{self._path} is there already: worker {self.record.name} is registered with this incarnation"
            ) from None
        finally:
            draft.unlink()
        for path, incarnation in self._lives():
            if incarnation < self.record.incarnation:
                path.unlink(missing_ok=True)

    def _write_now(self) -> None:
        os.replace(self._draft(), self._path)

    def _renew_now(self) -> None:
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self.superseded = any(incarnation > self.record.incarnation for _, incarnation in self._lives())
            if not self.superseded:
                self._write_now()

    def _draft(self) -> Path:
        draft = self._folder / f".{self._path.name}.{os.getpid()}"
        draft.write_bytes(write_entry(self.record, self.lease_s))
        return draft

    def _lives(self) -> list[tuple[Path, int]]:
        lives = []
        for path in self._folder.glob(f"{self.record.name}@*{SUFFIX}"):
            with contextlib.suppress(ValueError):
                lives.append((path, int(path.name[len(self.record.name) + 1 : -len(SUFFIX)])))
        return lives


def _store(act: Callable[[], None]) -> None:
    try:
        act()
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}") from error
