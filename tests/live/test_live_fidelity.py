"""A recorded run of real engines becomes a twin, and the twin is set beside it: what must hold however fast they are.

The journal of each run replays to the same orders (`live_service`). No time is asserted: how near the twin comes is
measured by `tools/live/fidelity.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from live_service import SEED, Engines, prompt, read

from reports.record import RunRecord
from traces.load import open_trace
from twin.cli import run as twin

pytestmark = pytest.mark.live
REQUESTS = 40


def play(engines: Engines) -> Path:
    """Lengths as in each other run, tokens that no engine has seen; four in ten prompts begin alike."""
    rng = random.Random(f"{SEED} fidelity")
    common = prompt(128)

    async def main() -> Path:
        async with engines.mixed("mixed", "spare") as it:
            gate = asyncio.Semaphore(4)

            async def one(tokens: list[int], outputs: int) -> None:
                async with gate:
                    await read(await it.stream(tokens, outputs))

            asked = []
            for number in range(REQUESTS):
                own = prompt(rng.randint(40, 300))
                tokens = [*common, *own] if number % 5 in (1, 3) else own
                asked.append(one(tokens, rng.randint(2, 24)))
            await asyncio.gather(*asked)
            await it.until(lambda: not it.cluster.world.open)
            assert it.cluster.record is not None
            return it.cluster.record.folder

    return asyncio.run(main())


def test_recorded_runs_become_a_twin_that_is_compared_with_them(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [play(engines) for _ in range(2)]
    out, replayed = tmp_path / "twin", tmp_path / "replay"
    assert twin(["record", *map(str, lives), "--out", str(out), "--quiet"]) == 0
    assert f"group mixed: {2 * REQUESTS} requests" in capsys.readouterr().out
    assert sum(batch.num_rows for batch in open_trace(out / "trace.parquet")) == REQUESTS
    line = ["replay", "--config", str(out / "twin.toml"), "--out", str(replayed), "--no-html", "--quiet"]
    assert twin(line) == 0
    capsys.readouterr()
    assert twin(["compare", *map(str, lives), str(replayed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    figures = {one["name"]: one for one in found["figures"]}
    assert found["rows"] == figures["completed"]["live"] == figures["completed"]["twin"] == REQUESTS
    for name in ("TTFT mean", "ITL mean", "E2E p99", "output tokens/s"):
        assert 0 < figures[name]["low"] <= figures[name]["live"] <= figures[name]["high"]
        assert figures[name]["twin"] > 0
    assert figures["hit rate"]["low"] > 0
    assert figures["hit rate"]["twin"] > 0
    assert len(found["same_worker"]) == 2
    columns = [RunRecord(folder).requests for folder in (*lives, replayed)]
    for name in ("isl", "output_tokens"):
        values = [column.ints(name).tolist() for column in columns]
        assert values[0] == values[2]
        assert sorted(values[0]) == sorted(values[1])  # requests at nearly the same time may have changed places
