"""Prefill and decode workers of real vLLM that are killed with a request on them: two of each, KV over real NIXL.

No token is lost or sent twice, the prompt counts once, nobody waits for KV of the dead, and the next are served.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from live_servers import LIMITS, Server, forked
from live_service import Engines, Service, alike, prompt, read

from executors.frontend.tokens import ServedTokenizer
from executors.process import group_members
from policies.cluster.events import FirstToken, RequestInterrupted, WorkerLost
from policies.cluster.ids import Leg, WorkerId
from twin.config import WorkerGroup

pytestmark = pytest.mark.live
NAMES = {"prefill": ["prefill-a", "prefill-b"], "decode": ["decode-a", "decode-b"]}


@dataclass
class Pairs:
    """Servers, and which of them live."""

    servers: dict[str, Server]
    alive: dict[str, list[str]] = field(default_factory=lambda: {role: list(names) for role, names in NAMES.items()})

    def name(self, it: Service, worker_id: WorkerId) -> tuple[str, str]:
        """Role and name of a worker's server."""
        role, _, number = it.cluster.world.fleet.workers[worker_id].up.name.rpartition("-")
        return role, self.alive[role][int(number)]

    def kill(self, role: str, name: str) -> None:
        for pid in list(group_members(self.servers[name].pid)):
            os.kill(pid, signal.SIGKILL)
        self.alive[role].remove(name)

    def signal_engines(self, names: Sequence[str], number: signal.Signals) -> None:
        """To all but the HTTP servers: what computes stands still, or goes on."""
        for name in names:
            for pid in group_members(self.servers[name].pid):
                if pid != self.servers[name].pid:
                    os.kill(pid, number)


@pytest.fixture(scope="module")
def pairs(vllm_python: Path, tiny_model: Path, root: Path) -> Iterator[Pairs]:
    groups = {
        name: WorkerGroup(name=name, role=role, tp=1, on_cpu=True, engine=LIMITS)
        for role, names in NAMES.items()
        for name in names
    }
    with forked(vllm_python, tiny_model, root, groups) as servers:
        yield Pairs(servers)


@pytest.fixture
def serving(pairs: Pairs, tokenizer: ServedTokenizer, tmp_path: Path) -> Engines:
    return Engines(pairs.servers, tokenizer, tmp_path)


def test_a_prefill_worker_that_dies_with_a_prompt_costs_no_token(pairs: Pairs, serving: Engines) -> None:
    tokens = prompt(900)

    async def main() -> None:
        async with serving.split(**pairs.alive) as it:
            names = list(pairs.alive["prefill"])
            pairs.signal_engines(names, signal.SIGSTOP)  # the prompt stays where it is
            call = asyncio.create_task(it.complete(tokens, 40))
            await it.until(lambda: prefilling(it) is not None)
            role, name = pairs.name(it, prefilling(it) or WorkerId(0))
            pairs.kill(role, name)
            pairs.signal_engines([one for one in names if one != name], signal.SIGCONT)
            answer = await call
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (900, 40)
            assert it.count(WorkerLost) == it.count(RequestInterrupted) == 1
            assert it.count(FirstToken) == 1
            unbroken = await it.complete(tokens, 40)
            url = pairs.servers[pairs.alive["decode"][0]].url
            if await alike(url, tokens, it.ended[0].tokens, it.ended[1].tokens):
                assert answer.choices[0].text == unbroken.choices[0].text
            settled(it)

    asyncio.run(main())


def test_a_decode_worker_that_dies_in_mid_stream_costs_no_token(pairs: Pairs, serving: Engines) -> None:
    tokens = prompt(300)

    async def main() -> None:
        async with serving.split(**pairs.alive) as it:
            stream = await it.stream(tokens, 120)
            begun, _ = await read(stream, 10)
            (first,) = (event for event in it.happened if isinstance(event, FirstToken))
            pairs.kill(*pairs.name(it, first.worker_id))
            rest, usage = await read(stream)
            (moved,) = it.ended
            assert (moved.end.outcome, moved.end.migrations, len(moved.tokens)) == ("length", 1, 120)
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (300, 120, 420)
            assert it.count(WorkerLost) == 1
            unbroken = await it.complete(tokens, 120)
            url = pairs.servers[pairs.alive["decode"][0]].url
            if await alike(url, tokens, moved.tokens, it.ended[1].tokens):
                assert begun + rest == unbroken.choices[0].text
            settled(it)

    asyncio.run(main())


def prefilling(it: Service) -> WorkerId | None:
    """The worker that has the only prompt."""
    legs: list[Any] = [one.legs.get(Leg.PREFILL) for one in it.cluster.world.open.values()]
    return next((leg.worker_id for leg in legs if leg is not None and leg.task is not None), None)


def settled(it: Service) -> None:
    """Nobody waits for KV of the dead, or of the living."""
    counts = it.cluster.world.ledger.counts()
    assert (counts["held"], counts["sent"]) == (0, 0), counts
