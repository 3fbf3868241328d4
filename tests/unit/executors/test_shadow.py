"""A live cluster with its shadow: it predicts what the same engines do, and nothing of it reaches serving."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from executors.assemble import Host, LiveCluster, live_config
from executors.backend import STOP_STRING, Ask
from executors.clock import Clock, Order, WallClock
from executors.shadow import watch
from executors.shadow.figures import Window
from executors.shadow.watch import Shadow, Wanted
from executors.starter import Model
from executors.virtual import VirtualClock, run
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import ConfigError
from reports.compare import compare
from twin.config import Config
from twin.config_read import load
from twin.engine.ticks import instant
from twin.mocker.sinks import MemorySinks
from twin.shadow.ahead import Ahead
from twin.shadow.facts import Batch, Latency, Pair, Progress

POOL = """
[[workers]]
count = 2
model = "llama-3.1-8b"
gpu = "h100_sxm"
"""
ROUTERS = {
    "round robin": "",
    "kv": '[router]\nmode = "kv"\n',
    "kv with a queue": '[router]\nmode = "kv"\n[router.queue]\nprefill_busy_tokens = 3000\n',
}
PATIENCE_S = 60.0


def config_of(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, {}, ("allow_no_effect=true",))


def host(record: Path | None = None) -> Host:
    return Host(model=Model(checkpoint="", served_as="tiny"), mock=True, pythons={}, attached={}, record=record)


class InProcess:
    """What the process does, in this one: `executors.shadow.child.Child`."""

    pid = 0

    def __init__(self, config: Config, wait_s: float = 60.0) -> None:
        self.ahead = Ahead(config, MemorySinks(), wait_s)
        self.pairs: list[Pair] = []

    async def answer(self, batch: Batch) -> Progress:
        told = self.ahead.take(batch.facts, batch.now_s)
        self.pairs += told.pairs
        if batch.over:
            told = self.ahead.finish(batch.now_s)
            self.ahead.world.audit()
            self.pairs += told.pairs
        return told

    async def end(self, within_s: float) -> None: ...

    async def kill(self) -> None: ...


def ask(number: int, tokens: int, out: int) -> Ask:
    """A third of the prompts share a beginning."""
    ids = [number % 3, *range(tokens)] if number % 3 else range(number * 10_000, number * 10_000 + tokens)
    return Ask(request_id=RequestId(f"r{number}"), token_ids=ids, max_tokens=out, model="tiny")


@pytest.mark.parametrize("router", ROUTERS)
def test_of_mock_engines_under_one_clock_it_predicts_what_is_measured(tmp_path: Path, router: str) -> None:
    """The live world and the simulated one are the same to the instant, so the shadow of the one is the other: a
    difference would be something that the shadow was not told, or was told wrongly."""
    rng = random.Random(4)
    config = config_of(tmp_path, POOL + ROUTERS[router])

    async def main(clock: VirtualClock) -> list[Pair]:
        served, _ = live_config(config, host())
        child = InProcess(served)
        cluster = LiveCluster(config, host(), clock, Shadow(child, clock, Wanted()))  # type: ignore[arg-type]
        await cluster.start()
        at_s = 0.0
        for number in range(200):
            at_s = instant(at_s + rng.expovariate(30.0) + 1e-6)
            asked = ask(number, rng.randrange(10, 3000), rng.randrange(1, 120))
            clock.call_at(at_s, Order.ARRIVAL, lambda asked=asked: cluster.service.submit(asked))
        over = asyncio.Event()
        clock.call_at(at_s + 30.0, Order.TIMER, over.set)
        await over.wait()
        seen = cluster.service.shadow()
        assert seen is not None
        assert (seen.compared_total, dict(seen.left_out), seen.dropped_total) == (200, {}, 0)
        assert seen.metrics["ttft"].drift == pytest.approx(1.0, abs=1e-9)
        await cluster.close()
        return child.pairs

    pairs = run(main)
    assert len(pairs) == 200
    assert [pair.predicted for pair in pairs] == [pair.measured for pair in pairs]


def test_who_leaves_and_who_is_stopped_are_told_apart(tmp_path: Path) -> None:
    config = config_of(tmp_path, POOL)

    async def main(clock: VirtualClock) -> tuple[list[Pair], dict[str, int]]:
        child = InProcess(live_config(config, host())[0])
        cluster = LiveCluster(config, host(), clock, Shadow(child, clock, Wanted()))  # type: ignore[arg-type]
        await cluster.start()
        for number, why in enumerate(("the client left", STOP_STRING)):
            answer = cluster.service.submit(ask(number, 100, 5000))
            clock.call_at(1.0, Order.COMMAND, lambda answer=answer, why=why: answer.cancel(why))
        over = asyncio.Event()
        clock.call_at(5.0, Order.TIMER, over.set)
        await over.wait()
        assert cluster.shadow is not None
        await cluster.close()
        return child.pairs, dict(cluster.shadow.glance().left_out)

    pairs, left_out = run(main)
    assert left_out == {"cancelled": 1}
    assert [pair.request_id for pair in pairs] == ["r1"]
    assert pairs[0].predicted == pairs[0].measured


def test_a_worker_that_is_lost_is_lost_to_both(tmp_path: Path) -> None:
    config = config_of(tmp_path, POOL)

    async def main(clock: VirtualClock) -> tuple[list[Pair], MemorySinks]:
        child = InProcess(live_config(config, host())[0])
        cluster = LiveCluster(config, host(), clock, Shadow(child, clock, Wanted()))  # type: ignore[arg-type]
        await cluster.start()
        fleet = cluster.world.fleet
        for number in range(20):
            clock.call_at(0.05 * number, Order.ARRIVAL, lambda n=number: cluster.service.submit(ask(n, 900, 400)))
        clock.call_at(0.8000005, Order.COMMAND, lambda: fleet.lose(fleet.workers[WorkerId(1)], "killed"))
        over = asyncio.Event()
        clock.call_at(60.0, Order.TIMER, over.set)
        await over.wait()
        await cluster.close()
        return child.pairs, child.ahead._sinks  # type: ignore[return-value]

    pairs, sinks = run(main)
    assert len(pairs) == 20
    assert [pair.predicted.gaps for pair in pairs] == [399] * 20
    assert sum(row[17] for row in sinks.requests.values()) > 3, "nothing was sent again"  # type: ignore[misc]
    after = {row[8] for row in sinks.requests.values() if row[3] > 0.81}  # type: ignore[operator]
    assert after == {0}


# ---------------------------------------------------------------- the process


def real(main: Coroutine[Any, Any, None]) -> None:
    """On a loop with a real clock: a test that hangs fails."""
    asyncio.run(asyncio.wait_for(main, PATIENCE_S))


async def shadowed(config: Config, wanted: Wanted, record: Path | None = None) -> tuple[LiveCluster, Shadow]:
    clock: Clock = WallClock(asyncio.get_running_loop())
    shadow = await Shadow.start(live_config(config, host())[0], clock, wanted)
    cluster = LiveCluster(config, host(record), clock, shadow)
    await cluster.start()
    return cluster, shadow


async def answered(cluster: LiveCluster, numbers: range) -> None:
    async def read(number: int) -> None:
        stream = cluster.service.submit(ask(number, 200, 3))
        tokens = [token async for delta in stream for token in delta.token_ids]
        assert len(tokens) == 3

    await asyncio.gather(*map(read, numbers))


def test_its_run_lies_beside_the_recorded_one_and_can_be_compared(tmp_path: Path) -> None:
    config = config_of(tmp_path, POOL + ROUTERS["kv"])
    record = tmp_path / "run"

    async def main() -> None:
        cluster, shadow = await shadowed(config, Wanted(record=record / "predicted"), record)
        await answered(cluster, range(20))
        left = cluster.service.submit(ask(20, 100, 5000))
        left.cancel("the client left")
        await cluster.close()
        seen = shadow.glance()
        assert (seen.up, seen.compared_total, dict(seen.left_out), seen.open) == (True, 20, {"cancelled": 1}, 0)
        assert set(seen.metrics) == {"ttft", "tpot", "e2e", "itl"}

    real(main())
    compared = compare(record, record / "predicted")
    assert compared.matched is not None
    assert (compared.matched.rows, compared.matched.same_status_share) == (21, 1.0)
    assert compared.matched.metrics[0].rows == 20


def test_when_it_dies_serving_goes_on_and_one_line_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, POOL)

    async def main() -> None:
        cluster, shadow = await shadowed(config, Wanted())
        await answered(cluster, range(2))
        os.kill(shadow.pid, signal.SIGKILL)
        await asyncio.wait({shadow._talking})
        await answered(cluster, range(2, 5))
        seen = shadow.glance()
        assert not seen.up
        assert seen.left_out["shadow_down"] >= 3
        assert seen.compared_total + seen.left_out["shadow_down"] == 5
        assert cluster.service.predicted() == {}
        await cluster.close()

    with caplog.at_level(logging.WARNING, logger="executors.shadow"):
        real(main())
    assert [record.getMessage() for record in caplog.records] == [
        "the shadow has ended (signal 9): serving goes on, without predictions"
    ]


def test_what_it_is_too_far_behind_for_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, takes no more than so many arrivals, and goes on with these when it wakes."""
    monkeypatch.setattr(watch, "BACKLOG", 6)
    config = config_of(tmp_path, POOL)

    async def main() -> None:
        cluster, shadow = await shadowed(config, Wanted())
        os.kill(shadow.pid, signal.SIGSTOP)
        try:
            await answered(cluster, range(10))
            seen = shadow.glance()
            assert (seen.dropped_total, seen.left_out, seen.open) == (4, {"dropped": 4}, 6)
            first_s = seen.lag_s
            await answered(cluster, range(10, 12))
            assert shadow.glance().lag_s > first_s
        finally:
            os.kill(shadow.pid, signal.SIGCONT)
        await cluster.close()
        seen = shadow.glance()
        assert (seen.up, seen.dropped_total, seen.compared_total, seen.open) == (True, 6, 6, 0)

    real(main())


