"""Several routers in one run: the table of router.md §12, by the command's own way through a configuration.

Two routers, two idle workers, prompts of 640 tokens without overlap (10 blocks of 64), equals go to the lowest id. Each
router gets one request at 0, the second one another at 10 ms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from toy import Run, run

from policies.cluster.journal import replay as replay_journal
from twin.config_read import load
from twin.deciding import build_policy

W1, W2 = 0, 1


def _session(router: int, n: int) -> str:
    """The n-th name of a session whose requests arrive at a router of two."""
    names = (f"s{i}" for i in range(1000))
    return [name for name in names if xxhash.xxh3_64_intdigest(name.encode()) % 2 == router][n]


def _trace(folder: Path, arrivals: list[tuple[float, int, int]]) -> Path:
    """Rows of (at_ms, router, output tokens)."""
    trace = folder / "rows.jsonl"
    rows = [
        {
            "timestamp": at_ms,
            "input_length": 640,
            "output_length": osl,
            "session_id": _session(router, n),
            "hash_ids": [1000 * n + i for i in range(10)],
        }
        for n, (at_ms, router, osl) in enumerate(arrivals)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return trace


def _run(folder: Path, arrivals: list[tuple[float, int, int]], *sets: str, **options: Any) -> Run:
    return run(
        _trace(folder, arrivals),
        folder / "run",
        "workers.count=2",
        "workers.engine.block_size=64",
        "workers.latency.prefill_s_per_token=0.001",
        "workers.latency.decode_s=0.01",
        "trace.hash_block_tokens=64",
        "router.mode=kv",
        "router.tie_break=lowest_id",
        "replicas.count=2",
        "replicas.spread=session",
        *sets,
        flags={"--latency": "fixed"},
        **options,
    )


THREE = [(0, 0, 5), (0, 1, 5), (10, 1, 5)]
TABLE = {
    "S1 no sync": ([], [W1, W1, W2]),
    "S2 sync of 5 ms": (["replicas.sync_delay_s=0.005"], [W1, W1, W2]),
    "S2 sync of 5 ms, at once": (["replicas.sync_delay_s=0.005", "replicas.sync_batch_s=0"], [W1, W1, W2]),
    "S3 no delay": (["replicas.sync_delay_s=0", "replicas.sync_batch_s=0"], [W1, W2, W1]),
    "as one router would": (["replicas.count=1", "replicas.spread=round-robin"], [W1, W2, W1]),
}


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
@pytest.mark.parametrize("line", TABLE)
def test_table(line: str, leap: bool, tmp_path: Path) -> None:
    sets, workers = TABLE[line]
    seen = _run(tmp_path, THREE, *sets, leap=leap, explain=True)
    assert [row["worker_id"] for row in seen.rows("decisions")] == workers
    assert seen.requests("status") == ["completed"] * 3


def _costs(seen: Run, n: int) -> list[float]:
    """What each worker would have cost in the n-th decision."""
    return [candidate["cost"] for candidate in json.loads(seen.rows("decisions")[n]["candidates"])]


@pytest.mark.parametrize(
    ("sets", "costs"),
    [
        ([], [40, 20]),
        (["replicas.sync_delay_s=0.005"], [60, 20]),
        (["replicas.sync_delay_s=0", "replicas.sync_batch_s=0"], [40, 40]),
    ],
    ids=["S1 its own booking alone", "S2 its peer's too", "S3 both at once"],
)
def test_what_the_second_router_sees_at_10_ms(sets: list[str], costs: list[float], tmp_path: Path) -> None:
    assert _costs(_run(tmp_path, THREE, *sets, explain=True), 2) == costs


def test_the_reason_names_the_router(tmp_path: Path) -> None:
    seen = _run(tmp_path, THREE)
    assert [row["reason"][:9] for row in seen.rows("decisions")] == ["router 0:", "router 1:", "router 1:"]


def test_news_that_are_all_lost_are_as_no_news(tmp_path: Path) -> None:
    seen = _run(
        tmp_path, THREE, "replicas.sync_delay_s=0", "replicas.sync_batch_s=0", "replicas.sync_loss=1", explain=True
    )
    assert _costs(seen, 2) == [40, 20]


@pytest.mark.parametrize("loss", [0, 0.3])
def test_the_journal_of_several_routers_gives_the_same_actions_again(loss: float, tmp_path: Path) -> None:
    sets = ["replicas.sync_delay_s=0.005", f"replicas.sync_loss={loss}"]
    seen = _run(tmp_path, [(i * 7.0, i % 2, 4) for i in range(40)], *sets, journal=True)
    lines = (seen.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert any('"PeerBooking"' in line for line in lines)
    assert replay_journal(lines, [build_policy(load(seen.folder / "config.toml"), 64)]) is None
