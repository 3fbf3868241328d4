"""Real engines behind our own world: hand-offs past their lease, workers that go and come under load, a killed worker.

It runs before `test_live_vllm_engine.py`, which leaves fewer servers behind; the spare one is gone after this.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest
from live_service import Engines, Service, alike, prompt, read

from executors.leases import LeaseTerms
from executors.process import group_members
from policies.cluster.events import FirstToken, RequestFailed, RequestInterrupted, RequestMigrated, WorkerLost

pytestmark = pytest.mark.live


def test_a_hand_off_past_its_lease_is_never_sent_and_the_answer_is_right(engines: Engines) -> None:
    tokens = prompt(200)

    async def main() -> None:
        async with engines.mixed("mixed") as whole:
            await whole.complete(tokens, 12)
        async with engines.split() as it:
            it.cluster.world.legs.lease = LeaseTerms.of(1e-6, health_period_s=1e-7)
            late = await it.complete(tokens, 12)
            counts = it.cluster.world.ledger.counts()
            assert (counts["ever_sent"], counts["refused"], counts["expired"]) == (0, 1, 1)
            assert it.ended[0].tokens == whole.ended[0].tokens
            assert late.usage.prompt_tokens == 200

    asyncio.run(main())


def test_split_serving_under_load_serves_who_stays_and_forgets_who_leaves(engines: Engines) -> None:
    async def one(it: Service, number: int, isl: int, osl: int) -> Any:
        if number % 3:
            return (await read(await it.stream(prompt(isl), osl)))[1]
        stream = await it.stream(prompt(isl), 2000)
        await read(stream, 1 + number % 7)
        await stream.close()
        return None

    async def main() -> None:
        async with engines.split() as it:
            rng = random.Random(5)
            sizes = [(rng.randint(5, 300), rng.randint(20, 40)) for _ in range(12)]
            usages = await asyncio.gather(*(one(it, number, *size) for number, size in enumerate(sizes)))
            told = [(usage.prompt_tokens, usage.completion_tokens) for usage in usages if usage is not None]
            assert told == [size for number, size in enumerate(sizes) if number % 3]
            await it.until(lambda: not it.cluster.world.open)
            assert Counter(one.end.outcome for one in it.ended) == {"length": 8, "cancelled": 4}
            await it.free()
            counts = it.cluster.world.ledger.counts()
            assert (counts["granted"], counts["held"], counts["sent"], counts["void"]) == (12, 0, 0, 0)
            assert counts["refused"] == counts["expired"]  # what waited too long in a queue is computed again

    asyncio.run(main())


def test_scaling_down_and_up_under_load_loses_nothing(engines: Engines) -> None:
    async def stream(it: Service, sizes: tuple[int, int]) -> Any:
        _, usage = await read(await it.stream(prompt(sizes[0]), sizes[1]))
        return usage

    async def main() -> None:
        async with engines.mixed("mixed", "spare", mode="least-loaded") as it:
            rng = random.Random(7)
            sizes = [(rng.randint(20, 400), rng.randint(60, 120)) for _ in range(30)]
            streams = [asyncio.create_task(stream(it, one)) for one in sizes[:20]]
            await it.until(lambda: it.count(FirstToken) >= 10)
            leaving = it.worker("mixed-1").worker_id
            it.cluster.world.fleet.drain(leaving)
            await it.until(lambda: it.count(WorkerLost) == 1)
            back = await it.attach("back", engines.url("spare"))
            streams += [asyncio.create_task(stream(it, one)) for one in sizes[20:]]
            usages = await asyncio.gather(*streams)
            assert [(one.prompt_tokens, one.completion_tokens) for one in usages] == sizes
            used = Counter(one.end.worker for one in it.ended)
            assert set(used) == {"mixed-0", "mixed-1", "back"}
            assert back.worker_id != leaving
            assert it.count(RequestInterrupted) == it.count(RequestMigrated) == it.count(RequestFailed) == 0

    asyncio.run(main())


def test_c21_a_worker_that_is_killed_in_mid_stream_costs_no_token(engines: Engines) -> None:
    tokens = prompt(300)

    async def main() -> None:
        async with engines.mixed("spare") as it:
            stream = await it.stream(tokens, 120)
            begun, _ = await read(stream, 10)
            await it.attach("other", engines.url("mixed"))
            for pid in list(group_members(engines.servers["spare"].pid)):
                os.kill(pid, signal.SIGKILL)
            rest, usage = await read(stream)
            (moved,) = it.ended
            assert (moved.end.outcome, moved.end.migrations, moved.end.worker) == ("length", 1, "other")
            assert it.count(WorkerLost) == 1
            unbroken = await it.complete(tokens, 120)
            if await alike(engines.url("mixed"), tokens, moved.tokens, it.ended[1].tokens):
                assert begun + rest == unbroken.choices[0].text
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (300, 120, 420)

    asyncio.run(main())
