"""The adapter of vLLM against the real thing, on CPU: one mixed server, and a prefill and a decode server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from kv_index import Asking

from executors.deadlines import Deadlines
from executors.engines.protocol import GREEDY, Ability, LegFailed, LegRequest, Piece, Sampling
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.process import group_members
from policies.cluster.events import Event
from policies.cluster.hashing import base_seed, local_hashes
from policies.cluster.ids import Leg, LossCause, RequestId, WorkerId
from policies.cluster.kv_events import IndexDump
from policies.router.chains.feed import FeedMode

pytestmark = [pytest.mark.live, pytest.mark.shared]

LIMIT_S = 240.0
DEADLINES = Deadlines(connect_s=20, first_token_s=120, between_tokens_s=120, control_s=60)
NAMES = iter(range(10**6))
FIXED = Sampling(temperature=0.0, ignore_eos=True)


def prompt(length: int) -> list[int]:
    """Tokens that no test had before."""
    rng = random.Random(next(NAMES))
    return [rng.randint(100, 4000) for _ in range(length)]


def leg(tokens: list[int], max_tokens: int, **more: Any) -> LegRequest:
    name = f"live-{next(NAMES)}"
    fields = {"leg": Leg.AGG, "sampling": FIXED} | more
    return LegRequest(leg_id=name, request_id=RequestId(name), token_ids=tokens, max_tokens=max_tokens, **fields)


def with_vllm(servers: Any, roles: tuple[str, ...], test: Callable[..., Awaitable[None]]) -> None:
    """Run a test with adapters for the servers of these roles, all ready."""

    async def go() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            engines = []
            for server in (servers[role] for role in roles):
                at = Attached(name=server.name, url=server.url, role=server.role, on_cpu=True, max_num_seqs=16)
                engines.append(Vllm(at, DEADLINES))
                stack.push_async_callback(engines[-1].close)
                await engines[-1].ready(LIMIT_S)
            await test(*engines)

    asyncio.run(go())


async def all_of(engine: Vllm, request: LegRequest) -> list[Piece]:
    async with aclosing(engine.generate(request)) as pieces:
        return [piece async for piece in pieces]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


async def idle(engine: Vllm) -> None:
    """Until nothing runs; each look makes the engine step, since its gauges move with that only."""
    while True:
        await all_of(engine, leg(prompt(4), 1))
        load = await engine.load()
        if load is not None and load.running == load.waiting == 0:
            return


def test_facts_and_abilities(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        facts = await engine.ready(LIMIT_S)
        assert facts.version.startswith("0.32")
        assert (facts.models, facts.block_size, facts.total_blocks) == (("tiny",), 32, 999)
        assert (facts.context_tokens, facts.dp_ranks) == (4096, 1)
        assert Ability.ABORT in engine.abilities

    with_vllm(vllm_servers, ("mixed",), test)


def test_an_answer_and_what_was_cached_of_the_next_one(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        tokens = prompt(80)
        first, second = await all_of(engine, leg(tokens, 8)), await all_of(engine, leg(tokens, 8))
        assert len(tokens_of(first)) == 8
        assert tokens_of(first) == tokens_of(second)
        assert (first[-1].finish, first[-1].cached_tokens, second[-1].cached_tokens) == ("length", 0, 64)

    with_vllm(vllm_servers, ("mixed",), test)


def test_probabilities_and_grammars(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        told = await all_of(engine, leg(prompt(20), 3, sampling=Sampling(temperature=0.0, logprobs=2, ignore_eos=True)))
        logprobs = [one for piece in told for one in piece.logprobs]
        assert [one.token_id for one in logprobs] == tokens_of(told)
        assert all(one.token_id in dict(one.top) and one.logprob <= 0 for one in logprobs)
        digits = Sampling(temperature=0.0, grammar={"regex": "[0-9]{4}"})
        guided = await all_of(engine, leg(prompt(20), 8, sampling=digits))
        assert guided[-1].finish == "stop"

    with_vllm(vllm_servers, ("mixed",), test)


def test_a_split_answer_is_that_of_one_worker(vllm_servers: Any) -> None:
    async def test(mixed: Vllm, prefill: Vllm, decode: Vllm) -> None:
        assert mixed.facts is not None
        assert prefill.facts is not None
        assert decode.facts is not None
        assert prefill.facts.compatibility == decode.facts.compatibility
        for length in (5, 32, 300):
            tokens = prompt(length)
            (left,) = await all_of(prefill, leg(tokens, 1, leg=Leg.PREFILL))
            assert left.prefilled
            split = await all_of(decode, leg(tokens, 12, leg=Leg.DECODE, handoff=left.handoff))
            assert tokens_of(split) == tokens_of(await all_of(mixed, leg(tokens, 12))), f"prompt of {length}"

    with_vllm(vllm_servers, ("mixed", "prefill", "decode"), test)


@pytest.mark.parametrize("kind", [Leg.AGG, Leg.PREFILL])
def test_a_closed_leg_leaves_the_engine_idle(vllm_servers: Any, kind: Leg) -> None:
    async def test(engine: Vllm) -> None:
        task = asyncio.create_task(all_of(engine, leg(prompt(900), 3000, leg=kind)))
        while not task.done() and ((load := await engine.load()) is None or load.running == 0):
            pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(engine)

    with_vllm(vllm_servers, ("mixed" if kind is Leg.AGG else "prefill",), test)


def test_an_abort_by_id_ends_the_open_call(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        request = leg(prompt(50), 3000)
        async with aclosing(engine.generate(request)) as pieces:
            await anext(pieces)
            await engine.abort(request.leg_id)
            with pytest.raises(LegFailed) as failed:
                async for _ in pieces:
                    pass
        assert failed.value.cause is LossCause.SHUTDOWN
        await idle(engine)

    with_vllm(vllm_servers, ("mixed",), test)


def test_what_cannot_be_served_is_refused(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        with pytest.raises(LegFailed) as failed:
            await all_of(engine, leg(prompt(50), 10**6))
        assert failed.value.refused
        assert failed.value.cause is LossCause.ENGINE_ERROR

    with_vllm(vllm_servers, ("mixed",), test)


def test_a_decode_leg_whose_prefill_is_gone_fails(vllm_servers: Any) -> None:
    async def test(prefill: Vllm, decode: Vllm) -> None:
        tokens = prompt(100)
        (left,) = await all_of(prefill, leg(tokens, 1, leg=Leg.PREFILL))
        gone = {**left.handoff, "remote_engine_id": "gone", "remote_port": 1}
        with pytest.raises(LegFailed) as failed:
            await all_of(decode, leg(tokens, 4, leg=Leg.DECODE, handoff=gone))
        assert (failed.value.cause, failed.value.refused) == (LossCause.ENGINE_ERROR, False)

    with_vllm(vllm_servers, ("prefill", "decode"), test)


@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_kv_events_lead_to_the_prompts_that_are_cached(vllm_servers: Any, role: str) -> None:
    """A worker that runs already is followed from its first event on; a decode worker tells of what it pulled."""

    async def test(*engines: Vllm) -> None:
        engine, arrived = engines[0], asyncio.Event()

        def post(event: Event) -> None:
            index.on(event)
            arrived.set()

        follower = engine.follow(WorkerId(0), 0, post)
        assert follower is not None
        index = Asking(32, follower.ask)
        index.up()
        tokens, salted = prompt(200), prompt(70)
        await all_of(engine, leg(tokens, 1))
        await all_of(engine, leg(salted, 1, cache_salt="tenant"))
        expected = [(local_hashes(tokens, 32), 6), (local_hashes(salted, 32, seed=base_seed(None, "tenant")), 2)]
        if len(engines) > 1:
            pulled = prompt(100)
            (left,) = await all_of(engines[1], leg(pulled, 1, leg=Leg.PREFILL))
            await all_of(engine, leg(pulled, 4, leg=Leg.DECODE, handoff=left.handoff))
            expected.append((local_hashes(pulled, 32), 3))
        while any(index.depth(hashes) < blocks for hashes, blocks in expected) or index.mode is not FeedMode.LIVE:
            arrived.clear()
            await arrived.wait()
        assert index.depth(local_hashes(salted, 32)) == 0
        load = await engine.load()
        assert load is not None
        assert load.cached_blocks >= 8
        again = Asking(32, follower.ask)
        answers: list[Event] = []
        follower._post = lambda event: (answers.append(event), again.on(event))  # type: ignore[attr-defined]
        again.up()
        assert any(isinstance(one, IndexDump) for one in answers)
        assert [again.depth(hashes) for hashes, _ in expected] == [blocks for _, blocks in expected]
        await follower.close()

    with_vllm(vllm_servers, ("mixed",) if role == "mixed" else ("decode", "prefill"), test)


def test_greedy_is_what_a_canary_asks(vllm_servers: Any) -> None:
    async def test(engine: Vllm) -> None:
        pieces = await all_of(engine, leg([1, 1, 1, 1], 1, sampling=GREEDY))
        assert pieces[-1].finish in ("stop", "length")

    with_vllm(vllm_servers, ("mixed",), test)


def test_an_engine_that_is_told_to_go_takes_nothing_new(vllm_servers: Any) -> None:
    """Its open answer may hang for ever, so letting go of it is ours. The decode server is gone afterwards."""

    async def test(engine: Vllm) -> None:
        async with aclosing(engine.generate(leg(prompt(50), 3000))) as pieces:
            await anext(pieces)
            os.kill(vllm_servers["decode"].pid, signal.SIGTERM)
            while await engine.alive():
                pass
            with pytest.raises(LegFailed) as failed:
                await all_of(engine, leg(prompt(50), 1))
            assert not failed.value.refused  # whoever asks is to be served elsewhere

    with_vllm(vllm_servers, ("decode",), test)


def test_an_engine_whose_worker_process_dies_is_no_longer_alive(vllm_servers: Any) -> None:
    """The mixed server is gone afterwards."""

    async def test(engine: Vllm) -> None:
        (worker,) = (pid for pid in group_members(vllm_servers["mixed"].pid) if "VLLM::Worker" in command_of(pid))
        async with aclosing(engine.generate(leg(prompt(50), 3000))) as pieces:
            await anext(pieces)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(LegFailed) as failed:
                async for _ in pieces:
                    pass
        assert failed.value.cause in (LossCause.ENGINE_ERROR, LossCause.DISCONNECTED), failed.value.reason
        while await engine.alive():
            pass
        with pytest.raises(LegFailed) as refused:
            await all_of(engine, leg(prompt(50), 1))
        assert refused.value.cause in (LossCause.CONNECT, LossCause.DISCONNECTED, LossCause.ENGINE_ERROR)

    with_vllm(vllm_servers, ("mixed",), test)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
