"""The live world by itself: ends, deadlines, losses, drains, hand-offs; mock engines on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from live_builders import First, Live, live, tokens_of

from executors.backend import End
from executors.deadlines import Deadlines
from executors.engines.protocol import LegFailed, Load
from executors.leases import LeaseKey, LeaseState, LeaseTerms
from executors.live_worker import Upkeep
from policies.cluster.actions import SetTimer
from policies.cluster.events import RequestArrived, RequestInterrupted, TimerFired, WorkerLost
from policies.cluster.ids import LossCause, RequestId, Role, WorkerId
from policies.errors import ConfigError, EngineError
from policies.resilience.migration import Migration, MigrationSettings
from twin.config import Config
from twin.deciding import build_legs
from twin.routing import router_settings


def migrating() -> list:
    return [First(), Migration(MigrationSettings(limit=3, max_seq_len=None))]


def test_an_answer_comes_token_by_token_at_the_engines_pace() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 100, 4)
        came = [(delta.at_s, len(delta.token_ids)) async for delta in stream]
        assert came == [(pytest.approx(at_s), 1) for at_s in (0.1, 0.11, 0.12, 0.13)]
        assert stream.end is not None
        assert (stream.end.outcome, stream.end.output_tokens) == ("length", 4)
        assert stream.end.timing["ttft_s"] == pytest.approx(0.1)
        assert it.log.names() == ["WorkerUp", "RequestArrived", "FirstToken", "RequestFinished"]

    live(main)


def test_a_reader_that_is_late_gets_everything_once() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 10, 50)
        await it.until(0.2)
        tokens = await tokens_of(stream)
        assert len(tokens) == 50
        assert tokens == await tokens_of(it.ask("b", 10, 50))  # the same prompt says the same

    live(main)


def test_c22_when_the_client_leaves_the_engine_stops() -> None:
    """TOY-serial: the second request has its token after 355 to 360 ms, not after 10,140."""

    async def main(it: Live) -> None:
        it.ask("1", 100, 1000)
        it.at(0.05, lambda: it.ask("2", range(5000, 5100), 1))
        it.at(0.305, lambda: it.world.cancel(it.log.events[1].request_id))  # type: ignore[attr-defined]
        await it.until(1.0)
        first, second = it.ends["1"], it.ends["2"]
        assert (first.outcome, first.output_tokens) == ("cancelled", 21)
        assert 0.355 <= second.timing["ttft_s"] <= 0.360
        load = await it.engines[0].load()
        assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)

    live(main, max_num_seqs=1)


def test_c22_a_client_that_leaves_during_prefill_leaves_nothing_behind() -> None:
    async def main(it: Live) -> None:
        it.ask("1", 1000, 10)
        it.at(0.02, lambda: it.world.cancel(it.log.events[1].request_id))  # type: ignore[attr-defined]
        await it.until(2.0)
        assert (it.ends["1"].outcome, it.ends["1"].output_tokens) == ("cancelled", 0)
        load = await it.engines[0].load()
        assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)

    live(main)


def test_c21_an_answer_goes_on_elsewhere_and_no_token_is_lost_or_told_twice() -> None:
    async def main(it: Live) -> None:
        whole = await tokens_of(it.ask("whole", 100, 20))
        begun_s = it.clock.now()
        stream = it.ask("moved", 100, 20)
        it.at(begun_s + 0.07, lambda: it.world.fleet.lose(it.world.fleet.workers[WorkerId(0)], "killed"))
        assert await tokens_of(stream) == whole
        assert stream.end is not None
        assert (stream.end.migrations, stream.end.output_tokens) == (1, 20)
        assert stream.end.worker == "w1"
        names = it.log.names()
        assert names.index("WorkerLost") < names.index("RequestInterrupted") < names.index("RequestMigrated")

    live(main, migrating(), roles=(Role.MIXED, Role.MIXED))


def test_a_request_that_may_not_go_on_fails_by_name_and_is_never_merely_short() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 100, 20)
        it.at(0.15, lambda: it.world.fleet.lose(it.world.fleet.workers[WorkerId(0)], "killed"))
        tokens = await tokens_of(stream)
        assert stream.end is not None
        assert (stream.end.outcome, stream.end.output_tokens) == ("failed", len(tokens))
        assert stream.end.code

    live(main, [First(), Migration(MigrationSettings(limit=0, max_seq_len=None))])


def test_what_an_engine_refuses_is_rejected_with_its_reason() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("long", 900, 5)
        assert await tokens_of(stream) == []
        assert stream.end is not None
        assert stream.end.outcome == "rejected"
        assert "900" in stream.end.reason

    live(main, max_model_len=500)


class Told:
    """What a follower knows of its publisher's silence."""

    def __init__(self, heard_s: Callable[[], float | None]) -> None:
        self._heard_s = heard_s

    @property
    def heard_s(self) -> float | None:
        return self._heard_s()

    def ask(self, action: object) -> None: ...

    async def stands(self, deadline_s: float) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("publisher", "first_token_s", "lost_s"),
    [
        ("hangs", 40.0, 30.0),
        ("hangs", 10.0, 30.0),  # the request has gone elsewhere by then, and was never answered
        ("tells", 40.0, None),
        ("cannot be asked", 40.0, None),
        ("answered", 40.0, None),
    ],
)
def test_a_worker_is_lost_when_requests_and_kv_events_are_both_silent_though_it_looks_healthy(
    publisher: str, first_token_s: float, lost_s: float | None
) -> None:
    """L9: the server in front of a hung engine answers for its health."""

    async def main(it: Live) -> None:
        fleet = it.world.fleet
        fleet.upkeep = Upkeep(health_every_s=1.0, silent_s=30.0)
        worker = fleet.workers[WorkerId(0)]
        said = {"hangs": lambda: 0.0, "answered": lambda: 0.0, "tells": it.clock.now, "cannot be asked": lambda: None}
        worker.follower = Told(said[publisher])
        worker.tasks.append(it.world.spawn(fleet._look_after(worker)))
        if publisher != "answered":
            it.engines[0]._next = lambda: None  # type: ignore[method-assign]  # its next step never ends
        stream = it.ask("a", 100, 5)
        await tokens_of(stream)
        await it.until(60.5)
        lost = [event for event in it.log.events if isinstance(event, WorkerLost)]
        assert [event.at_s for event in lost] == ([] if lost_s is None else [lost_s])
        if lost:
            assert lost[0].reason == "neither requests nor KV events were answered for 30 s"

    policies = [First(), Migration(MigrationSettings(limit=0, max_seq_len=None))]
    live(main, policies, deadlines=Deadlines(first_token_s=first_token_s))


