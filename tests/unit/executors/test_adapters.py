"""The adapters against servers that speak each engine's protocol: good answers, and every way in which a leg fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engines import CACHED, MISDEEDS, FakeEngine, FakeSglang, FakeTrtllm, FakeVllm
from fake_publisher import FakePublisher

from executors.deadlines import Deadlines
from executors.engines.protocol import GREEDY, Ability, Engine, LegFailed, LegRequest, Logprob, Piece, Sampling
from executors.engines.remote import Attached, Remote
from executors.engines.sglang import Sglang
from executors.engines.trtllm import Started, Trtllm
from executors.engines.vllm import Vllm
from executors.process import EngineProcess
from policies.cluster.events import Event
from policies.cluster.ids import Leg, LossCause, RequestId, Role, WorkerId
from policies.cluster.kv_events import KvStored
from policies.errors import CapabilityError, EngineError

LIMIT_S = 20.0
SHORT = Deadlines(connect_s=LIMIT_S, first_token_s=0.1, between_tokens_s=0.1, control_s=LIMIT_S)
AMPLE = Deadlines(connect_s=LIMIT_S, first_token_s=LIMIT_S, between_tokens_s=LIMIT_S, control_s=LIMIT_S)

Made = tuple[FakeEngine, Callable[[Attached, Deadlines], Remote]]


def vllm() -> Made:
    return FakeVllm(), Vllm


def sglang() -> Made:
    return FakeSglang(), Sglang


def trtllm() -> Made:
    started = Started(block_size=32, context_tokens=4096)
    return FakeTrtllm(), lambda at, deadlines: Trtllm(at, started, deadlines)


KINDS = pytest.mark.parametrize("kind", [vllm, sglang, trtllm])


def leg(**changes: Any) -> LegRequest:
    one = LegRequest(
        leg_id="ours-1", request_id=RequestId("r"), leg=Leg.AGG, token_ids=range(1, 41), max_tokens=3, sampling=GREEDY
    )
    return replace(one, **changes)


def with_engine(
    kind: Callable[[], Made], test: Callable[[Any, Any], Awaitable[None]], deadlines: Deadlines = AMPLE, **at: Any
) -> None:
    """Run a test with a server of that kind and a ready adapter for it."""

    async def go() -> None:
        server, adapter = kind()
        async with asyncio.timeout(LIMIT_S), server:
            engine = adapter(Attached(**{"name": "w0", "url": server.url, "max_num_seqs": 64} | at), deadlines)
            try:
                await engine.ready(LIMIT_S)
                await test(server, engine)
            finally:
                await engine.close()

    asyncio.run(go())


async def all_of(engine: Engine, request: LegRequest) -> list[Piece]:
    async with aclosing(engine.generate(request)) as pieces:
        return [piece async for piece in pieces]


# ---------------------------------------------------------------- good answers


@KINDS
def test_tokens_come_one_by_one_and_end_with_a_reason(kind: Callable[[], Made]) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        pieces = await all_of(engine, leg())
        assert [token for piece in pieces for token in piece.token_ids] == [500, 501, 502]
        assert [piece.finish for piece in pieces if piece.finish] == ["length"]
        assert pieces[-1].finish == "length"
        assert pieces[-1].cached_tokens == CACHED
        assert server.aborted == []

    with_engine(kind, test)


def test_sglang_may_send_only_the_new_tokens() -> None:
    async def test(_: FakeEngine, engine: Engine) -> None:
        pieces = await all_of(engine, leg(sampling=Sampling(logprobs=2)))
        assert [piece.token_ids for piece in pieces] == [(500,), (501,), (502,)]
        assert [one.token_id for piece in pieces for one in piece.logprobs] == [500, 501, 502]

    with_engine(lambda: (FakeSglang(incremental=True), Sglang), test)


@pytest.mark.parametrize("kind", [vllm, sglang])
def test_probabilities_are_told_with_their_tokens(kind: Callable[[], Made]) -> None:
    async def test(_: FakeEngine, engine: Engine) -> None:
        pieces = await all_of(engine, leg(max_tokens=2, sampling=Sampling(logprobs=2)))
        told = [one for piece in pieces for one in piece.logprobs]
        assert told == [Logprob(token_id=n, logprob=-0.5, top=((n, -0.5), (9, -1.5))) for n in (500, 501)]

    with_engine(kind, test)


def test_vllm_is_asked_by_name_and_by_nothing_else() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        wanted = Sampling(
            temperature=0.5,
            top_k=3,
            logit_bias={7: 1.5},
            stop_token_ids=(2,),
            grammar={"json_schema": {"type": "object"}},
        )
        await all_of(engine, leg(sampling=wanted, lora="poems", cache_salt="s", dp_rank=1))
        assert server.bodies == [
            {
                "model": "poems",
                "prompt": list(range(1, 41)),
                "max_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "temperature": 0.5,
                "top_k": 3,
                "logit_bias": {"7": 1.5},
                "stop_token_ids": [2],
                "cache_salt": "s",
                "structured_outputs": {"json": {"type": "object"}},
            }
        ]
        assert server.headers[0]["X-Request-Id"] == "ours-1"
        assert server.headers[0]["X-data-parallel-rank"] == "1"

    with_engine(vllm, test)


def test_sglang_is_asked_in_its_own_words() -> None:
    async def test(server: FakeSglang, engine: Engine) -> None:
        wanted = Sampling(seed=5, min_tokens=2, grammar={"choice": ["a+", "b"]})
        await all_of(engine, leg(sampling=wanted, cache_salt="s", dp_rank=1))
        (body,) = server.bodies
        assert (body["rid"], body["cache_salt"], body["routed_dp_rank"]) == ("ours-1", "s", 1)
        assert body["sampling_params"] == {
            "max_new_tokens": 3,
            "sampling_seed": 5,
            "min_new_tokens": 2,
            "regex": r"(a\+|b)",
        }

    with_engine(sglang, test)


# ---------------------------------------------------------------- split serving


def test_vllm_hands_over_what_the_prefill_left_untouched() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        sampling = Sampling(temperature=0.0, min_tokens=2, logprobs=1)
        (left,) = await all_of(engine, leg(leg=Leg.PREFILL, max_tokens=9, sampling=sampling))
        assert left.prefilled
        assert left.token_ids == ()
        pieces = await all_of(engine, leg(leg=Leg.DECODE, handoff=left.handoff, sampling=sampling))
        assert [token for piece in pieces for token in piece.token_ids] == [500, 501, 502]
        asked, taken = server.bodies
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (asked["max_tokens"], asked["stream"]) == (1, False)
        assert not {"stream_options", "min_tokens", "logprobs"} & asked.keys()
        assert taken["kv_transfer_params"] == left.handoff

    with_engine(vllm, test)


def test_sglang_legs_meet_at_a_point_that_is_new_each_time() -> None:
    async def test(server: FakeSglang, engine: Sglang) -> None:
        first, second = engine.meeting_point(), engine.meeting_point()
        assert first["bootstrap_port"] == 8998
        assert first["bootstrap_room"] != second["bootstrap_room"]
        legs = (leg(leg=Leg.PREFILL, max_tokens=1, handoff=first), leg(leg=Leg.DECODE, handoff=first))
        prefill, decode = await asyncio.gather(*(all_of(engine, one) for one in legs))
        assert prefill == [Piece(prefilled=True, cached_tokens=CACHED)]
        assert [token for piece in decode for token in piece.token_ids] == [500, 501, 502]
        assert all(first.items() <= body.items() for body in server.bodies)

    with_engine(sglang, test)


def test_only_a_prefill_worker_of_sglang_has_a_meeting_point() -> None:
    async def test(server: FakeSglang, engine: Sglang) -> None:
        del server.info["disaggregation_bootstrap_port"]
        await engine.ready(LIMIT_S)
        with pytest.raises(CapabilityError, match="no prefill worker"):
            engine.meeting_point()

    with_engine(sglang, test)


def test_trtllm_generates_from_what_the_context_server_left() -> None:
    async def test(server: FakeTrtllm, engine: Engine) -> None:
        (left,) = await all_of(engine, leg(leg=Leg.PREFILL))
        await all_of(engine, leg(leg=Leg.DECODE, handoff=left.handoff))
        asked, taken = (body["disaggregated_params"] for body in server.bodies)
        assert asked == {"request_type": "context_only"}
        assert taken == {"request_type": "generation_only", "ctx_request_id": 7, "first_gen_tokens": [500]}

    with_engine(trtllm, test)


def test_trtllm_refuses_what_it_would_leave_out() -> None:
    async def test(server: FakeTrtllm, engine: Engine) -> None:
        with pytest.raises(LegFailed, match="cache salts") as failed:
            await all_of(engine, leg(cache_salt="s"))
        assert failed.value.refused
        assert server.bodies == []

    with_engine(trtllm, test)


@KINDS
def test_a_grammar_that_an_engine_has_not_is_refused_by_name(kind: Callable[[], Made]) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        with pytest.raises(LegFailed, match="no grammar of kind haiku; it has json") as failed:
            await all_of(engine, leg(sampling=Sampling(grammar={"haiku": "5-7-5"})))
        assert failed.value.refused
        assert server.bodies == []

    with_engine(kind, test)


@KINDS
def test_an_engine_too_busy_to_tell_its_load_says_nothing(kind: Callable[[], Made]) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        await server.__aexit__()
        assert await engine.load() is None

    with_engine(kind, test)


@pytest.mark.parametrize(("does", "cause"), [("abort", LossCause.SHUTDOWN), ("endless", LossCause.INCOMPLETE)])
def test_a_prefill_that_ends_badly_is_no_prefill(does: str, cause: LossCause) -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        server.does = does
        with pytest.raises(LegFailed) as failed:
            await all_of(engine, leg(leg=Leg.PREFILL))
        assert failed.value.cause is cause

    with_engine(vllm, test)


# ---------------------------------------------------------------- failures

FAILURES = [
    ("busy", LossCause.OVERLOAD, True),
    ("refuse", LossCause.ENGINE_ERROR, True),
    ("crash", LossCause.ENGINE_ERROR, False),
    ("hang", LossCause.RESPONSE_TIMEOUT, False),
    ("stall", LossCause.RESPONSE_TIMEOUT, False),
    ("cut", LossCause.DISCONNECTED, False),
    ("endless", LossCause.INCOMPLETE, False),
    ("error", LossCause.ENGINE_ERROR, False),
    ("babble", LossCause.INCOMPLETE, False),
]
assert {does for does, _, _ in FAILURES} | {"abort"} == set(MISDEEDS)


@KINDS
@pytest.mark.parametrize(("does", "cause", "refused"), FAILURES)
def test_each_way_to_fail_has_a_name(kind: Callable[[], Made], does: str, cause: LossCause, refused: bool) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        server.does = does
        with pytest.raises(LegFailed) as failed:
            await all_of(engine, leg())
        assert (failed.value.cause, failed.value.refused) == (cause, refused)
        assert failed.value.reason.startswith("w0: ")

    with_engine(kind, test, SHORT)


@pytest.mark.parametrize(
    ("kind", "cause"), [(vllm, LossCause.SHUTDOWN), (sglang, LossCause.SHUTDOWN), (trtllm, LossCause.ENGINE_ERROR)]
)
def test_status_200_with_an_abort_is_a_failure(kind: Callable[[], Made], cause: LossCause) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        server.does = "abort"
        async with aclosing(engine.generate(leg())) as pieces:
            assert (await anext(pieces)).token_ids == (500,)
            with pytest.raises(LegFailed) as failed:
                await anext(pieces)
        assert failed.value.cause is cause

    with_engine(kind, test)


@KINDS
def test_who_cannot_be_reached_is_named(kind: Callable[[], Made]) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        await server.__aexit__()
        with pytest.raises(LegFailed) as failed:
            await all_of(engine, leg())
        assert failed.value.cause is LossCause.CONNECT
        assert not await engine.alive()

    with_engine(kind, test)


# ---------------------------------------------------------------- stopping


@KINDS
def test_closing_an_answer_leaves_the_engine_and_tells_it(kind: Callable[[], Made]) -> None:
    async def test(server: FakeEngine, engine: Engine) -> None:
        server.does = "stall"
        async with aclosing(engine.generate(leg())) as pieces:
            assert (await anext(pieces)).token_ids == (500,)
        await server.left.wait()
        assert server.aborted == {FakeVllm: ["cmpl-ours-1-0"], FakeSglang: ["ours-1"], FakeTrtllm: []}[type(server)]

    with_engine(kind, test)


def test_a_leg_past_its_deadline_is_aborted_too() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        server.does = "hang"
        with pytest.raises(LegFailed):
            await all_of(engine, leg())
        await server.left.wait()
        assert server.aborted == ["cmpl-ours-1-0"]

    with_engine(vllm, test, SHORT)


def test_a_cancelled_task_stops_its_leg() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        server.does = "hang"
        task = asyncio.create_task(all_of(engine, leg()))
        await server.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.left.wait()
        assert server.aborted == ["cmpl-ours-1-0"]

    with_engine(vllm, test)


def test_vllm_without_its_abort_route_is_left_by_disconnecting() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        assert Ability.ABORT in engine.abilities
        server.aborts = False
        await engine.ready(LIMIT_S)
        assert Ability.ABORT not in engine.abilities
        await engine.abort("ours-1")
        assert server.aborted == []

    with_engine(vllm, test)


# ---------------------------------------------------------------- what engines say of themselves


def test_facts_of_vllm() -> None:
    async def test(_: FakeVllm, engine: Engine) -> None:
        facts = await engine.ready(LIMIT_S)
        assert (facts.engine, facts.version, facts.role) == ("vllm", "0.32.0", Role.DECODE)
        assert (facts.models, facts.loras) == (("tiny",), ("poems",))
        assert (facts.block_size, facts.total_blocks, facts.context_tokens) == (32, 100, 4096)
        assert (facts.max_num_seqs, facts.max_batched_tokens) == (64, 1024)

    with_engine(vllm, test, role=Role.DECODE, max_batched_tokens=1024)


def test_facts_of_sglang() -> None:
    async def test(_: FakeSglang, engine: Engine) -> None:
        facts = await engine.ready(LIMIT_S)
        assert (facts.engine, facts.version, facts.models) == ("sglang", "0.5.23", ("tiny",))
        assert (facts.block_size, facts.total_blocks, facts.context_tokens) == (32, 100, 4096)
        assert (facts.max_num_seqs, facts.max_batched_tokens) == (16, 1024)

    with_engine(sglang, test, max_num_seqs=None)


def test_an_engine_that_does_not_say_enough_is_an_error() -> None:
    with pytest.raises(EngineError, match="give max_num_seqs"):
        with_engine(vllm, lambda server, engine: asyncio.sleep(0), max_num_seqs=None)


def test_an_engine_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    async def test() -> None:
        command = [sys.executable, "-c", "raise SystemExit('out of memory')"]
        process = await EngineProcess.start("w0", command, tmp_path / "log")
        engine = Vllm(Attached(name="w0", url="http://127.0.0.1:9", process=process), AMPLE)
        with pytest.raises(EngineError, match=r"ended with status 1[^$]*out of memory"):
            await engine.ready(LIMIT_S)
        assert not await engine.alive()
        await engine.close()

    asyncio.run(test())


def test_an_engine_that_does_not_become_ready_is_given_up() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        server.health = 503
        assert not await engine.alive()
        with pytest.raises(EngineError, match=r"not ready after 0\.01 s"):
            await engine.ready(0.01)

    with_engine(vllm, test)


def test_gauges_of_an_idle_vllm_are_as_old_as_its_last_step() -> None:
    async def test(server: FakeVllm, engine: Engine) -> None:
        server.running, server.waiting, server.usage, server.steps = 2, 1, 0.25, 10
        first = await engine.load()
        assert first is not None
        assert (first.running, first.waiting, first.active_blocks, first.cached_blocks) == (2, 1, 25, 0)
        again = await engine.load()
        server.steps, server.late = server.steps + 1, 2
        stepped = await engine.load()
        assert again is not None
        assert stepped is not None
        assert (again.late_fetches, stepped.late_fetches) == (0, 2)
        assert first.measured_s == again.measured_s < stepped.measured_s

    with_engine(vllm, test)


def test_loads_of_sglang_and_trtllm() -> None:
    async def of_sglang(_: FakeSglang, engine: Engine) -> None:
        load = await engine.load()
        assert load is not None
        assert (load.running, load.waiting, load.active_blocks) == (3, 2, 3)

    async def of_trtllm(server: FakeTrtllm, engine: Engine) -> None:
        assert await engine.load() is None
        stats = {"numActiveRequests": 3, "numQueuedRequests": 2, "kvCacheStats": {"usedNumBlocks": 9}}
        server.iterations = [stats | {"numActiveRequests": 1}, stats]
        load = await engine.load()
        assert load is not None
        assert (load.running, load.waiting, load.active_blocks) == (3, 2, 9)

    with_engine(sglang, of_sglang)
    with_engine(trtllm, of_trtllm)


# ---------------------------------------------------------------- KV events

BLOCK = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 32,
    "medium": "GPU",
}


def test_vllm_tells_where_its_events_are() -> None:
    async def test(server: FakeVllm, engine: Vllm) -> None:
        posted: asyncio.Queue[Event] = asyncio.Queue()
        assert engine.follow(WorkerId(4), 2, posted.put_nowait) is None
        async with FakePublisher() as publisher:
            source = publisher.source()
            server.sources = {
                "0": {
                    "enable_kv_cache_events": True,
                    "endpoint": source.endpoint.replace("127.0.0.1", "*"),
                    "replay_endpoint": source.replay,
                    "topic": source.topic,
                }
            }
            await publisher.publish(BLOCK)
            await engine.ready(LIMIT_S)
            follower = engine.follow(WorkerId(4), 2, posted.put_nowait)
            event = await posted.get()
            assert isinstance(event, KvStored)
            assert (event.worker_id, event.epoch, event.event_id) == (4, 2, 0)
            load = await engine.load()
            assert load is not None
            assert load.cached_blocks == 1
            assert follower is not None
            await follower.close()

    with_engine(vllm, test)


def test_sglang_tells_where_its_events_are() -> None:
    async def test(server: FakeSglang, engine: Sglang) -> None:
        posted: asyncio.Queue[Event] = asyncio.Queue()
        assert engine.follow(WorkerId(4), 0, posted.put_nowait) is None
        async with FakePublisher() as publisher:
            source = publisher.source()
            ports = [int(str(end).rsplit(":", 1)[1]) for end in (source.endpoint, source.replay)]
            server.info["kv_events"] = {
                "endpoint_port_base": ports[0],
                "replay_endpoint_port_base": ports[1],
                "topic": source.topic,
                "block_size": 32,
                "dp_size": 1,
            }
            await publisher.publish(BLOCK)
            await engine.ready(LIMIT_S)
            follower = engine.follow(WorkerId(4), 0, posted.put_nowait)
            assert isinstance(await posted.get(), KvStored)
            assert follower is not None
            await follower.close()

    with_engine(sglang, test)


def test_trtllm_events_are_drained() -> None:
    async def test(server: FakeTrtllm, engine: Trtllm) -> None:
        tokens = [{"token_id": n, "token_extra_id": 0} for n in range(32)]
        data = {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": tokens}]}
        server.events = [{"event_id": 0, "data": data}]
        posted: asyncio.Queue[Event] = asyncio.Queue()
        follower = engine.follow(WorkerId(4), 0, posted.put_nowait)
        assert isinstance(await posted.get(), KvStored)
        assert server.events == []
        assert follower is not None
        await follower.close()

    with_engine(trtllm, test)