def test_a_process_that_answers_no_more_is_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "END_S", 0.05)
    config = config_of(tmp_path, POOL)

    async def main() -> None:
        cluster, shadow = await shadowed(config, Wanted())
        os.kill(shadow.pid, signal.SIGSTOP)
        await answered(cluster, range(2))
        await cluster.close()
        with pytest.raises(ProcessLookupError):
            os.kill(shadow.pid, 0)

    real(main())
    assert any("the shadow was killed" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[workers]]\nmodel = "nobody-knows"\n', "nobody-knows"),
        ('[[workers]]\nmodel = "llama-3.1-70b"\ntp = 1\ngpu = "l40s"\n', "l40s"),
    ],
)
def test_a_configuration_that_cannot_be_simulated_is_refused(tmp_path: Path, text: str, why: str) -> None:
    config = config_of(tmp_path, text)

    async def main() -> None:
        with pytest.raises(ConfigError, match="--shadow: the configuration cannot be simulated: ") as refused:
            await Shadow.start(config, WallClock(asyncio.get_running_loop()), Wanted())
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)

    real(main())


# ---------------------------------------------------------------- figures


def pair(at_s: float, predicted: tuple[float, float, int], measured: tuple[float, float, int]) -> Pair:
    return Pair(RequestId("r"), at_s, Latency(*predicted), Latency(*measured))


