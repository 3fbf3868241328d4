"""KV tiers of `[workers.kvbm]` under real vLLM: an object store below a small host tier, and a host tier in which our
own eviction order decides. Object store: a local S3 server, by the real NIXL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_servers import BLOCK_SIZE, SMALL, Server, forked
from live_service import Engines, Service, prompt
from s3_server import BUCKET, empty, objects, s3_server

from executors.engines.kv_tiers import ObjectStore
from executors.engines.metrics import Page
from executors.engines.vllm import Vllm
from executors.frontend.tokens import ServedTokenizer
from executors.process import group_members
from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import BlockHash, Tier
from policies.cluster.kv_events import KvRemoved, KvStored
from policies.kvbm.build import KvSettings, build_eviction, build_offload
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import Level, TierBody
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Offload
from policies.kvbm.sketch import Sketch
from policies.kvbm.tiers import TierSpec
from twin.config import KvbmConfig, WorkerGroup

pytestmark = pytest.mark.live

SECRET = "kept-to-itself-8f3a1c"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
HOST_BLOCKS = 48
FLUSH_S = 0.01
AGREE_S = 30.0
EVICTIONS = ("lineage", "fifo")


@dataclass(frozen=True)
class Tiered:
    servers: dict[str, Server]
    store: str
    folder: Path


@pytest.fixture(scope="module")
def tiered(
    vllm_python: Path, tiny_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    """Two prompts of 500 tokens have room on a device, and two in host memory above a store; or a little more in host
    memory, which they leave as our orders say."""
    folder = tmp_path_factory.mktemp("s3")

    def group(name: str, blocks: int, **kvbm: Any) -> WorkerGroup:
        tiers = KvbmConfig(cpu_cache_tokens=blocks * BLOCK_SIZE, **kvbm)
        return WorkerGroup(name=name, tp=1, on_cpu=True, engine=SMALL, kvbm=tiers)

    groups = {"objects": group("objects", 32, remote=True, remote_offload="presence")}
    groups |= {name: group(name, HOST_BLOCKS, cpu_eviction=name) for name in EVICTIONS}
    with s3_server(vllm_python, folder / "s3.log", KEYS) as address:
        store = ObjectStore.parse(f"s3://{BUCKET}/kv?endpoint={address}&region=us-east-1")
        with forked(vllm_python, tiny_model, root, groups, store, KEYS) as servers:
            yield Tiered(servers, address, folder)


@pytest.fixture
def serving(tiered: Tiered, tokenizer: ServedTokenizer, tmp_path: Path) -> Engines:
    return Engines(tiered.servers, tokenizer, tmp_path)


async def sources(it: Service) -> dict[str, int]:
    """Tokens of prompts by where they came from, as the engine counts them."""
    engine = it.worker("mixed-0").engine
    assert isinstance(engine, Vllm)
    page = Page(await engine.get("/metrics"))
    return {one.labels["source"]: int(one.value) for one in page.all("vllm:prompt_tokens_cached_by_source_total")}


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


# ---------------------------------------------------------------- an object store


def test_kv_from_an_object_store_gives_the_same_tokens(tiered: Tiered, serving: Engines) -> None:
    async def main() -> None:
        async with serving.mixed("objects") as it:
            prompts = [prompt(500) for _ in range(5)]
            for tokens in prompts:
                await it.complete(tokens, 8)
                await it.until(lambda tokens=tokens: Tier.G4_REMOTE in held(it, tokens))
            first = [one.tokens for one in it.ended]
            again = await it.complete(prompts[0], 8)
            assert cached(again) == 480
            assert it.ended[-1].tokens == first[0]
            assert (await sources(it)).get("disk") == 480  # vLLM's word for any store
            assert len(objects(tiered.store)) == 5 * 15

    asyncio.run(main())


def test_kv_that_is_gone_from_the_object_store_is_computed_again(
    tiered: Tiered, serving: Engines, vllm_python: Path
) -> None:
    async def main() -> None:
        async with serving.mixed("objects") as it:
            prompts = [prompt(500) for _ in range(4)]
            for tokens in prompts:
                await it.complete(tokens, 8)
                await it.until(lambda tokens=tokens: Tier.G4_REMOTE in held(it, tokens))
            empty(vllm_python, tiered.store, KEYS)
            again = await it.complete(prompts[0], 8)
            assert cached(again) == 0
            assert it.ended[-1].tokens == it.ended[0].tokens

    asyncio.run(main())


def test_keys_of_the_object_store_are_on_no_command_line_and_in_no_log(tiered: Tiered) -> None:
    server = tiered.servers["objects"]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in group_members(server.pid)]
    assert lines
    assert not any(SECRET.encode() in line for line in lines)
    assert SECRET not in server.log.read_text()
    assert SECRET not in (tiered.folder / "s3.log").read_text()


def held(it: Service, tokens: list[int]) -> set[Tier]:
    """The tiers that have the last block of a prompt, as their worker has told."""
    last, tiers = local_hashes(tokens, BLOCK_SIZE)[-1], set()
    for event in it.happened:
        if isinstance(event, KvStored) and last in event.local_hashes:
            tiers.add(event.tier)
    return tiers


# ---------------------------------------------------------------- our orders decide


class Twin:
    """The twin's manager with the same host tier, told what the engine did."""

    def __init__(self, eviction: str) -> None:
        self.tree = ContentTree(1, 1)
        settings = KvSettings(sketch=lambda: Sketch(HOST_BLOCKS))
        spec = TierSpec(tier=Tier.G2_HOST, capacity_bytes=HOST_BLOCKS, block_bytes=1, bytes_per_s=1e9, latency_s=0.0)
        self.body = TierBody(spec, lambda: build_eviction(eviction, settings))
        rules = BatchRules(max_blocks=10**6, min_blocks=10**6, flush_s=FLUSH_S)
        level = Level(self.body, build_offload("presence", settings), batches=rules)
        self.manager = BlockManager([level], lambda branch, lo, hi: [])
        self.now_s = 0.0

    def served(self, blocks: list[BlockHash], on_device: int, found: int) -> None:
        """A prompt of which the device had some blocks, and host memory those from there on to `found`."""
        self.now_s += 1.0
        path: BlockPath = self.tree.path(list(blocks), len(blocks))
        store = self.body.store
        store.release(store.upgrade(store.match(path.pieces, on_device, found)))
        for run in path.runs():
            if run.hi > found:
                self.manager.completed(run.branch, max(run.lo, found), run.hi, self.now_s)
        for order in self.manager.poll(self.now_s + FLUSH_S):
            assert isinstance(order, Offload) or self.body.store.resident
            if isinstance(order, Offload):
                self.manager.moved(order.batch_id, self.now_s + FLUSH_S)

    def held(self) -> set[int]:
        def keys(run: BlockRun) -> list[int]:
            return [int((run.branch.keys or [])[block - run.branch.start]) for block in range(run.lo, run.hi)]

        return {key for run in self.body.store.findable() for key in keys(run)}


