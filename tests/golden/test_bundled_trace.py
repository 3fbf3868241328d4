"""The trace that ships, through the whole replay: leaping, determinism, journal, invariants at every step.

Figures are not fixed here (they may change with the latency model); that two ways of computing them agree is.
"""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from toy import Run, run

from policies.cluster.actions import Action
from policies.cluster.controller import Controller
from policies.cluster.events import Event
from policies.cluster.invariants import Invariants
from policies.cluster.journal import replay as replay_journal
from reports.record import RunWriter
from traces.load import open_trace
from twin.cluster import build_groups
from twin.config_read import load
from twin.deciding import build_policy
from twin.mocker.world import MockWorld
from twin.replay import demand_of, read_options

AZURE = Path(__file__).parents[2] / "traces" / "azure.parquet"
PRESSURE = ("workers.engine.kv_blocks=1200", "workers.count=2")


@pytest.fixture(scope="module")
def shared_prefixes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic Mooncake-like trace with sessions' prefixes, drawn by our own command."""
    path = tmp_path_factory.mktemp("trace") / "mooncake.parquet"
    subprocess.run(
        [sys.executable, "-m", "twin.cli", "synth", "mooncake", "--rows", "1500", "--seed", "7", "-o", str(path)],
        check=True,
        capture_output=True,
    )
    return path


def same_timestamps(a: Run, b: Run) -> None:
    left, right = (pq.read_table(r.folder / "requests.parquet") for r in (a, b))
    assert left.equals(right), "leaping changed a request"
    assert pq.read_table(a.folder / "decisions.parquet").equals(pq.read_table(b.folder / "decisions.parquet"))
    assert a.rows("steps") != b.rows("steps"), "nothing was leapt: the comparison means nothing"
    waiting = [[worker.peak_waiting for worker in r.report.workers] for r in (a, b)]
    assert waiting[0] == waiting[1], "leaping changed how many waited"


@pytest.mark.slow
@pytest.mark.parametrize("sets", [(), PRESSURE], ids=["default cluster", "pool pressure"])
def test_leaping_changes_no_timestamp_of_the_bundled_trace(sets: tuple[str, ...], tmp_path: Path) -> None:
    flags: dict[str, object] = {"--limit": "6000"} if sets else {}
    leapt = run(AZURE, tmp_path / "leap", *sets, flags=flags)
    stepped = run(AZURE, tmp_path / "step", *sets, flags=flags, leap=False)
    same_timestamps(leapt, stepped)
    if sets:
        assert leapt.report.preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_leaping_changes_no_request_and_no_peak_on_a_tiny_pool(kind: str, tmp_path: Path) -> None:
    """Requests come while a leap is under way and cannot be let in: they wait with and without it."""
    blocks = {"vllm": 100, "sglang": 1600, "trtllm": 50}[kind]
    sets = (f"workers.engine.kind={kind}", f"workers.engine.kv_blocks={blocks}", "workers.count=3")
    leapt = run(AZURE, tmp_path / "leap", *sets, flags={"--limit": "300"})
    stepped = run(AZURE, tmp_path / "step", *sets, flags={"--limit": "300"}, leap=False)
    same_timestamps(leapt, stepped)
    assert max(worker.peak_waiting for worker in leapt.report.workers) > 5


@pytest.mark.parametrize("leap", [True, False])
def test_what_would_have_ended_on_a_lost_worker_takes_no_time(leap: bool, tmp_path: Path) -> None:
    """All workers die at 2 s and nobody knows: what is open fails then, and the closed loop goes on at that instant."""
    faults = [{"at_ms": 2000, "kind": "worker_down", "worker": f"pool-{n}", "detect": "silent"} for n in range(2)]
    scenario = tmp_path / "all.json"
    scenario.write_text(json.dumps({"version": 1, "faults": faults}), encoding="utf-8")
    flags = {"--limit": "100", "--concurrency": "8", "--faults": str(scenario)}
    sets = ("workers.count=2", "resilience.canary_idle_s=0")
    ended = run(AZURE, tmp_path / "run", *sets, flags=flags, leap=leap).rows("requests")
    assert {row["status"] for row in ended} == {"completed", "failed"}
    assert {row["arrival_s"] for row in ended if row["arrival_s"] >= 2.0} == {2.0}
    assert sum(row["arrival_s"] == 2.0 for row in ended) > 50


