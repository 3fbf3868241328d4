"""How many workers there were and why: the record of a planned run, and what it comes to.

Two tables beside the others of a run folder, where a planner ran: replicas.parquet has a row of a role whenever a count
of it changed, plans.parquet one for each role at each tick. It must not define a metric of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from policies.errors import ConfigError
from policies.frozen import frozen
from reports.columns import F64, to_arrow

REPLICAS, PLANS = "replicas.parquet", "plans.parquet"
FILES: Final = (REPLICAS, PLANS)

_F, _I, _S = pa.float64(), pa.int32(), pa.string()
REPLICA_SCHEMA: Final = pa.schema(
    [("at_s", _F), ("role", _S), ("wanted", _I), ("starting", _I), ("ready", _I), ("draining", _I), ("gpus", _I)]
)
PLAN_SCHEMA: Final = pa.schema(
    [
        ("at_s", _F), ("tick", _I), ("decision_id", _I), ("role", _S), ("due", _S), ("ready", _I), ("starting", _I),
        ("draining", _I), ("throughput", _I), ("load", _I), ("lookahead", _I), ("wanted", _I), ("bounded", _I),
        ("final", _I), ("reason", _S), ("plan", _S), ("num_req", _F), ("predicted_req", _F), ("isl", _F), ("osl", _F),
        ("hit_rate", _F), ("capacity_rps", _F), ("estimated_ttft_s", _F), ("estimated_itl_s", _F), ("base_s", _F),
        ("per_x_s", _F), ("per_kv_s", _F), ("r2", _F), ("samples", _I), ("notices", _S), ("text", _S),
    ]
)  # fmt: skip
"""One role in one tick: what there was, what each stage said, what came of it and why; `text` says it in words."""

ReplicaRow: TypeAlias = tuple[float, str, int, int, int, int, int]
PlanRow: TypeAlias = tuple[object, ...]
MOST_DECISIONS: Final = 200
"""Decisions that a report tells one by one; all are in plans.parquet."""


@frozen
class PlannerMeta:
    """What a planned run says of itself beside its record: who planned, and what was counted."""

    name: str
    line: str
    starts: int
    starts_failed: int
    starts_cancelled: int
    drains: int
    recalls: int
    counters: Mapping[str, int]
    notices: Mapping[str, int]


@frozen
class ChangeFigures:
    """One change of one role: from how many workers to how many, and why."""

    at_s: float
    decision_id: int | None
    role: str
    before: int
    after: int
    reason: str
    text: str


@frozen
class RoleFigures:
    """Workers of one role over the run: ready at its start, most and fewest and on average; how often the count that
    was wanted went up, and down."""

    role: str
    first: int
    most: int
    fewest: int
    mean: float | None
    ups: int
    downs: int


@frozen
class PlannerFigures:
    """What a planner did. `gpu_s` is billed from the order of a worker to its end; `starting_gpu_s` and
    `draining_gpu_s` are the parts of it in which a worker served nobody new. `reasons` counts roles and ticks."""

    name: str
    line: str
    ticks: int
    changes: int
    roles: tuple[RoleFigures, ...]
    decisions: tuple[ChangeFigures, ...]
    reasons: Mapping[str, int]
    starts: int
    starts_failed: int
    starts_cancelled: int
    drains: int
    recalls: int
    gpu_s: float | None
    starting_gpu_s: float
    draining_gpu_s: float
    cost_usd: float | None
    counters: Mapping[str, int]
    notices: Mapping[str, int]


def write_tables(folder: Path, replicas: Sequence[ReplicaRow], plans: Sequence[PlanRow]) -> None:
    """Write both tables."""
    for name, schema, rows in ((REPLICAS, REPLICA_SCHEMA, replicas), (PLANS, PLAN_SCHEMA, plans)):
        from pyarrow import parquet

        columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
        arrays = [to_arrow(values, field.type) for field, values in zip(schema, columns, strict=True)]
        try:
            parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), folder / name, compression="zstd")
        except OSError as why:
            raise ConfigError(f"{folder / name}: cannot be written ({why.strerror}); choose another --out") from None


@frozen
class Series:
    """The counts of one role over time: at each of `at_s` they change, and stay until the next."""

    role: str
    at_s: F64
    wanted: F64
    starting: F64
    ready: F64
    draining: F64
    gpus: F64


def read_series(folder: Path) -> tuple[Series, ...]:
    """By role, in the order in which they first appear; none where no planner ran."""
    from pyarrow import parquet

    path = folder / REPLICAS
    if not path.is_file():
        return ()
    table = parquet.read_table(path).to_pydict()
    names = ("at_s", "wanted", "starting", "ready", "draining", "gpus")
    columns = {name: np.array(table[name], dtype=np.float64) for name in names}
    of = np.array(table["role"], dtype=object)
    roles = dict.fromkeys(table["role"])
    return tuple(Series(role=role, **{name: column[of == role] for name, column in columns.items()}) for role in roles)


def integral(series: Series, values: F64, end_s: float) -> float:
    """Sum of a count over time, up to `end_s`."""
    if not len(series.at_s):
        return 0.0
    bounds = np.clip(np.append(series.at_s, end_s), series.at_s[0], max(end_s, series.at_s[0]))
    return float((np.diff(bounds) * values).sum())


def planner_figures(
    folder: Path, meta: PlannerMeta, end_s: float | None, gpu_s: float | None, costs: Iterable[float | None]
) -> PlannerFigures:
    """From the tables of a run that ended at `end_s`; `gpu_s` and `costs` are those of its groups."""
    from pyarrow import parquet

    plans = parquet.read_table(folder / PLANS).to_pydict()
    series = read_series(folder)
    until_s = 0.0 if end_s is None else end_s
    decisions = _decisions(plans)
    known = [cost for cost in costs if cost is not None]
    return PlannerFigures(
        name=meta.name,
        line=meta.line,
        ticks=len(set(plans["tick"])),
        changes=len(decisions),
        roles=tuple(_role(one, decisions, until_s) for one in series),
        decisions=tuple(decisions[:MOST_DECISIONS]),
        reasons=dict(sorted(Counter(plans["reason"]).items())),
        starts=meta.starts,
        starts_failed=meta.starts_failed,
        starts_cancelled=meta.starts_cancelled,
        drains=meta.drains,
        recalls=meta.recalls,
        gpu_s=gpu_s,
        starting_gpu_s=sum(integral(one, one.starting * _each(one), until_s) for one in series),
        draining_gpu_s=sum(integral(one, one.draining * _each(one), until_s) for one in series),
        cost_usd=sum(known) if known else None,
        counters=meta.counters,
        notices=meta.notices,
    )


def _each(series: Series) -> F64:
    """GPUs of one worker, at each change."""
    workers = series.starting + series.ready + series.draining
    return np.divide(series.gpus, workers, out=np.zeros_like(workers), where=workers > 0)


def _decisions(plans: Mapping[str, list[Any]]) -> list[ChangeFigures]:
    names = ("at_s", "decision_id", "role", "ready", "starting", "final", "reason", "text")
    return [
        ChangeFigures(
            at_s=at_s,
            decision_id=decision_id,
            role=str(role),
            before=ready + starting,
            after=final,
            reason=str(reason),
            text=str(text),
        )
        for at_s, decision_id, role, ready, starting, final, reason, text in zip(
            *(plans[name] for name in names), strict=True
        )
        if decision_id is not None and final != ready + starting
    ]


def _role(series: Series, decisions: Sequence[ChangeFigures], end_s: float) -> RoleFigures:
    mine = [one for one in decisions if one.role == series.role]
    span = end_s - float(series.at_s[0])
    return RoleFigures(
        role=series.role,
        first=int(series.ready[0]),
        most=int(series.ready.max()),
        fewest=int(series.ready.min()),
        mean=integral(series, series.ready, end_s) / span if span > 0 else None,
        ups=sum(one.after > one.before for one in mine),
        downs=sum(one.after < one.before for one in mine),
    )
