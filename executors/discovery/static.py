"""Workers from a file that a person keeps: `[[workers]]` tables of TOML. Nobody registers, nobody's lease runs out.

The file is read again when it changes; while it cannot be read, the last list stands.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Final

from executors.discovery.protocol import LEASE_S, Registration, Watch
from executors.discovery.record import WorkerRecord, from_plain
from policies.errors import CapabilityError, ConfigError

LOOK_S: Final = 1.0


class StaticDiscovery:
    """`look_s`: how often the file is looked at."""

    def __init__(self, path: Path, look_s: float = LOOK_S) -> None:
        self._path = path
        self._look_s = look_s
        self.name = str(path)

    async def register(self, record: WorkerRecord, lease_s: float = LEASE_S) -> Registration:
        raise CapabilityError(
            f"{self._path} is a list that people keep: add {record.name} to it, or use a folder or etcd for discovery"
        )

    def watch(self) -> Watch:
        return Watch(self._follow, grace_s=0.0)

    async def close(self) -> None:
        pass

    async def _follow(self, watch: Watch) -> None:
        seen = _signature(self._path)
        watch.told(read_workers(self._path), {})
        while True:
            await asyncio.sleep(self._look_s)
            now = _signature(self._path)
            if now == seen and watch.stale is None:
                continue
            try:
                watch.told(read_workers(self._path), {})
                seen = now
            except ConfigError as error:
                watch.lost_sight(str(error))


def read_workers(path: Path) -> list[WorkerRecord]:
    """The workers of a file. Raises ConfigError with file, number and key; also for a name or address given twice."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    workers = tables.get("workers")
    if set(tables) != {"workers"} or not isinstance(workers, list):
        raise ConfigError(
            f"{path}: holds [[workers]] tables and nothing else, not {', '.join(sorted(tables)) or 'none'}"
        )
    records = [
        from_plain(
            {"incarnation": 0, **table} if isinstance(table, dict) else table, f"{path}: worker {n}", strict=True
        )
        for n, table in enumerate(workers, start=1)
    ]
    for key in ("name", "url"):
        values = [getattr(record, key) for record in records]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{path}: {key} = {twice!r} is given to {values.count(twice)} workers; each needs its own"
            )
    return records


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