def test_an_engine_that_says_nothing_is_left_at_our_own_deadline() -> None:
    async def main(it: Live) -> None:
        it.engines[0]._next = lambda: None  # type: ignore[method-assign]  # its next step never ends
        stream = it.ask("a", 100, 5)
        await tokens_of(stream)
        assert stream.end is not None
        assert (stream.end.outcome, it.clock.now()) == ("failed", pytest.approx(3.0))
        interrupted = next(event for event in it.log.events if isinstance(event, RequestInterrupted))
        assert interrupted.reason == "worker w0 did not make its first token within 3 s"

    live(
        main, [First(), Migration(MigrationSettings(limit=0, max_seq_len=None))], deadlines=Deadlines(first_token_s=3.0)
    )


def test_a_requests_own_deadline_ends_it() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 100, 1000, total_s=0.5)
        await tokens_of(stream)
        assert stream.end is not None
        assert (stream.end.outcome, stream.end.code) == ("failed", "deadline_exceeded")
        assert it.clock.now() == pytest.approx(0.5)

    live(main)


def test_a_drained_worker_ends_its_work_first_and_gets_nothing_new() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 100, 20)
        it.at(0.15, lambda: it.world.fleet.drain(WorkerId(0)))
        it.at(0.16, lambda: it.ask("b", 10, 1))
        assert len(await tokens_of(stream)) == 20
        await it.until(1.0)
        assert it.ends["b"].worker == "w1"
        lost = [event for event in it.log.events if isinstance(event, WorkerLost)]
        assert [(event.worker_id, event.reason) for event in lost] == [(0, "drained")]
        assert it.ends["a"].outcome == "length"

    live(main, roles=(Role.MIXED, Role.MIXED))


