"""`twin worker` and two `twin serve` that find its workers, as processes of their own: they share their bookings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fake_engines import FakeVllm
from fake_vllm_server import BLOCK, MODEL, checkpoint, interpreter

from executors.discovery.folder import FolderDiscovery
from executors.discovery.protocol import Left
from executors.discovery.record import WorkerRecord, fingerprint_of
from policies.cluster.ids import Role

LIMIT_S = 120.0
CONFIG = f"""
[[workers]]
name = "pool"
count = 2

[workers.engine]
block_size = {BLOCK}
prefix_caching = false

[router]
mode = "kv"
use_kv_events = false
tie_break = "lowest_id"
"""


@asynccontextmanager
async def running(*line: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """A `twin` command, ended by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twin", *line, "--quiet", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def told(lines: asyncio.StreamReader, key: str) -> str:
    async for line in lines:
        found = json.loads(line)
        if key in found:
            return str(found[key])
    raise AssertionError(f"it ended before it said {key!r}")


async def answered_by(session: aiohttp.ClientSession, address: str) -> str:
    """Who answers one more prompt, which is unlike any before."""
    prompt = " ".join("abc"[byte % 3] for byte in os.urandom(100))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    async with session.get(f"{address}/debug/decisions?n=1") as answer:
        return str((await answer.json())["decisions"][0]["worker"])


def test_two_frontends_count_each_others_requests(tmp_path: Path) -> None:
    config, store, model = tmp_path / "c.toml", tmp_path / "store", checkpoint(tmp_path)
    config.write_text(CONFIG, encoding="utf-8")
    store.mkdir()
    line = (
        "serve", "--live", "--config", str(config), "--tokenizer", str(model), "--discovery", str(store), "--peers",
        str(store), "--port", "0", "--grace", "0", "--drain", "0", "--debug-endpoints",
    )  # fmt: skip

    async def play(stack: AsyncExitStack) -> None:
        servers = {}
        for name in ("w0", "w1"):
            servers[name] = await stack.enter_async_context(FakeVllm())
            record = WorkerRecord(
                name=name, incarnation=1, engine="vllm", url=servers[name].url, role=Role.MIXED, group="pool",
                block_size=BLOCK, fingerprint=fingerprint_of(model),
            )  # fmt: skip
            entry = await FolderDiscovery(store).register(record, lease_s=LIMIT_S)
            stack.push_async_callback(entry.deregister)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        addresses = []
        for _ in range(2):
            _, lines = await stack.enter_async_context(running(*line))
            addresses.append(await told(lines, "ready"))
        a, b = addresses
        for address in addresses:  # until both know both workers
            while True:
                async with session.get(f"{address}/debug/state") as answer:
                    if len((await answer.json())["workers"]) == 2:
                        break
        usual = await answered_by(session, b)
        assert await answered_by(session, b) == usual, "equals go to the lowest number"
        for server in servers.values():
            server.does = "hang"
            server.asked.clear()
        body = {"model": MODEL, "prompt": "a b c " * 40, "max_tokens": 1}
        asked = [asyncio.ensure_future(session.post(f"{a}/v1/completions", json=body)) for _ in range(1)]
        first, _ = await asyncio.wait(
            {asyncio.ensure_future(server.asked.wait()): name for name, server in servers.items()},
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert first
        if not servers[usual].asked.is_set():  # the next one goes there, since the other has one
            other = asyncio.ensure_future(session.post(f"{a}/v1/completions", json=body | {"prompt": "b c " * 50}))
            await servers[usual].asked.wait()
            asked[0].cancel()
            asked = [other]
        for server in servers.values():
            server.does = "answer"
        while await answered_by(session, b) == usual:
            pass  # until b has heard
        asked[0].cancel()
        while await answered_by(session, b) != usual:
            pass  # until b has heard that its client left

    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            await play(stack)

    asyncio.run(test())


def test_twin_worker_serves_a_frontend_until_it_is_told_to_end(tmp_path: Path) -> None:
    config, store, model = tmp_path / "c.toml", tmp_path / "store", checkpoint(tmp_path)
    config.write_text(CONFIG, encoding="utf-8")
    store.mkdir()
    common = ("--config", str(config), "--discovery", str(store))

    async def play(stack: AsyncExitStack) -> None:
        hosting = (
            "worker", *common, "--count", "1", "--checkpoint", str(model), "--name", "h1", "--grace", "0",
            "--python", f"vllm={interpreter(tmp_path)}", "--logs", str(tmp_path / "logs"),
        )  # fmt: skip
        process, lines = await stack.enter_async_context(running(*hosting))
        assert await told(lines, "registered") == "h1-pool-0"
        serving = ("serve", "--live", *common, "--tokenizer", str(model), "--port", "0", "--debug-endpoints")
        _, lines = await stack.enter_async_context(running(*serving, "--grace", "0"))
        address = await told(lines, "ready")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        assert await answered_by(session, address) == "h1-pool-0"
        watch = FolderDiscovery(store).watch()
        await anext(watch)
        process.send_signal(signal.SIGTERM)
        while not isinstance(await anext(watch), Left):
            pass
        assert await process.wait() == 0
        await watch.close()
        ready = 200
        while ready == 200:
            async with session.get(f"{address}/ready") as answer:
                ready = answer.status
        assert ready == 503

    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            await play(stack)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ((), "twin worker needs --config"),
        (("--discovery", "w.toml"), "a file of workers is kept by people"),
        (("--discovery", "store", "--group", "none"), "--group none: there is no such group; there are pool"),
        (("--discovery", "nowhere"), "nowhere is no folder; make it where all hosts see it"),
        (("--discovery", "store", "--host", "0.0.0.0"), "frontends cannot reach that"),
        (("--discovery", "store", "--drain", "-1"), '--drain: resilience.drain_timeout_s = "-1": must be 0 or more'),
    ],
)
def test_a_line_of_twin_worker_that_means_nothing_is_refused(twin, line: tuple[str, ...], text: str, tmp_path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(CONFIG, encoding="utf-8")
    given = ("--config", str(config), "--checkpoint", str(tmp_path), *line) if line else ()
    done = twin("worker", *given)
    assert done.code == 2
    assert text in done.complaint


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("--discovery", "x"), "--discovery has no effect without --live"),
        (("--peers", "x"), "--peers has no effect without --live"),
        (("--live", "--tokenizer", "x", "--peer-listen", "h:1"), "--peer-listen has no effect without --peers"),
        (("--live", "--tokenizer", "x", "--peer-key", "k"), "--peer-key has no effect without --peers"),
        (("--live", "--tokenizer", "x"), "say where workers are: --discovery PLACE"),
    ],
)
def test_a_line_of_twin_serve_that_means_nothing_is_refused(twin, line: tuple[str, ...], text: str) -> None:
    done = twin("serve", *line)
    assert done.code == 2
    assert text in done.complaint
