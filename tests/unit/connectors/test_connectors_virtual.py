"""The virtual connector over a folder and a real etcd: the planner's side is a live world, the client's is here."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from connector_builders import Scaled, scaled
from etcd_server import EtcdServer

from executors.connectors.settings import ConnectorSettings, VirtualSettings
from executors.connectors.virtual_store import (
    DECISION,
    DecisionStore,
    VirtualDecision,
    complete,
    decision_text,
    open_store,
    read_completed,
    read_decision,
)
from executors.discovery.protocol import StoreError
from policies.cluster.events import WorkerDraining, WorkerRecalled, WorkerStartFailed, WorkerStarting, WorkerUp
from policies.cluster.scaling import ScaleDone, ScaleFailed, ScaleProgress
from policies.errors import ConfigError

Play = Callable[[Scaled, DecisionStore], Coroutine[Any, Any, None]]


class VirtualContract:
    """What holds whatever the store is."""

    async def place(self, folder: Path) -> str:
        raise NotImplementedError

    async def leave(self) -> None:
        """The test is over."""

    def play(self, folder: Path, main: Play, before: VirtualDecision | None = None) -> None:
        """A prefill and two decode workers are there; `before` is what an earlier planner has left."""

        async def body(world: Scaled) -> None:
            where = await self.place(folder)
            store = open_store(where)
            try:
                if before is not None:
                    assert await store.swap(DECISION, None, decision_text(before))
                await world.connect(ConnectorSettings(connector="virtual", virtual=VirtualSettings(store=where)))
                for group in ("prefill", "decode", "decode"):
                    await world.come(group)
                await main(world, store)
            finally:
                await world.world.scaling.close()
                await store.close()
                await self.leave()

        scaled(body)

    def test_a_decision_goes_its_way(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            world.add(1, decode=1, prefill=1)
            await decided(world, store, VirtualDecision(decision_id=1, num_prefill=2, num_decode=3))
            for group in ("decode", "prefill"):
                await world.come(group)
            assert {one.worker_id for one in world.heard(WorkerStarting)} == {
                one.worker_id for one in world.heard(WorkerUp)[3:]
            }
            await looks(world, 3)
            assert not world.ends(), "all are there, and the client has not said so"
            await complete(store, 1)
            await world.until(world.ends)
            assert isinstance(world.ends()[0], ScaleDone)
            assert [len(told.roles) for told in world.heard(ScaleProgress)][:1] == [2]

        self.play(tmp_path, main)

    def test_completed_without_the_workers_is_not_so(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            world.add(1, decode=1)
            await decided(world, store, VirtualDecision(decision_id=1, num_prefill=1, num_decode=3))
            await complete(store, 1)
            await looks(world, 3)
            assert not world.ends()
            await world.come("decode")
            await world.until(world.ends)

        self.play(tmp_path, main)

    def test_numbers_rise_by_one_and_a_drain_lowers_the_count(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            leaving = list(world.world.fleet.workers.values())[2]
            world.drain(7, leaving)
            assert [one.worker_id for one in world.heard(WorkerDraining)] == [leaving.worker_id], "it takes nothing new"
            await decided(world, store, VirtualDecision(decision_id=5, num_prefill=3, num_decode=1))
            world.go(leaving)
            await complete(store, 5)
            for _ in range(2):
                await world.come("prefill")
            await world.until(world.ends)
            assert world.ends() == [ScaleDone(at_s=world.ends()[0].at_s, decision_id=7)]

        before = VirtualDecision(decision_id=4, num_prefill=3, num_decode=2)
        self.play(tmp_path, self.completed(main, 4), before)

    def completed(self, main: Play, number: int) -> Play:
        async def body(world: Scaled, store: DecisionStore) -> None:
            await complete(store, number)
            await main(world, store)

        return body

    def test_nothing_is_written_over_a_decision_that_is_not_completed(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            world.add(1, decode=1)
            await looks(world, 5)
            assert (await read_decision(store))[0] == before
            await complete(store, 9)
            await decided(world, store, VirtualDecision(decision_id=10, num_prefill=1, num_decode=3))

        before = VirtualDecision(decision_id=9, num_prefill=1, num_decode=2)
        self.play(tmp_path, main, before)

    def test_one_that_takes_too_long_is_an_alarm_and_the_next_starts_from_who_is_there(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            world.add(1, decode=4)
            await decided(world, store, VirtualDecision(decision_id=1, num_prefill=1, num_decode=6))
            await world.come("decode")
            await world.until(world.ends)
            (failed,) = world.ends()
            assert isinstance(failed, ScaleFailed)
            assert failed.at_s >= 1800.0
            assert "not so after 1800 s (decode 3 of 6); its client has not completed decision 1" in failed.reason
            assert len(world.heard(WorkerStartFailed)) == 3
            world.add(2, decode=1)
            await decided(world, store, VirtualDecision(decision_id=2, num_prefill=1, num_decode=4))

        with caplog.at_level(logging.ERROR):
            self.play(tmp_path, main)
        assert sum("given up, and planned anew" in one.message for one in caplog.records) == 1

    def test_a_recall_counts_again(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            leaving = list(world.world.fleet.workers.values())[1]
            world.drain(1, leaving)
            await decided(world, store, VirtualDecision(decision_id=1, num_prefill=1, num_decode=1))
            world.recall(2, leaving)
            assert [one.worker_id for one in world.heard(WorkerRecalled)] == [leaving.worker_id]
            await complete(store, 1)
            await decided(world, store, VirtualDecision(decision_id=2, num_prefill=1, num_decode=2))
            await complete(store, 2)
            await world.until(lambda: len(world.ends()) == 2)

        self.play(tmp_path, main)

    def test_of_two_planners_one_is_told(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            first, text = await read_decision(store)
            assert (first, text) == (None, None)
            theirs = decision_text(VirtualDecision(decision_id=1, num_prefill=9, num_decode=9))
            mine = decision_text(VirtualDecision(decision_id=1, num_prefill=1, num_decode=3))
            assert await store.swap(DECISION, None, theirs)
            assert not await store.swap(DECISION, None, mine)
            assert not await store.swap(DECISION, mine, mine + b" ")
            assert (await read_decision(store))[1] == theirs

        self.play(tmp_path, main)

    def test_a_text_of_somebody_else_is_refused(self, tmp_path: Path) -> None:
        async def main(world: Scaled, store: DecisionStore) -> None:
            await store.swap(DECISION, None, b'{"decision_id": "seven"}')
            with pytest.raises(ConfigError, match="remove it, or name another store"):
                await read_decision(store)
            world.add(1, decode=1)
            await world.until(world.ends)
            assert "not a JSON object with decision_id" in world.ends()[0].reason  # type: ignore[union-attr]

        self.play(tmp_path, main)


class TestFolder(VirtualContract):
    async def place(self, folder: Path) -> str:
        return str(folder)

    def test_a_role_that_is_not_planned_is_not_set(self, tmp_path: Path) -> None:
        decision = VirtualDecision(decision_id=3, num_prefill=None, num_decode=2)
        assert json.loads(decision_text(decision)) == {"decision_id": 3, "num_prefill": -1, "num_decode": 2}
        (tmp_path / "decision.json").write_bytes(decision_text(decision))
        assert asyncio.run(read_decision(open_store(str(tmp_path))))[0] == decision
        assert asyncio.run(read_completed(open_store(str(tmp_path)))) is None

    def test_a_folder_that_goes_is_no_answer(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        store = open_store(str(gone))
        gone.rmdir()
        with pytest.raises(StoreError, match="No such file"):
            asyncio.run(store.read(DECISION))
        with pytest.raises(ConfigError, match="is no folder"):
            open_store(str(gone))


@pytest.mark.live
class TestEtcd(VirtualContract):
    @pytest.fixture(autouse=True)
    def _server_is_there(self) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed (apt-get install etcd-server)")

    async def place(self, folder: Path) -> str:
        self._server = EtcdServer(folder)
        await self._server.start()
        return self._server.place

    async def leave(self) -> None:
        await self._server.close()


async def decided(world: Scaled, store: DecisionStore, decision: VirtualDecision) -> None:
    """Let time pass until that has been written."""
    while (await read_decision(store))[0] != decision:
        assert not world.errors, world.errors
        await world.clock.step()
    await world.clock.waiting()


async def looks(world: Scaled, n: int) -> None:
    """The connector looks n times."""
    for _ in range(n):
        await world.clock.step()
    await world.clock.waiting()
