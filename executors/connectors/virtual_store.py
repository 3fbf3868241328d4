"""Where a planner's decisions lie for whoever scales by them: two small JSON texts, in a folder or in etcd.

`decision` is `{"decision_id": 3, "num_prefill": 2, "num_decode": 4}`, -1 where nobody says; `completed` is
`{"completed_id": 3}`, written by the client once that decision is so. Each is written whole or not at all, and a
decision only over the one that its writer has seen: of two planners one is told that it is not alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from executors.discovery.protocol import StoreError
from policies.errors import ConfigError
from policies.frozen import frozen

if TYPE_CHECKING:
    from executors.discovery.etcd_client import EtcdClient

T = TypeVar("T")

PREFIX: Final = "/dynatwin/planner/"
DECISION, COMPLETED = "decision", "completed"
NOT_SET: Final = -1


@frozen
class VirtualDecision:
    """How many workers there are to be (None: not set). `decision_id` rises by 1 with each."""

    decision_id: int
    num_prefill: int | None
    num_decode: int | None


class DecisionStore(Protocol):
    """Its calls raise StoreError where the store does not answer, ConfigError where its text is none of ours."""

    name: str

    async def read(self, key: str) -> bytes | None:
        """A text; None where there is none."""
        ...

    async def swap(self, key: str, before: bytes | None, value: bytes) -> bool:
        """Write a text over `before` (None: there was none); False where something else is there."""
        ...

    async def close(self) -> None: ...


def open_store(where: str) -> DecisionStore:
    """`etcd://host:2379[,host:2379][/prefix]` (etcds: over TLS), or a folder that is there. Raises ConfigError."""
    scheme, has_scheme, _ = where.partition("://")
    if not has_scheme:
        return FolderStore(Path(where))
    parts = urlsplit(where)
    if scheme not in ("etcd", "etcds") or not parts.netloc or "@" in parts.netloc:
        raise ConfigError(f"planner.virtual.store = {where!r}: write etcd://host:2379 without a user, or a folder")
    from executors.discovery.etcd_client import EtcdClient

    web = "https" if scheme == "etcds" else "http"
    client = EtcdClient([f"{web}://{server}" for server in parts.netloc.split(",")])
    prefix = f"/{parts.path.strip('/')}/" if parts.path.strip("/") else PREFIX
    return EtcdStore(client, prefix, f"etcd at {parts.netloc}")


async def read_decision(store: DecisionStore) -> tuple[VirtualDecision | None, bytes | None]:
    """The last decision, and its text."""
    text = await store.read(DECISION)
    if text is None:
        return None, None
    plain = _plain(text, f"{store.name}: {DECISION}", ("decision_id", "num_prefill", "num_decode"))
    return (
        VirtualDecision(
            decision_id=plain["decision_id"],
            num_prefill=None if plain["num_prefill"] == NOT_SET else plain["num_prefill"],
            num_decode=None if plain["num_decode"] == NOT_SET else plain["num_decode"],
        ),
        text,
    )


def decision_text(decision: VirtualDecision) -> bytes:
    """As it lies in the store."""
    counts = {"num_prefill": decision.num_prefill, "num_decode": decision.num_decode}
    plain = {"decision_id": decision.decision_id, **{k: NOT_SET if n is None else n for k, n in counts.items()}}
    return json.dumps(plain).encode()


async def read_completed(store: DecisionStore) -> int | None:
    """The number of the last decision that its client has completed."""
    text = await store.read(COMPLETED)
    if text is None:
        return None
    completed: int = _plain(text, f"{store.name}: {COMPLETED}", ("completed_id",))["completed_id"]
    return completed


async def complete(store: DecisionStore, decision_id: int) -> None:
    """The client's side: that decision is so."""
    text = json.dumps({"completed_id": decision_id}).encode()
    before = await store.read(COMPLETED)
    if not await store.swap(COMPLETED, before, text):
        raise StoreError(f"{store.name}: another client has just written {COMPLETED}; run one")


def _plain(text: bytes, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    try:
        plain = json.loads(text)
        found = {key: plain[key] for key in keys}
    except (ValueError, TypeError, KeyError) as error:
        shown = text[:60].decode(errors="replace")
        raise ConfigError(
            f"{where} is {shown!r} and not a JSON object with {', '.join(keys)} ({type(error).__name__}); remove it, "
            "or name another store"
        ) from error
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < NOT_SET:
            raise ConfigError(f"{where}: {key} = {value!r} is not a whole number of {NOT_SET} or more")
    return found


class FolderStore:
    """Files `decision.json` and `completed.json`, each replaced as a whole. Of two planners that write in the same
    instant one may overwrite the other's: etcd does not let them."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"planner.virtual.store = {str(folder)!r} is no folder; make it where its client sees it")
        self._folder = folder
        self.name = f"folder {folder}"

    async def read(self, key: str) -> bytes | None:
        return await asyncio.to_thread(_stored, lambda: self._read_now(key))

    async def swap(self, key: str, before: bytes | None, value: bytes) -> bool:
        return await asyncio.to_thread(_stored, lambda: self._swap_now(key, before, value))

    async def close(self) -> None:
        """Nothing is open."""

    def _read_now(self, key: str) -> bytes | None:
        try:
            return (self._folder / f"{key}.json").read_bytes()
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise
            return None

    def _swap_now(self, key: str, before: bytes | None, value: bytes) -> bool:
        if self._read_now(key) != before:
            return False
        draft = self._folder / f".{key}.{os.getpid()}"
        draft.write_bytes(value)
        os.replace(draft, self._folder / f"{key}.json")
        return True


def _stored(act: Callable[[], T]) -> T:
    try:
        return act()
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}") from error


class EtcdStore:
    """Keys below `prefix`, without a lease: they outlast whoever wrote them."""

    def __init__(self, client: EtcdClient, prefix: str, name: str) -> None:
        self._client = client
        self._prefix = prefix
        self.name = name

    async def read(self, key: str) -> bytes | None:
        entries, _ = await self._client.entries(self._prefix)
        return next((entry.value for entry in entries if entry.key == self._prefix + key), None)

    async def swap(self, key: str, before: bytes | None, value: bytes) -> bool:
        return await self._client.swap(self._prefix + key, before, value)

    async def close(self) -> None:
        await self._client.close()