def test_a_worker_may_be_recalled_while_it_drains() -> None:
    async def main(it: Live) -> None:
        it.ask("a", 100, 20)
        it.at(0.15, lambda: it.world.fleet.drain(WorkerId(0)))
        it.at(0.16, lambda: it.world.fleet.recall(WorkerId(0)))
        it.at(0.17, lambda: it.ask("b", 10, 1))
        await it.until(1.0)
        assert it.ends["b"].worker == "w0"
        assert "WorkerLost" not in it.log.names()

    live(main)


def test_a_worker_that_comes_back_is_another_one() -> None:
    async def main(it: Live) -> None:
        it.world.fleet.lose(it.world.fleet.workers[WorkerId(0)], "killed")
        it.add(0)
        assert await tokens_of(it.ask("a", 10, 3))
        ups = [event for event in it.log.events if type(event).__name__ == "WorkerUp"]
        assert [event.epoch for event in ups] == [0, 1]  # type: ignore[attr-defined]

    live(main)


def test_a_worker_with_other_blocks_than_the_router_is_refused() -> None:
    class Reads(First):
        from policies.cluster.events import BlocksStored

        subscribes = First.subscribes | {BlocksStored}

        def decide(self, event, view):  # type: ignore[no-untyped-def]
            return super().decide(event, view) if isinstance(event, RequestArrived) else ()

    async def main(it: Live) -> None:
        with pytest.raises(ConfigError, match="KV blocks of 32 tokens and the router of 16"):
            it.add(1, block_size=32)

    live(main, [Reads()])


def split() -> list:
    legs = build_legs(Config(), router_settings(Config(), 16), {})
    return [legs, Migration(MigrationSettings(limit=3, max_seq_len=None))]


def test_a_prompt_is_computed_in_one_place_and_answered_in_another_alike() -> None:
    async def main(it: Live) -> list[int]:
        stream = it.ask("a", 100, 20)
        tokens = await tokens_of(stream)
        assert stream.end is not None
        assert (stream.end.worker, stream.end.prefill_worker) == ("w1", "w0")
        assert stream.end.timing["ttft_s"] == pytest.approx(0.11)  # the prompt, then the first decode step
        assert it.log.names()[2:] == ["RequestArrived", "PrefillDone", "FirstToken", "RequestFinished"]
        for engine in it.engines:
            load = await engine.load()
            assert (load.running, load.active_blocks) == (0, 0)
        return tokens

    async def whole(it: Live) -> list[int]:
        return await tokens_of(it.ask("a", 100, 20))

    assert live(main, split(), roles=(Role.PREFILL, Role.DECODE)) == live(whole)


@pytest.mark.parametrize("at_s", [0.05, 0.105, 0.155])
def test_when_the_client_of_a_split_request_leaves_both_workers_are_free(at_s: float) -> None:
    async def main(it: Live) -> None:
        it.ask("a", 100, 50)
        it.at(at_s, lambda: it.world.cancel(it.log.events[2].request_id))  # type: ignore[attr-defined]
        await it.until(2.0)
        assert it.ends["a"].outcome == "cancelled"
        for engine in it.engines:
            load = await engine.load()
            assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)

    live(main, split(), roles=(Role.PREFILL, Role.DECODE))


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_a_split_request_survives_the_loss_of_either_worker(lost: str) -> None:
    async def main(it: Live) -> None:
        whole = await tokens_of(it.ask("whole", 100, 20))
        begun_s = it.clock.now()
        stream = it.ask("moved", 100, 20)

        def lose() -> None:
            request = it.world.open[RequestId("moved")]
            worker_id = request.prefill_worker_id if lost == "prefill" else request.worker_id
            it.world.fleet.lose(it.world.fleet.workers[worker_id], "killed")  # type: ignore[index]

        it.at(begun_s + (0.05 if lost == "prefill" else 0.15), lose)
        assert await tokens_of(stream) == whole
        assert stream.end is not None
        assert stream.end.migrations == 1

    live(main, split(), roles=(Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE))


def test_timers_are_set_replaced_and_fire_once() -> None:
    class Ticks(First):
        subscribes = First.subscribes | {TimerFired}
        fired: list[float] = []  # noqa: RUF012

        def decide(self, event, view):  # type: ignore[no-untyped-def]
            if isinstance(event, TimerFired):
                self.fired.append(event.at_s)
                return ()
            due = (SetTimer(reason="", name="t", due_s=event.at_s + after) for after in (1.0, 2.0))
            return (*super().decide(event, view), *due)

    async def main(it: Live) -> None:
        it.ask("a", 10, 1)
        await it.until(5.0)

    live(main, [Ticks()])
    assert Ticks.fired == [2.0]


