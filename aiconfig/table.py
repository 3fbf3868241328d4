"""Every candidate of a search as a table with its figures and its reason: candidates.parquet, and the front as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

from aiconfig.candidate import Candidate
from aiconfig.names import candidate_of
from aiconfig.outcome import Scored, SearchResult
from aiconfig.reasons import Rejection
from aiconfig.result import objective_of, terms_of
from policies.errors import ConfigError
from reports.files import whole_file

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
STATISTICS: Final = ("mean", "p50", "p95", "p99")


class Row(NamedTuple):
    """One candidate. `reason` is None for those in the answer; seconds and tokens; what is not known is None."""

    name: str
    rank: int | None
    engine: str
    mode: str
    gpus: int | None
    pools: str
    router: str | None
    host_kv_bytes: int | None
    disk_kv_bytes: int | None
    reason: str | None
    needs: float | None
    has: float | None
    unit: str | None
    detail: str | None
    level: str | None = None
    users: int | None = None
    rate_rps: float | None = None
    verdict: str | None = None
    distance: float | None = None
    objective: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    tokens_per_s_per_gpu_bought: float | None = None
    tokens_per_s_per_user: float | None = None
    kv_share: float | None = None
    bound: str | None = None
    front: bool = False
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    itl_mean_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    e2e_mean_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None


def rows_of(outcome: SearchResult) -> Iterator[Row]:
    """First those with an estimate in their order, each with its reason if it is left out all the same; then others."""
    reasons = {one.name: one for one in outcome.rejections}
    fronted = {one.candidate.name for one in outcome.front}
    for rank, one in enumerate(outcome.ranked, start=1):
        yield _scored(rank, one, reasons.pop(one.candidate.name, None), one.candidate.name in fronted, outcome)
    for rejection in outcome.rejections:
        if rejection.name in reasons:
            yield _rejected(rejection, outcome.request.model)


def _scored(rank: int, one: Scored, why: Rejection | None, fronted: bool, outcome: SearchResult) -> Row:
    estimate, request = one.estimate, outcome.request
    return Row(
        name=one.candidate.name,
        rank=rank,
        engine=one.candidate.engine,
        mode=one.candidate.mode,
        gpus=one.candidate.gpus,
        pools=" + ".join(pool.label for pool in one.candidate.pools),
        **_served(one.candidate),
        reason=why.reason if why is not None else None,
        needs=why.needs if why is not None else None,
        has=why.has if why is not None else None,
        unit=why.unit or None if why is not None else None,
        detail=why.detail or None if why is not None else None,
        level=estimate.level,
        users=one.load.users,
        rate_rps=one.load.rps,
        verdict=one.judgement.verdict,
        distance=one.distance,
        objective=objective_of(request).figure(estimate, terms_of(request)),
        requests_per_s=estimate.requests_per_s,
        output_tokens_per_s=estimate.output_tokens_per_s,
        tokens_per_s_per_gpu_bought=estimate.output_tokens_per_s / request.gpus,
        tokens_per_s_per_user=estimate.tokens_per_s_per_user,
        kv_share=estimate.kv_share,
        bound=estimate.bound,
        front=fronted,
        **{
            f"{metric}_{statistic}_s": estimate.value(metric, statistic)
            for metric in LATENCIES
            for statistic in STATISTICS
        },
    )


def _rejected(why: Rejection, model: str) -> Row:
    try:
        candidate = candidate_of(why.name, model)
    except ConfigError:  # a rule on one worker of two is about that worker alone
        engine, _, rest = why.name.partition("-")
        mode, gpus, pools = rest.partition("-")[0], None, ""
        served = _served(None)
    else:
        engine, mode, gpus = candidate.engine, candidate.mode, candidate.gpus
        pools = " + ".join(pool.label for pool in candidate.pools)
        served = _served(candidate)
    return Row(
        name=why.name,
        rank=None,
        engine=engine,
        mode=mode,
        gpus=gpus,
        pools=pools,
        **served,
        reason=why.reason,
        needs=why.needs,
        has=why.has,
        unit=why.unit or None,
        detail=why.detail or None,
    )


class _Served(TypedDict):
    router: str | None
    host_kv_bytes: int | None
    disk_kv_bytes: int | None


def _served(candidate: Candidate | None) -> _Served:
    serving = candidate.serving if candidate is not None else None
    return _Served(
        router=serving.router if serving else None,
        host_kv_bytes=serving.host_kv_bytes if serving else None,
        disk_kv_bytes=serving.disk_kv_bytes if serving else None,
    )


_TYPES: Final = {"int": "int64", "float": "float64", "str": "string", "bool": "bool_"}


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """All rows, one column for each field."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for at, name in enumerate(Row._fields):
        kind = _TYPES[str(Row.__annotations__[name]).removeprefix("ForwardRef('").split(" ")[0].rstrip("')")]
        values = [row[at] for row in rows]
        if kind == "float64":
            values = [None if value is None else float(value) for value in values]
        columns[name] = pa.array(values, getattr(pa, kind)())
    part = path.with_name(f"{path.name}.part")
    try:
        pq.write_table(pa.table(columns), part, compression="zstd")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """The same as text."""
    with whole_file(path) as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(["" if value is None else value for value in row] for row in rows)
