"""Workers in etcd: one key for each life of a worker, bound to a lease that the worker keeps alive.

A change only says that the list is to be read again, and the list is read again without one every few seconds: nothing
can be missed for longer, whatever became of the watch.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Final

from executors.discovery.etcd_client import EtcdClient, KeyValue
from executors.discovery.protocol import LEASE_S, Registration, StoreError, Watch
from executors.discovery.record import WorkerRecord, read_entry, write_entry
from policies.errors import ConfigError

IDLE_S: Final = 3.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0


class EtcdDiscovery:
    """`prefix` is the folder of keys of one cluster, such as /dynatwin/workers/."""

    def __init__(self, client: EtcdClient, prefix: str, name: str) -> None:
        if not prefix.startswith("/") or not prefix.endswith("/") or prefix == "/":
            raise ConfigError(f"prefix {prefix!r} of etcd begins and ends with a slash and has a name between")
        self._client = client
        self._prefix = prefix
        self.name = name

    async def register(self, record: WorkerRecord, lease_s: float = LEASE_S) -> Registration:
        return await _Key(self._client, self._prefix, record, lease_s).begin()

    def watch(self) -> Watch:
        return Watch(self._follow, grace_s=LEASE_S)

    async def close(self) -> None:
        await self._client.close()

    async def _follow(self, watch: Watch) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                revision = await self._list(watch)
                async with aclosing(self._client.changes(self._prefix, revision + 1, IDLE_S)) as changes:
                    async for _ in changes:
                        await self._list(watch)
                        retry_s = FIRST_RETRY_S
            except StoreError as error:
                watch.lost_sight(str(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _list(self, watch: Watch) -> int:
        entries, revision = await self._client.entries(self._prefix)
        skipped: dict[str, str] = {}
        watch.told([record for entry in entries for record in _read(entry, skipped)], skipped)
        return revision


class _Key(Registration):
    """One key and its lease."""

    def __init__(self, client: EtcdClient, prefix: str, record: WorkerRecord, lease_s: float) -> None:
        super().__init__(record, lease_s)
        self._client = client
        self._key = f"{prefix}{record.name}/{record.incarnation}"
        self._lease = ""

    async def _create(self) -> None:
        self._lease = await self._grant()
        if not await self._client.create(self._key, self._value(), self._lease):
            await self._client.revoke(self._lease)
            raise ConfigError(
                f"etcd has {self._key} already: worker {self.record.name} is registered with this incarnation"
            )

    async def _write(self) -> None:
        await self._client.put(self._key, self._value(), self._lease)

    async def _renew(self) -> None:
        if not await self._client.keep_alive(self._lease):
            self._lease = await self._grant()
            await self._write()

    async def _remove(self) -> None:
        await self._client.revoke(self._lease)

    async def _grant(self) -> str:
        return await self._client.grant(max(1, math.ceil(self.lease_s)))

    def _value(self) -> bytes:
        return write_entry(self.record, self.lease_s)


def _read(entry: KeyValue, skipped: dict[str, str]) -> list[WorkerRecord]:
    try:
        return [read_entry(entry.value, entry.key)[0]]
    except ConfigError as error:
        skipped[entry.key] = str(error)
        return []
