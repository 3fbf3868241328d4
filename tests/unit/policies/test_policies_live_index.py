"""The live index inside a policy: what it orders goes through the controller, the invariants and the journal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from builders import Scene, worker

from policies.cluster.actions import Action, RequestIndexDump, RequestIndexReplay, SetTimer
from policies.cluster.events import Event, TimerFired, WorkerLost
from policies.cluster.ids import BlockHash, Tier, WorkerId
from policies.cluster.journal import Header, Journal, decode
from policies.cluster.journal import replay as replay_journal
from policies.cluster.kv_events import DumpEntry, IndexDump, IndexReplay, KvCleared, KvRefused, KvRemoved, KvStored
from policies.cluster.state import ClusterView
from policies.router.chains.live import SUBSCRIBES, LiveIndex

HEADER = Header(versions={}, config={}, seed=0, policies=("Keeper",))


class Keeper:
    """Keeps the index and orders what it needs."""

    subscribes: ClassVar[frozenset[type[Event]]] = SUBSCRIBES

    def __init__(self) -> None:
        self.live = LiveIndex(64)

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        return self.live.on(event)


def history(scene: Scene) -> None:
    """A gap that is closed, one that is not, a dump, a restart, a loss; ids and hashes of all 64 bits."""
    big = BlockHash(2**64 - 1)
    common = {"at_s": 0.0, "worker_id": WorkerId(0)}

    def stored(number: int, parent: BlockHash | None = None, epoch: int = 0) -> KvStored:
        ext = BlockHash(2**63 + number)
        return KvStored(**common, event_id=number, epoch=epoch, exts=(ext,), local_hashes=(big,), parent_ext=parent)

    def post(event: Event) -> list[Action]:
        return scene.post(replace(event, at_s=scene.next_s))

    post(IndexDump(**common, ask=1, last_id=None, entries=()))
    post(stored(0))
    post(KvRefused(**common, event_id=1, what="medium 'TAPE'"))
    (ask, timer) = post(stored(3, BlockHash(2**63 + 2)))
    assert isinstance(ask, RequestIndexReplay)
    assert isinstance(timer, SetTimer)
    post(IndexReplay(**common, ask=ask.ask, events=(stored(2, BlockHash(2**63)),)))
    post(KvRemoved(**common, event_id=5, exts=(BlockHash(2**63),), tier=Tier.G2_HOST))
    scene.post(TimerFired(at_s=timer.due_s + 9, name=timer.name))
    entry = DumpEntry(parent_ext=None, exts=(BlockHash(7),), local_hashes=(big,), tiers=(Tier.G1_DEVICE, Tier.G3_DISK))
    last = scene.policy.live._feeds[(0, 0)]._open  # type: ignore[attr-defined]
    scene.post(IndexDump(at_s=timer.due_s + 10, worker_id=WorkerId(0), ask=last, last_id=5, entries=(entry,)))
    scene.post(KvCleared(at_s=timer.due_s + 11, worker_id=WorkerId(0), event_id=6))
    scene.post(worker(0, at_s=timer.due_s + 12, epoch=1))
    scene.post(WorkerLost(at_s=timer.due_s + 13, worker_id=WorkerId(0)))


def test_a_replayed_journal_orders_the_same() -> None:
    lines: list[str] = []
    journal = Journal(lambda text: lines.extend(text.splitlines()), HEADER)
    scene = Scene(Keeper(), workers=1, journal=journal)
    history(scene)
    scene.invariants.finish()
    journal.flush()
    entries = list(decode(lines))
    ordered = [type(action) for entry in entries for action in entry.actions]
    assert ordered.count(RequestIndexDump) == 3
    assert ordered.count(RequestIndexReplay) == 2
    assert replay_journal(lines, [Keeper()]) is None


def test_a_lost_worker_leaves_nothing() -> None:
    scene = Scene(Keeper(), workers=1)
    history(scene)
    assert scene.policy.live.size == 0  # type: ignore[attr-defined]
    counters = scene.policy.live.counters()  # type: ignore[attr-defined]
    assert (counters["gaps"], counters["refused_events"], counters["replays_failed"]) == (2, 1, 1)


def test_the_example_of_the_document_runs(root: Path) -> None:
    text = (root / "docs" / "kv-index.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "assert" in example
    exec(compile(example, "docs/kv-index.md", "exec"), {})
