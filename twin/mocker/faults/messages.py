"""What workers say of themselves gets lost, late, overtaken or told twice: KV events, load reports. Draws count the
messages.

Only what routers hear is disturbed, never what a worker does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twin.mocker.faults.stage import Entry, Stage, name_of, whom
from twin.mocker.worker import MockWorker
from twin.scenario.model import Fault, Occurrence

if TYPE_CHECKING:
    from twin.mocker.faults.workers import OnWorker

KV_EVENTS = ("event_loss", "event_delay", "event_reorder", "event_dup")
"""Kinds that disturb KV events; with one of these in a run, each message counts."""


def events(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """KV events of a worker are lost, late, overtaken by others or told twice for a while."""
    upset, name, kind = stage.world.churn.upset(worker.worker_id), name_of(fault, occurrence), fault.kind
    rate, sent = fault.rate or 0.0, iter(range(2**62))

    def hit() -> bool:
        return stage.u(kind, name, next(sent)) < rate

    if kind == "event_loss":
        upset.losses[name] = hit
    elif kind == "event_reorder":
        upset.later_s[name] = lambda: fault.delay_s if hit() else 0.0
    elif kind == "event_dup":
        upset.copies[name] = hit
    else:
        upset.delays_s[name] = fault.delay_s
    stage.until(occurrence, entry, lambda: upset.over(name))


def stale(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """No load reports of a worker."""
    upset, name = stage.world.churn.upset(worker.worker_id), name_of(fault, occurrence)
    upset.silent.add(name)
    stage.until(occurrence, entry, lambda: upset.over(name))


ON_WORKER: Mapping[str, OnWorker] = {**dict.fromkeys(KV_EVENTS, events), "report_stale": stale}


def without_effect(stage: Stage, fault: Fault) -> str | None:
    """Why a fault of messages can change nothing in this run: nobody listens; None where somebody does."""
    news = stage.world.news
    if fault.kind == "clock_skew":
        return _skew_without_effect(stage, fault)
    if fault.kind in KV_EVENTS:
        what, tells = "KV events", news.tells_blocks
    elif fault.kind == "report_stale":
        what, tells = "load reports", news.tells_load
    else:
        return None
    specs = [spec for spec in stage.world.specs.values() if stage.is_meant(fault, spec)]
    if not specs or any(tells(spec) for spec in specs):
        return None
    return f"nobody listens to {what} of {whom(fault)}"


def _skew_without_effect(stage: Stage, fault: Fault) -> str | None:
    """Why nobody can see whose clock is wrong: no report is read, and no lease is judged by it."""
    by_lease = any(
        other.detect == "lease" for other in stage.scenario.faults if other.kind in ("worker_down", "partition")
    )
    if by_lease or fault.delay_s <= -stage.detection.lease_s:
        return None
    specs = [spec for spec in stage.world.specs.values() if stage.is_meant(fault, spec)]
    if any(stage.world.news.tells_load(spec) for spec in specs):
        return None
    return f"nobody reads load reports of {whom(fault)}, and no lease is judged that its clock could change"