def test_nothing_new_is_taken_on_the_way_out() -> None:
    async def main(it: Live) -> None:
        it.world.refusing = "the server is shutting down"
        stream = it.ask("a", 10, 1)
        assert await tokens_of(stream) == []
        assert stream.end == End(
            outcome="rejected", output_tokens=0, reason="the server is shutting down", code="draining"
        )

    live(main)


def test_a_loop_in_which_nothing_can_happen_says_so_instead_of_hanging() -> None:
    async def main(it: Live) -> None:
        it.engines[0]._next = lambda: None  # type: ignore[method-assign]
        await tokens_of(it.ask("a", 10, 1))

    with pytest.raises(EngineError, match="nothing is left to happen"):
        live(main, deadlines=Deadlines(first_token_s=None, between_tokens_s=None))


def test_a_refusal_for_want_of_room_interrupts_and_does_not_reject() -> None:
    async def main(it: Live) -> None:
        stream = it.ask("a", 10, 3)
        request = it.world.open[it.log.events[1].request_id]  # type: ignore[attr-defined]
        (leg,) = request.legs.values()
        worker = it.world.fleet.workers[WorkerId(0)]
        it.world.legs.failed(request, leg, worker, LegFailed(LossCause.OVERLOAD, "full", refused=True))
        await tokens_of(stream)
        assert "RequestInterrupted" in it.log.names()

    live(main, [First(), Migration(MigrationSettings(limit=0, max_seq_len=None))])


def leased(lease_s: float) -> LeaseTerms:
    return LeaseTerms.of(lease_s, health_period_s=0.01)


def test_kv_that_is_fetched_in_time_is_fetched_once() -> None:
    async def main(it: Live) -> None:
        assert len(await tokens_of(it.ask("a", 100, 20))) == 20
        counts = it.world.ledger.counts()
        assert (counts["granted"], counts["ever_sent"], counts["fetched"], counts["refused"]) == (1, 1, 1, 0)

    live(main, split(), roles=(Role.PREFILL, Role.DECODE), lease=leased(10.0))


def test_kv_past_its_lease_is_never_asked_for_and_the_prompt_is_computed_again() -> None:
    """The prompt takes as long as the lease, which counts from before its answer: nothing may be sent."""

    async def main(it: Live) -> list[int]:
        stream = it.ask("a", 200, 5)
        tokens = await tokens_of(stream)
        assert stream.end is not None
        assert stream.end.timing["ttft_s"] == pytest.approx(0.4)  # the prompt once more, by the one who answers
        counts = it.world.ledger.counts()
        assert (counts["ever_sent"], counts["refused"], counts["expired"]) == (0, 1, 1)
        return tokens

    async def whole(it: Live) -> list[int]:
        return await tokens_of(it.ask("a", 200, 5))

    assert live(main, split(), roles=(Role.PREFILL, Role.DECODE), lease=leased(0.2)) == live(whole)


def test_prompts_that_would_outlast_their_lease_in_a_workers_queue_wait_in_front_of_it() -> None:
    """Thirty prompts of 0.5 s each at once and a lease of 4 s: none is computed twice, and none waits longer for it."""

    async def main(it: Live) -> None:
        for number in range(30):
            it.ask(str(number), range(1000 * number + 5000, 1000 * number + 5500), 2)
        assert it.world.legs.gate.waiting(WorkerId(0)) == 28
        await it.until(20.0)
        counts = it.world.ledger.counts()
        assert (counts["granted"], counts["fetched"], counts["refused"], counts["expired"]) == (30, 30, 0, 0)
        assert len(it.ends) == 30
        assert max(end.timing["ttft_s"] for end in it.ends.values()) == pytest.approx(15.0, abs=0.1)
        assert it.world.legs.gate.waiting(WorkerId(0)) == 0

    live(main, split(), roles=(Role.PREFILL, Role.DECODE), lease=leased(4.0), max_num_batched_tokens=512)


