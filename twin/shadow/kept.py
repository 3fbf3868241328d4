"""The rows of a simulation beside a live cluster: let go, or kept as the run folder that any replay leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from policies.cluster.ids import WorkerId
from reports.build import build_report
from reports.record import RunWriter, finish_run
from reports.sla import parse_sla
from traces.options import TraceInfo
from twin import __version__
from twin.config import Config
from twin.config_text import to_toml
from twin.describe import describe_run
from twin.mocker.sinks import MemorySinks

if TYPE_CHECKING:
    from twin.shadow.ahead import Ahead

CONFIG_TOML = "config.toml"
NOT_MODELLED = (
    "beside a live cluster: time in which engines start or hang, errors of engines, and hints of clients (nvext)",
)


class LetGo(MemorySinks):
    """Keeps nothing."""

    def spill(self) -> None:
        for rows in (self.requests, self.retry_after_s, self.steps, self.decisions):
            rows.clear()


@dataclass(frozen=True)
class _Demand:
    """What a report says of its trace, where clients are it."""

    info: TraceInfo
    skipped: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)


class Kept:
    """A run folder. `close` writes the report."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.sinks = RunWriter(folder, others=(CONFIG_TOML,))
        self._folder = folder
        self._config = config
        self._began_s = time.time()

    def close(self, ahead: Ahead, *, complete: bool) -> None:
        """Write what is left of the rows, and the report."""
        self.sinks.close()
        (self._folder / CONFIG_TOML).write_text(to_toml(self._config), encoding="utf-8")
        sla = parse_sla(self._config.sla) if self._config.sla is not None else None
        demand = _Demand(TraceInfo(path=Path("live"), format="live", time_unit="s", columns=()))
        meta = describe_run(
            self._config,
            ahead.workers.groups(),
            demand,
            ahead.policies[0],
            hash_known=ahead.world.keyed,
            no_effect=(),
        )
        gone_s, there = ahead.world.gone_s, ahead.world.workers
        meta = replace(
            meta,
            workers=tuple(
                replace(
                    worker,
                    held_from_s=there[WorkerId(worker.worker_id)].up.at_s,
                    held_until_s=gone_s.get(WorkerId(worker.worker_id)),
                )
                for worker in meta.workers
                if WorkerId(worker.worker_id) in there
            ),
            tiers=ahead.world.tiers,
            not_modelled=(*meta.not_modelled, *NOT_MODELLED),
        )
        build_report(self._folder, meta, sla)
        used = os.times()
        finish_run(
            self._folder,
            complete=complete,
            cpu_s=used.user + used.system,
            wall_s=time.time() - self._began_s,
            asked_requests=ahead.count,
            versions={"dynatwin": __version__},
        )