@pytest.mark.slow
@pytest.mark.parametrize("router", ["round-robin", "kv", "least-loaded"])
def test_leaping_changes_no_timestamp_with_shared_prefixes_and_a_small_pool(
    router: str, shared_prefixes: Path, tmp_path: Path
) -> None:
    sets = ("workers.engine.block_size=64", "workers.engine.kv_blocks=2600", "workers.count=6", f"router.mode={router}")
    leapt = run(shared_prefixes, tmp_path / "leap", *sets)
    stepped = run(shared_prefixes, tmp_path / "step", *sets, leap=False)
    same_timestamps(leapt, stepped)
    assert leapt.report.hit_rate is not None
    assert leapt.report.hit_rate > 0.02


def test_the_same_seed_gives_the_same_bytes_in_other_processes(tmp_path: Path) -> None:
    """Whatever PYTHONHASHSEED is: report.json, every parquet file and the journal are equal byte for byte."""
    folders = []
    for hash_seed in ("0", "1", "4711"):
        folder = tmp_path / hash_seed
        command = (
            f"-m twin.cli replay {AZURE} --limit 1500 --router power-of-two --seed 3 --journal --no-html --out {folder}"
        )
        subprocess.run(
            [sys.executable, *command.split()],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        folders.append(folder)
    names = [
        "report.json",
        "requests.parquet",
        "steps.parquet",
        "decisions.parquet",
        "samples.parquet",
        "journal.jsonl",
    ]
    for other in folders[1:]:
        _, differing, missing = filecmp.cmpfiles(folders[0], other, names, shallow=False)
        assert not differing
        assert not missing


def test_another_seed_gives_other_draws(tmp_path: Path) -> None:
    flags: dict[str, object] = {"--limit": "300", "--router": "random"}
    first = run(AZURE, tmp_path / "a", flags=flags | {"--seed": "1"})
    second = run(AZURE, tmp_path / "b", flags=flags | {"--seed": "2"})
    assert first.requests("worker_id") != second.requests("worker_id")


@pytest.mark.parametrize("router", ["round-robin", "random", "least-loaded", "power-of-two", "kv"])
def test_a_journal_through_the_same_policies_gives_the_same_actions(
    router: str, shared_prefixes: Path, tmp_path: Path
) -> None:
    sets = ("workers.engine.block_size=64", "workers.engine.kv_blocks=2600", "workers.count=4", "seed=5")
    done = run(shared_prefixes, tmp_path / "run", *sets, flags={"--router": router, "--limit": "400"}, journal=True)
    config = load(None, {"TRACE": str(shared_prefixes), "--router": router}, sets)
    lines = (done.folder / "journal.jsonl").read_text().splitlines()
    assert len(lines) > 1200, "three events per request at least"
    assert replay_journal(lines, [build_policy(config, 64)]) is None


def test_a_journal_through_another_policy_differs(shared_prefixes: Path, tmp_path: Path) -> None:
    done = run(shared_prefixes, tmp_path / "run", flags={"--limit": "50"}, journal=True)
    other = load(None, {"TRACE": str(shared_prefixes), "--router": "random"}, [])
    lines = (done.folder / "journal.jsonl").read_text().splitlines()
    assert replay_journal(lines, [build_policy(other, 16)]) is not None


class _AuditEverything:
    """Checks every invariant, the view and every pool after each event."""

    def __init__(self) -> None:
        self.world: MockWorld | None = None
        self.rules = Invariants()
        self.events = 0

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.rules.observe(event, actions)
        self.events += 1
        if self.world is not None:
            self.rules.audit(self.world.controller.view)
            for worker in self.world.workers.values():
                worker.engine.pool.audit()


@pytest.mark.parametrize("router", ["round-robin", "kv"])
def test_invariants_hold_at_every_event_under_pool_pressure(router: str, shared_prefixes: Path, tmp_path: Path) -> None:
    sets = ("workers.engine.block_size=64", "workers.engine.kv_blocks=2100", "workers.count=3")
    config = load(None, {"TRACE": str(shared_prefixes), "--router": router, "--limit": "250"}, sets)
    trace = open_trace(shared_prefixes, read_options(config.trace))
    groups = build_groups(config)
    watch = _AuditEverything()
    controller = Controller([build_policy(config, 64)], watch)
    writer = RunWriter(tmp_path / "run")
    world = MockWorld(
        controller=controller,
        workers=groups[0].workers,
        demand=demand_of(config, trace),
        sinks=writer,  # type: ignore[arg-type]
        router=router,
        key_tokens=trace.info.hash_block_tokens,
    )
    watch.world = world
    world.run()
    world.audit()
    watch.rules.finish()
    writer.close()
    assert watch.events > 750
