"""`twin serve --live` inside a test: real engines that run already, our world and frontend before them, stock clients.

Every run is watched by the invariants and journalled; when it ends the journal must replay to the same orders.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from executors.assemble import Host, LiveCluster, live_config, live_policies
from executors.backend import End
from executors.engines.protocol import GREEDY, LegRequest
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.frontend.server import Frontend
from executors.frontend.settings import Deadlines, Settings
from executors.frontend.tokens import ServedTokenizer
from executors.live_worker import LiveWorker
from executors.requests import OpenRequest
from executors.starter import Model, adapter
from policies.cluster import journal
from policies.cluster.actions import Action
from policies.cluster.events import Event
from policies.cluster.ids import Leg, RequestId
from policies.cluster.invariants import Invariants
from twin.config import Config
from twin.config_read import load

LIMIT_S = 200.0
"""After which a run that hangs has failed."""
SEED = os.environ.get("DYNATWIN_TEST_SEED", "0")
NUMBERS = iter(range(10**6))
MODEL = "tiny"
BLOCK_SIZE = 32
LEASE_S = 10
"""As the engines were started."""
GROUP = """
[[workers]]
name = "{role}"
role = "{role}"
count = {count}
tp = 1
on_cpu = true
[workers.engine]
block_size = 32
kv_blocks = 1000
max_num_seqs = 16
max_num_batched_tokens = 1024
max_model_len = 4096
"""
AHEAD = 0.06
"""How far the best token is before the next (nats) where rounding does not swap them: logits of the tiny model are
multiples of 1/32, and come out a step off in other batches."""
FREE = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "nvext": {"extra_fields": ["worker_id", "timing"]}}}
"""Greedy, as long as it is asked to be, with the names of the workers told."""


@dataclass(frozen=True)
class Ended:
    """A request that ended: the tokens that its client was given."""

    tokens: tuple[int, ...]
    end: End


@dataclass
class Service:
    """A cluster that serves, and two clients of it. `happened` is everything, in order, `ended` the requests."""

    cluster: LiveCluster
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient
    kserve_port: int
    happened: list[Event] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    broken: list[BaseException] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _invariants: Invariants = field(default_factory=Invariants)

    def watch(self) -> None:
        """Look over the shoulder of the record, which is told everything."""
        record = self.cluster.record
        assert record is not None
        note, ended = record.note, record.ended

        def on_note(event: Event, actions: Sequence[Action]) -> None:
            note(event, actions)
            self.happened.append(event)
            try:
                self._invariants.observe(event, actions)
            except Exception as error:
                self.broken.append(error)
                raise
            self._news.set()

        def on_ended(request: OpenRequest, end: End) -> None:
            ended(request, end)
            self.ended.append(Ended(tuple(request.emitted), end))

        record.note = on_note  # type: ignore[method-assign]
        record.ended = on_ended  # type: ignore[method-assign]
        self.cluster.world.failed = self._failed  # type: ignore[method-assign]

    def _failed(self, error: BaseException | None) -> None:
        assert error is not None
        self.broken.append(error)

    async def over(self) -> None:
        """Until every request has ended: then nothing may be left of any."""
        await self.until(lambda: not self.cluster.world.open)
        self._invariants.audit(self.cluster.world.controller.view)
        self._invariants.finish()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until something holds that events bring about."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.happened)

    async def complete(self, prompt: list[int], max_tokens: int) -> Any:
        return await self.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, **FREE)  # type: ignore[call-overload]

    async def stream(self, prompt: list[int], max_tokens: int) -> Any:
        return await self.openai.completions.create(  # type: ignore[call-overload]
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            **FREE,
        )

    def worker(self, name: str) -> LiveWorker:
        return next(one for one in self.cluster.world.fleet.workers.values() if one.up.name == name and not one.lost)

    async def attach(self, name: str, url: str) -> LiveWorker:
        """One more worker of the first group."""
        group = self.cluster.config.workers[0]
        at = Attached(
            name=name,
            url=url,
            on_cpu=True,
            max_num_seqs=group.engine.max_num_seqs,
            max_batched_tokens=group.engine.max_num_batched_tokens,
        )
        return await self.cluster.world.fleet.attach(adapter(group, at, self.cluster.clock.now), name, group.name)

    async def free(self) -> None:
        """Until no engine has anything to do or KV in use; each look makes it step, since its gauges move with that."""
        for worker in self.cluster.world.fleet.workers.values():
            assert isinstance(worker.engine, Vllm)
            while not await _is_free(worker.engine):
                pass


async def _is_free(engine: Vllm) -> bool:
    name = f"look-{next(NUMBERS)}"
    looked = LegRequest(
        leg_id=name, request_id=RequestId(name), leg=Leg.AGG, token_ids=[5, 6, 7], max_tokens=1, sampling=GREEDY
    )
    async for _ in engine.generate(looked):
        pass
    load = await engine.load()
    return load is not None and load.running == load.waiting == load.active_blocks == 0


def configured(folder: Path, mode: str, **counts: int) -> Config:
    """A configuration with so many workers of each role."""
    groups = [GROUP.format(role=role, count=count) for role, count in counts.items()]
    file = folder / "config.toml"
    file.write_text("\n".join([*groups, f'[router]\nmode = "{mode}"\n']), encoding="utf-8")
    return load(file, {"--lease": LEASE_S}, ("allow_no_effect=true",))


@asynccontextmanager
async def serving(
    config: Config, folder: Path, tokenizer: ServedTokenizer, **urls: tuple[str, ...]
) -> AsyncIterator[Service]:
    """Serve with running engines; `urls` are those of each group. Afterwards nothing was broken, and the journal
    replays."""
    record = folder / "record"
    host = Host(model=Model(checkpoint="", served_as=MODEL), pythons={}, attached=urls, record=record)
    async with asyncio.timeout(LIMIT_S):
        cluster = LiveCluster(config, host)
        settings = Settings(port=0, kserve_port=0, deadlines=Deadlines(grace_s=0.0, drain_s=LIMIT_S))
        frontend = Frontend(cluster.service, {MODEL: tokenizer}, settings, now=cluster.clock.now)
        await frontend.start()
        url = f"http://127.0.0.1:{frontend.port}"
        try:
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as one,
                anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S) as other,
                httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as http,
            ):
                service = Service(cluster, one, other, http, frontend.ports[-1])
                service.watch()
                await cluster.start()
                yield service
                await service.over()
        finally:
            frontend.stopping.hurry()
            await frontend.stop()
            await cluster.close()
    assert service.broken == []
    replayed(record, config, host)


def replayed(record: Path, config: Config, host: Host) -> None:
    """What was recorded, decided once more by fresh policies."""
    served, _ = live_config(config, host)
    with (record / "journal.jsonl").open(encoding="utf-8") as lines:
        assert journal.replay(lines, live_policies(served, BLOCK_SIZE)) is None


class Engines:
    """Servers that run, by name; `mixed` and `split` serve with some of them."""

    def __init__(self, servers: Any, tokenizer: ServedTokenizer, folder: Path) -> None:
        self.servers = servers
        self._tokenizer = tokenizer
        self._folder = folder

    def url(self, name: str) -> str:
        return str(self.servers[name].url)

    def mixed(self, *names: str, mode: str = "kv") -> Any:
        config = configured(self._folder, mode, mixed=len(names))
        return serving(config, self._run(), self._tokenizer, mixed=tuple(map(self.url, names)))

    def split(self, prefill: Sequence[str] = ("prefill",), decode: Sequence[str] = ("decode",)) -> Any:
        config = configured(self._folder, "kv", prefill=len(prefill), decode=len(decode))
        urls = {"prefill": tuple(map(self.url, prefill)), "decode": tuple(map(self.url, decode))}
        return serving(config, self._run(), self._tokenizer, **urls)

    def _run(self) -> Path:
        folder = self._folder / f"run-{next(NUMBERS)}"
        folder.mkdir()
        return folder


def prompt(length: int) -> list[int]:
    """Tokens that no test had before."""
    rng = random.Random(f"{SEED} serving {next(NUMBERS)}")
    return [rng.randint(100, 4000) for _ in range(length)]


async def decided(url: str, length: int, answer: int) -> list[int]:
    """A prompt whose greedy answer of so many tokens rounding does not change: asked of a server that nobody compares
    with. bf16 promises equal tokens for equal batches only, and a prompt that is split, moved on or found in part is
    computed in other pieces."""
    asked = {"model": MODEL, "max_tokens": answer, "temperature": 0.0, "ignore_eos": True}
    asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as http:
        while True:
            tokens = prompt(length)
            told = (await http.post("/v1/completions", json=asked | {"prompt": tokens})).raise_for_status().json()
            best = [sorted(two.values()) for two in told["choices"][0]["logprobs"]["top_logprobs"]]
            if min(first - second for second, first in (two[-2:] for two in best)) >= AHEAD:
                return tokens


async def alike(url: str, tokens: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two answers to a prompt are the same. Where they part, rounding must have parted them: the two tokens are
    the best of a server that is asked there, and as good as level."""
    assert len(one) == len(other)
    at = next((place for place, two in enumerate(zip(one, other, strict=True)) if two[0] != two[1]), None)
    if at is None:
        return True
    asked = {"model": MODEL, "prompt": [*tokens, *one[:at]], "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as http:
        more = {"logprobs": 3, "return_tokens_as_token_ids": True}
        told = (await http.post("/v1/completions", json=asked | more)).raise_for_status().json()
    best = told["choices"][0]["logprobs"]["top_logprobs"][0]
    mine, others = (best.get(f"token_id:{tokens[at]}", -math.inf) for tokens in (one, other))
    assert abs(mine - others) < AHEAD, (at, one[at], other[at], best)
    return False


async def read(stream: Any, tokens: int = 10**9) -> tuple[str, Any]:
    """The text of a stream up to so many chunks, and its usage if that was reached."""
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
        tokens -= bool(chunk.choices)
        if not tokens:
            break
    return text, usage