def test_figures_are_those_of_the_window() -> None:
    """By hand: two requests, and one that ended too long ago."""
    window = Window(10.0)
    window.add(pair(1.0, (9.0, 9.0, 0), (9.0, 9.5, 1)))
    window.add(pair(20.0, (0.1, 1.1, 10), (0.2, 1.2, 5)))
    window.add(pair(21.0, (0.3, 3.3, 100), (0.2, 4.2, 100)))
    found = window.compared(26.0)
    assert window.count(26.0) == 2
    ttft = found["ttft"]
    assert (ttft.predicted.mean, ttft.predicted.p50, ttft.measured.mean) == pytest.approx((0.2, 0.2, 0.2))
    assert (ttft.drift, ttft.error) == pytest.approx((1.0, 0.5))
    assert found["itl"].predicted.mean == pytest.approx(4.0 / 110)
    assert found["itl"].measured.mean == pytest.approx(5.0 / 105)
    assert found["itl"].drift == pytest.approx((4.0 / 110) / (5.0 / 105))
    assert found["tpot"].predicted.mean == pytest.approx((0.1 + 0.03) / 2)
    assert found["e2e"].drift == pytest.approx(4.4 / 5.4)
    assert window.compared(60.0) == {}


def test_answers_of_one_token_have_no_gaps() -> None:
    window = Window(10.0)
    window.add(pair(1.0, (0.1, 0.1, 0), (0.2, 0.2, 0)))
    assert set(window.compared(2.0)) == {"ttft", "e2e"}
    assert window.series(2.0, 300)["itl_ms"] == []


def test_the_series_of_the_dashboard_stand_at_the_seconds_of_what_was_measured() -> None:
    window = Window(10.0)
    window.add(pair(100.0, (0.1, 2.1, 10), (0.5, 3.6, 10)))
    window.add(pair(100.2, (0.3, 2.3, 10), (0.5, 3.1, 10)))
    series = window.series(104.5, 300)
    assert series == {"ttft_ms": [(-4.5, 200.0)], "itl_ms": [(-1.5, 200.0)]}
    assert window.series(500.0, 300) == {"ttft_ms": [], "itl_ms": []}