def in_host(it: Service) -> set[int]:
    """Blocks that host memory has, as its worker has told, by the hashes of their own tokens (here nobody shares)."""
    names: dict[BlockHash, BlockHash] = {}
    here: set[BlockHash] = set()
    for event in it.happened:
        if isinstance(event, KvStored):
            names.update(zip(event.exts, event.local_hashes, strict=True))
            here |= set(event.exts) if event.tier is Tier.G2_HOST else set()
        elif isinstance(event, KvRemoved) and event.tier is Tier.G2_HOST:
            here -= set(event.exts)
    return {int(names[ext]) for ext in here}


async def agreed(it: Service, twin: Twin, what: str) -> None:
    """Until the worker has told of the blocks that the twin has. Raises AssertionError for others."""
    try:
        async with asyncio.timeout(AGREE_S):
            await it.until(lambda: in_host(it) == twin.held())
    except TimeoutError:
        ours, theirs = in_host(it), twin.held()
        raise AssertionError(
            f"{what}; only there {len(ours - theirs)}, only in the twin {len(theirs - ours)}"
        ) from None


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_leaves_host_memory_is_what_the_twin_evicts(serving: Engines, eviction: str) -> None:
    """Follow-ups of one prompt between others: by lineage its beginning stays, first in first out lets it go."""

    async def main() -> None:
        twin, differed = Twin(eviction), False
        other = Twin(next(name for name in EVICTIONS if name != eviction))
        async with serving.mixed(eviction) as it:
            chats = [prompt(330) for _ in range(5)]
            longer = [*chats[0], *prompt(200)]
            asked = [chats[0], chats[1], longer, chats[2], chats[3], chats[4], longer, chats[1], chats[3]]
            before = await sources(it)
            for number, tokens in enumerate(asked):
                answer = await it.complete(tokens, 8)
                now = await sources(it)
                on_device, came = (now.get(name, 0) - before.get(name, 0) for name in ("device", "host"))
                before = now
                assert cached(answer) == on_device + came
                blocks = local_hashes(tokens, BLOCK_SIZE)
                for each in (twin, other):
                    each.served(blocks, on_device // BLOCK_SIZE, (on_device + came) // BLOCK_SIZE)
                differed |= other.held() != twin.held()
                await agreed(it, twin, f"prompt {number}: {on_device} tokens on the device, {came} in host memory")
            same = [one.tokens for one in it.ended]
            assert same[6:] == [same[2], same[1], same[4]]
            assert before.get("host", 0) > 0
            assert differed

    asyncio.run(main())
