"""A record that cannot be written any more: it ends, and serving goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from executors.assemble import Host, LiveCluster
from executors.backend import Ask
from executors.clock import Order
from executors.starter import Model
from executors.virtual import VirtualClock, run
from policies.cluster.ids import RequestId
from twin.config_read import load


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["journal", "tables"])
def test_a_full_disk_ends_the_record_and_no_request(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[[workers]]\ncount = 2\n", encoding="utf-8")
    monkeypatch.setattr("executors.record.SPILL_EVERY", 16)
    monkeypatch.setattr("policies.cluster.journal._LINES_PER_WRITE", 16)
    place = tmp_path / "run"
    host = Host(model=Model(checkpoint="", served_as="m"), mock=True, pythons={}, attached={}, record=place)

    async def main(clock: VirtualClock) -> None:
        cluster = LiveCluster(load(file), host, clock)
        await cluster.start()
        record = cluster.record
        assert record is not None
        if what == "journal":
            monkeypatch.setattr(record._journal, "_write", full)
        else:
            monkeypatch.setattr(record._writer, "spill", full)
        answers = [
            cluster.service.submit(
                Ask(request_id=RequestId(f"r{number}"), token_ids=range(100), max_tokens=200, model="m")
            )
            for number in range(64)
        ]
        over = asyncio.Event()
        clock.call_at(600.0, Order.TIMER, over.set)
        await over.wait()
        assert [one.end.outcome for one in answers if one.end is not None] == ["length"] * 64
        assert record.failed is not None
        await cluster.close()

    with caplog.at_level(logging.ERROR):
        run(main)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{place}: No space left on device; nothing more is recorded, serving goes on"]
    assert not (place / "report.json").exists()
