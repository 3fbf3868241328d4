"""What each worker group did and cost: GPU-seconds held, energy, money, and goodput per GPU.

Time held counts from when a worker was ordered to when it was stopped or lost for good: starting and draining are paid
for. Figures are sums over workers; it must not define a metric of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.frozen import frozen
from reports import metrics
from reports.columns import Bools, Columns
from reports.energy import ENERGY_COLUMNS, energy_j, use_s
from reports.record import RunRecord
from reports.report import GroupFigures, GroupMeta, RunMeta, WorkerFigures, WorkerMeta


@frozen
class Span:
    """The run in virtual time, as long as its makespan."""

    start_s: float
    end_s: float


def span_of(requests: Columns, last_step_s: float) -> Span | None:
    """None when nothing elapsed."""
    span = metrics.run_span_s(requests.floats("arrival_s"), requests.floats("last_token_s"), last_step_s)
    return None if span is None else Span(start_s=span[0], end_s=span[1])


def held_s(worker: WorkerMeta, span: Span) -> float:
    """How long a worker was held within the run."""
    start_s = span.start_s if worker.held_from_s is None else max(worker.held_from_s, span.start_s)
    end_s = span.end_s if worker.held_until_s is None else min(worker.held_until_s, span.end_s)
    return max(0.0, end_s - start_s)


def gpu_seconds(workers: Sequence[WorkerMeta], span: Span | None) -> float | None:
    """GPU-seconds held by these workers."""
    return None if span is None else sum(worker.gpus * held_s(worker, span) for worker in workers)


def group_figures(
    record: RunRecord, meta: RunMeta, workers: Sequence[WorkerFigures], span: Span | None, good: Bools | None
) -> tuple[GroupFigures, ...]:
    """One entry per group that `meta` describes, in its order. `good`: requests that keep the SLA (None: there is
    none); a group answers for those that its workers answered.
    """
    used = _used_s(record, meta)
    by_group: dict[str, list[WorkerMeta]] = {group.name: [] for group in meta.groups}
    for worker in meta.workers:
        by_group.setdefault(worker.group, []).append(worker)
    answered = None if good is None else _answered(record.requests, good)
    return tuple(
        _one_group(
            group,
            by_group[group.name],
            [figures for figures in workers if figures.group == group.name],
            span,
            used,
            answered,
        )
        for group in meta.groups
    )


def _one_group(
    group: GroupMeta,
    members: Sequence[WorkerMeta],
    figures: Sequence[WorkerFigures],
    span: Span | None,
    used: dict[int, float],
    answered: dict[int, int] | None,
) -> GroupFigures:
    gpu_s = gpu_seconds(members, span)
    energy = None
    if group.power is not None and span is not None:
        tdp_w = group.power.tdp_w
        energy = sum(energy_j(held_s(w, span), used.get(w.worker_id, 0.0), w.gpus, tdp_w) for w in members)
    good = None
    if answered is not None and group.role != "prefill":
        good = sum(answered.get(worker.worker_id, 0) for worker in members)
    output = sum(worker.output_tokens for worker in figures)
    busy = [worker.busy_share for worker in figures if worker.busy_share is not None]
    return GroupFigures(
        group=group.name,
        gpu=group.gpu,
        role=group.role,
        workers=len(members),
        gpus=_most_gpus(members),
        requests=sum(worker.requests for worker in figures),
        completed=sum(worker.completed for worker in figures),
        input_tokens=sum(worker.input_tokens for worker in figures),
        output_tokens=output,
        busy_share=sum(busy) / len(busy) if busy else None,
        gpu_s=gpu_s,
        energy_j=energy,
        cost_usd=None if gpu_s is None or group.usd_per_hour is None else gpu_s / 3600 * group.usd_per_hour,
        good=good,
        goodput_rps_per_gpu=None if good is None or gpu_s is None else metrics.goodput_rps_per_gpu(good, gpu_s),
        output_tokens_per_s_per_gpu=metrics.per_second(output, gpu_s) if group.role != "prefill" else None,
    )


def _most_gpus(members: Sequence[WorkerMeta]) -> int:
    """GPUs that these workers held at once, at most; one that is gone may be in place of another."""
    if all(worker.held_from_s is None for worker in members):
        return sum(worker.gpus for worker in members)
    changes: list[tuple[float, int]] = []
    for worker in members:
        changes.append((-1.0 if worker.held_from_s is None else worker.held_from_s, worker.gpus))
        if worker.held_until_s is not None:
            changes.append((worker.held_until_s, -worker.gpus))
    held = most = 0
    for _, gpus in sorted(changes):
        held += gpus
        most = max(most, held)
    return most


def _answered(requests: Columns, good: Bools) -> dict[int, int]:
    """Good requests by the worker that answered them."""
    ids, counts = np.unique(requests.ints("worker_id", null=-1)[good], return_counts=True)
    return {int(worker_id): int(count) for worker_id, count in zip(ids, counts, strict=True)}


def _used_s(record: RunRecord, meta: RunMeta) -> dict[int, float]:
    """Seconds at full power by worker, of the groups whose power is known."""
    power = {group.name: group.power for group in meta.groups if group.power is not None}
    members = {name: np.array([w.worker_id for w in meta.workers if w.group == name], dtype=np.int64) for name in power}
    used: dict[int, float] = {}
    if not power:
        return used
    for batch in record.steps.batches(ENERGY_COLUMNS):
        kind, labels = batch.codes("kind")
        is_step = np.array([label != "gap" for label in labels], dtype=np.bool_)[kind]
        worker = batch.ints("worker_id")
        for name, ids in members.items():
            rows = is_step & np.isin(worker, ids)
            found, place = np.unique(worker[rows], return_inverse=True)
            for worker_id, amount in zip(
                found, np.bincount(place, use_s(batch, rows, power[name]), minlength=len(found)), strict=True
            ):
                used[int(worker_id)] = used.get(int(worker_id), 0.0) + float(amount)
    return used
