"""The few calls of etcd v3 that discovery needs, through the JSON gateway that every etcd has: no client library.

Keys and values go as base64, 64-bit numbers as texts. Every call has a deadline. Several servers are tried in turn,
from the one that answered last. Credentials are not supported: run etcd where only the cluster reaches it.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from executors.discovery.protocol import StoreError
from policies.errors import CapabilityError
from policies.frozen import frozen

CALL_S: Final = 3.0
"""How long one call may take. A server that does not answer within it is treated as one that is gone."""


@frozen
class KeyValue:
    """An entry of the store."""

    key: str
    value: bytes


class EtcdClient:
    """`servers` are base addresses (http://host:2379). Made and used within one event loop."""

    def __init__(self, servers: Sequence[str], call_s: float = CALL_S) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise CapabilityError("discovery by etcd needs aiohttp: pip install 'dynatwin[live]'") from error
        self._aiohttp = aiohttp
        self._servers = list(servers)
        self._call_s = call_s
        self._session: Any = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------ leases

    async def grant(self, lease_s: int) -> str:
        """A new lease of that many seconds; its id. The server may give a longer one."""
        return str((await self._call("/v3/lease/grant", {"TTL": str(lease_s)}))["ID"])

    async def keep_alive(self, lease: str) -> bool:
        """Renew; False where the lease is over."""
        answer = await self._call("/v3/lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: str) -> None:
        """End a lease, and with it its entries. Nothing happens where it is over already."""
        await self._call("/v3/lease/revoke", {"ID": lease}, missing_ok=True)

    # ------------------------------------------------------------ entries

    async def put(self, key: str, value: bytes, lease: str) -> None:
        await self._call("/v3/kv/put", _put(key, value, lease), missing_ok=False)

    async def create(self, key: str, value: bytes, lease: str) -> bool:
        """Put, unless another lease has the key; whether it is there now under this one. (A call whose answer was lost
        is made again at the next server, and finds its own entry.)"""
        body = {
            "compare": [{"key": _coded(key), "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": _put(key, value, lease)}],
        }
        if (await self._call("/v3/kv/txn", body)).get("succeeded"):
            return True
        there = await self._call("/v3/kv/range", {"key": _coded(key)})
        return [kv.get("lease") for kv in there.get("kvs", [])] == [lease]

    async def swap(self, key: str, before: bytes | None, value: bytes) -> bool:
        """Put without a lease, where the entry is still `before` (None: is not there); whether it is `value` now. (A
        call whose answer was lost is made again at the next server, and finds its own entry.)"""
        guard = (
            {"key": _coded(key), "target": "CREATE", "create_revision": "0"}
            if before is None
            else {"key": _coded(key), "target": "VALUE", "value": _coded(before)}
        )
        body = {
            "compare": [guard],
            "success": [{"request_put": _put(key, value, "0")}],
            "failure": [{"request_range": {"key": _coded(key)}}],
        }
        answer = await self._call("/v3/kv/txn", body)
        if answer.get("succeeded"):
            return True
        there = answer["responses"][0].get("response_range", {}).get("kvs", [])
        return [kv.get("value", "") for kv in there] == [_coded(value)]

    async def entries(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All entries below a prefix, and the revision as of which."""
        answer = await self._call("/v3/kv/range", _range(prefix))
        found = [
            KeyValue(key=base64.b64decode(kv["key"]).decode(), value=base64.b64decode(kv.get("value", "")))
            for kv in answer.get("kvs", [])
        ]
        return found, int(answer["header"]["revision"])

    async def changes(self, prefix: str, revision: int, idle_s: float) -> AsyncGenerator[None, None]:
        """One item whenever entries below a prefix changed since `revision`, and after `idle_s` seconds without.

        Raises StoreError when the server goes, or has forgotten that revision.
        """
        body = {"create_request": {**_range(prefix), "start_revision": str(revision)}}
        aiohttp = self._aiohttp
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._call_s)
        try:
            async with self._open().post(f"{self._servers[0]}/v3/watch", json=body, timeout=limits) as response:
                reading = None
                try:
                    while True:
                        reading = reading or asyncio.ensure_future(response.content.readline())
                        done, _ = await asyncio.wait({reading}, timeout=idle_s)
                        if done:
                            news, reading = _news(reading.result()), None
                            if not news:
                                continue
                        yield
                finally:
                    if reading is not None:
                        reading.cancel()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise StoreError(f"etcd at {self._servers[0]}: {_said(error)}") from error

    async def _call(self, path: str, body: Mapping[str, object], *, missing_ok: bool = False) -> dict[str, Any]:
        aiohttp = self._aiohttp
        limits = aiohttp.ClientTimeout(total=self._call_s)
        trouble = []
        for server in list(self._servers):
            try:
                async with self._open().post(server + path, json=body, timeout=limits) as response:
                    answer: dict[str, Any] = json.loads(await response.read() or b"{}")
                    if response.status == 200 or (missing_ok and response.status == 404):
                        return answer
                    trouble.append(f"{server}: {response.status} {answer.get('message') or answer.get('error')}")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                trouble.append(f"{server}: {_said(error)}")
            self._servers.append(self._servers.pop(0))
        raise StoreError(f"etcd {path}: {'; '.join(trouble)}")

    def _open(self) -> Any:
        if self._session is None:
            self._session = self._aiohttp.ClientSession()
        return self._session


def _said(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _coded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _put(key: str, value: bytes, lease: str) -> dict[str, object]:
    return {"key": _coded(key), "value": _coded(value), "lease": lease}


def _range(prefix: str) -> dict[str, object]:
    """All keys that begin with a prefix that ends with "/"; "0" is the character behind it."""
    return {"key": _coded(prefix), "range_end": _coded(prefix[:-1] + "0")}


def _news(line: bytes) -> bool:
    """Whether a line of a watch tells of changes. Raises ValueError where the watch is over."""
    if not line:
        raise ValueError("the watch was closed")
    told = json.loads(line)
    result = told.get("result")
    if result is None or result.get("canceled"):
        raise ValueError(f"the watch was cancelled: {told.get('error') or result}")
    return bool(result.get("events"))