def test_a_client_that_leaves_in_front_of_a_worker_makes_room_for_the_next() -> None:
    async def main(it: Live) -> None:
        for number in range(6):
            it.ask(str(number), range(1000 * number + 5000, 1000 * number + 5500), 2)
        it.at(0.2, lambda: [it.world.cancel(RequestId(name)) for name in ("0", "3", "4")])
        await it.until(5.0)
        assert {name: end.outcome for name, end in it.ends.items()} == {
            **dict.fromkeys("034", "cancelled"),
            **dict.fromkeys("125", "length"),
        }
        assert it.world.ledger.counts()["granted"] == 3
        load = await it.engines[0].load()
        assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)

    live(main, split(), roles=(Role.PREFILL, Role.DECODE), lease=leased(10.0), max_num_batched_tokens=512)


def test_the_deadline_of_a_prefill_that_waits_in_front_of_its_worker_is_ours_too() -> None:
    async def main(it: Live) -> None:
        for number in range(4):
            it.ask(str(number), range(1000 * number + 5000, 1000 * number + 5500), 2)
        await it.until(30.0)
        late = [event for event in it.log.events if isinstance(event, RequestInterrupted)]
        assert [(one.request_id, one.at_s, one.cause) for one in late[:2]] == [
            ("2", 1.2, LossCause.RESPONSE_TIMEOUT),  # under way
            ("3", 1.2, LossCause.RESPONSE_TIMEOUT),  # in front of it
        ]
        assert len(it.ends) == 4
        assert it.world.legs.gate.waiting(WorkerId(0)) == 0

    deadlines = Deadlines(first_token_s=1.2)
    live(
        main,
        split(),
        roles=(Role.PREFILL, Role.DECODE),
        lease=leased(10.0),
        max_num_batched_tokens=512,
        deadlines=deadlines,
    )


def test_the_loss_of_the_worker_that_holds_kv_voids_it() -> None:
    """The only decode worker has no room, so the KV of the second prompt is still on its prefill worker."""

    async def main(it: Live) -> None:
        it.ask("a", 100, 200)
        it.at(1.6, lambda: it.ask("b", range(5000, 5100), 3))
        await it.until(1.75)
        held = it.world.ledger.counts()
        assert held["granted"] == 2
        assert held["held"] + held["sent"] == 1
        request = it.world.open[RequestId("b")]
        it.world.fleet.lose(it.world.fleet.workers[request.prefill_worker_id], "killed")  # type: ignore[index]
        counts = it.world.ledger.counts()
        assert counts["held"] == 0
        assert counts["void"] == held["held"] + held["sent"]
        await it.until(20.0)
        assert {name: end.output_tokens for name, end in it.ends.items()} == {"a": 200, "b": 3}
        assert sum(it.world.ledger.counts()[state.value] for state in LeaseState) == it.world.ledger.granted

    live(main, split(), roles=(Role.PREFILL, Role.DECODE, Role.PREFILL), lease=leased(10.0), blocks=22)


def test_whoever_may_have_kv_that_was_not_its_own_any_more_is_told_no_further_token() -> None:
    """An engine answers parameters past their lease, with another's KV: a late fetch fails who may have had it."""

    async def main(it: Live) -> None:
        worker = it.world.fleet.workers[WorkerId(0)]
        late = [3]  # what it counted before we came is nobody's of ours

        async def load() -> Load:
            return Load(measured_s=0, running=0, waiting=0, active_blocks=0, cached_blocks=0, late_fetches=late[0])

        it.engines[0].load = load  # type: ignore[method-assign]
        taken, other = it.ask("taken", 100, 1000), it.ask("other", range(5000, 5100), 100)
        key = LeaseKey(worker.worker_id, worker.up.epoch, "leg")
        it.world.ledger.grant(key, RequestId("taken"), 0.0, LeaseTerms.of(60, health_period_s=1))
        assert it.world.ledger.send(key, worker.worker_id, 0.0) is None
        reporting = asyncio.ensure_future(it.world.fleet._report(worker))
        await it.until(3.0)
        assert taken.end is None
        late.insert(0, 4)
        await it.until(6.0)
        assert taken.end is not None
        assert (taken.end.outcome, taken.end.code) == ("failed", "stale_kv")
        await it.until(8.0)
        assert other.end is not None
        assert other.end.outcome == "length"
        reporting.cancel()

    live(main)
