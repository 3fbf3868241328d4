"""What workers say of themselves gets lost or comes late: KV events, load reports. Draws count the messages.

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

KV_EVENTS = ("event_loss", "event_delay")
"""Kinds that disturb KV events; with one of these in a run, each message counts."""


def events(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """KV events of a worker are lost or late for a while."""
    upset, name = stage.world.churn.upset(worker.worker_id), name_of(fault, occurrence)
    if fault.kind == "event_loss":
        rate = fault.rate or 0.0
        sent = iter(range(2**62))
        upset.losses[name] = lambda: stage.u("event_loss", name, next(sent)) < rate
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
