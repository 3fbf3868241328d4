"""The same trace, policies and engines in the simulated world and in the live one under a virtual clock: every event
and every order is the same, in the same order and at the same instants, as the journals of both say."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from simulate import KEY_TOKENS, RowsDemand, engine_settings, trace_row

from executors.backend import Ask, End
from executors.clock import Order
from executors.engines.mock import MockEngine
from executors.requests import OpenRequest
from executors.virtual import VirtualClock, run
from executors.world import LiveWorld, Watch
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import BlocksStored
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.journal import Header, Journal
from policies.resilience.migration import Migration, MigrationSettings
from twin.config_read import load
from twin.deciding import build_policy
from twin.engine.ticks import instant
from twin.mocker.clock import Order as Fault
from twin.mocker.demand import Row
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.perf.polynomial import PolynomialLatency
from twin.worker_spec import WorkerSpec

HEADER = Header(versions={}, config={}, seed=0, policies=())
ROUTERS = {
    "round robin": '[router]\nmode = "round-robin"\n',
    "kv": '[router]\nmode = "kv"\n',
    "kv with a queue": '[router]\nmode = "kv"\n[router.queue]\nprefill_busy_tokens = 300\n',
    "least loaded": '[router]\nmode = "least-loaded"\n',
}


def rows_of(seed: int, count: int) -> list[Row]:
    """Requests that share prefixes, no two at one instant."""
    rng = random.Random(seed)
    rows, at_s = [], 0.0
    for number in range(count):
        at_s = instant(at_s + rng.expovariate(40.0) + 1e-6)
        isl = rng.randrange(8, 400)
        keys = [rng.randrange(3) for _ in range(4)] + [number * 1000 + i for i in range(isl // KEY_TOKENS + 1)]
        osl = rng.randrange(1, 60)
        rows.append(trace_row(number, at_s, isl, osl, keys[: -(-isl // KEY_TOKENS)], max_tokens=osl))
    return rows


def journaled(policies: list) -> tuple[Controller, list[str]]:
    lines: list[str] = []
    journal = Journal(lambda text: lines.extend(text.splitlines()), HEADER)
    controller = Controller(policies, journal)
    controller.journal = journal  # type: ignore[attr-defined]
    return controller, lines


def policies_of(tmp_path: Path, router: str) -> list:
    path = tmp_path / "config.toml"
    path.write_text(f"seed = 3\n{router}", encoding="utf-8")
    return [build_policy(load(path), 16), Migration(MigrationSettings(limit=3, max_seq_len=None))]


def live(
    rows: list[Row], workers: int, policies: list, settings: object, kill_s: float | None = None, path_s: float = 0.0
) -> list[str]:
    """The rows through the live world; worker 1 dies at `kill_s`."""

    async def main(clock: VirtualClock) -> list[str]:
        controller, lines = journaled(policies)
        tree = ContentTree(KEY_TOKENS, 16)
        ends: dict[str, tuple[str, int]] = {}
        done = asyncio.Event()

        class Ends(Watch):
            def ended(self, request: OpenRequest, end: End) -> None:
                ends[request.ask.request_id] = (end.outcome, end.output_tokens)
                if len(ends) == len(rows):
                    done.set()

        world = LiveWorld(controller, clock, tree, hashes=False, watch=Ends())
        world.fleet.looks_after = False
        for number in range(workers):
            engine = MockEngine(
                f"w{number}",
                settings,  # type: ignore[arg-type]
                PolynomialLatency(1000 * 16),
                clock,
                worker_id=WorkerId(number),
                tree=tree,
                tell=world.post if controller.wants(BlocksStored) else None,
                path_s=path_s,
            )
            world.fleet.join(engine, engine.facts(), f"w{number}", "w", WorkerId(number))

        def arrive(row: Row) -> None:
            path = tree.path(row.keys, row.isl) if row.keys is not None else None
            ask = Ask(
                request_id=RequestId(row.request_id),
                token_ids=range(row.isl),
                max_tokens=row.max_tokens or row.osl,
                model="mock",
                path=path,
                out_tokens=row.osl,
            )
            world.submit(ask)  # nobody reads: what a stream holds would keep content alive that the other world lets go

        def kill() -> None:
            worker = world.fleet.workers[WorkerId(1)]
            world.fleet.lose(worker, "killed")

        if kill_s is not None:
            clock.call_at(kill_s, Order.COMMAND, kill)
        for row in rows:
            clock.call_at(row.arrival_s, Order.ARRIVAL, lambda row=row: arrive(row))
        await done.wait()
        assert ends == {row.request_id: ("length", row.osl) for row in rows}
        await world.close()
        controller.journal.flush()  # type: ignore[attr-defined]
        return lines

    return run(main)


def simulated(
    rows: list[Row], workers: int, policies: list, settings: object, kill_s: float | None = None, path_s: float = 0.0
) -> list[str]:
    """The rows through the simulated world."""
    controller, lines = journaled(policies)
    latency = PolynomialLatency(1000 * 16)
    world = MockWorld(
        controller=controller,
        workers=[
            WorkerSpec(worker_id=WorkerId(i), name=f"w{i}", settings=settings, latency=latency, path_s=path_s)  # type: ignore[arg-type]
            for i in range(workers)
        ],
        demand=RowsDemand(rows),
        sinks=MemorySinks(),
        router="test",
        loses_events=True,  # every message counts, so each is posted at its own instant and not with others
        key_tokens=KEY_TOKENS,
    )
    if kill_s is not None:
        world.call(kill_s, int(Fault.FAULT), lambda: world.churn.lose(WorkerId(1), "killed"))
    world.run()
    controller.journal.flush()  # type: ignore[attr-defined]
    return lines


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_both_worlds_post_the_same_events_and_order_the_same(tmp_path: Path, router: str) -> None:
    rows, settings = rows_of(7, 300), engine_settings()
    seen = simulated(rows, 3, policies_of(tmp_path, ROUTERS[router]), settings)
    assert len(seen) > 3 * len(rows)
    same(live(rows, 3, policies_of(tmp_path, ROUTERS[router]), settings), seen)


def test_both_worlds_lose_a_worker_and_send_its_requests_again_alike(tmp_path: Path) -> None:
    rows, settings = rows_of(11, 200), engine_settings()
    seen = simulated(rows, 3, policies_of(tmp_path, ROUTERS["kv"]), settings, kill_s=2.0000005)
    assert sum('"type":"RequestMigrated"' in line for line in seen) > 3
    same(live(rows, 3, policies_of(tmp_path, ROUTERS["kv"]), settings, kill_s=2.0000005), seen)


@pytest.mark.parametrize("kill_s", [None, 2.0000005])
def test_both_worlds_have_requests_under_way_to_their_engines_alike(tmp_path: Path, kill_s: float | None) -> None:
    rows, settings = rows_of(13, 200), engine_settings()
    more = {"kill_s": kill_s, "path_s": 0.0123}
    seen = simulated(rows, 3, policies_of(tmp_path, ROUTERS["kv"]), settings, **more)
    assert (sum('"type":"RequestMigrated"' in line for line in seen) > 3) == (kill_s is not None)
    same(live(rows, 3, policies_of(tmp_path, ROUTERS["kv"]), settings, **more), seen)


def same(live: list[str], simulated: list[str]) -> None:
    """Both journals are equal; the first line that is not says where they part."""
    for number, (mine, theirs) in enumerate(zip(live, simulated, strict=False)):
        assert json.loads(mine) == json.loads(theirs), f"line {number}"
    assert len(live) == len(simulated)
