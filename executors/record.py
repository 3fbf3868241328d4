"""The record of a live run: the same folder that a replay writes, with measured figures in place of simulated ones.

Journal, requests, gaps between tokens, decisions; at the end a report. `twin report`, `twin compare` and `twin replay`
(of the journal) read it as they read any other. Times are of the world's clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import xxhash

from executors.backend import STOP_STRING, End
from executors.fleet import Fleet
from executors.live_worker import LiveWorker
from executors.requests import OpenRequest
from executors.world import Watch
from policies.cluster.actions import Action, Dispatch, Enqueue, Reject
from policies.cluster.events import Event
from policies.cluster.ids import Leg, RequestId, WorkerId
from policies.cluster.journal import Header, Journal
from reports.build import build_report
from reports.record import RunWriter, finish_run
from reports.report import LatencyMeta, Report, RunMeta, TraceMeta, WorkerMeta
from reports.sla import parse_sla
from twin import __version__
from twin.config import Config
from twin.config_text import to_plain, to_toml
from twin.describe_router import router_line

JOURNAL, CONFIG_TOML = "journal.jsonl", "config.toml"
STATUS = {"stop": "completed", "length": "completed"}
SPILL_EVERY = 256
log = logging.getLogger(__name__)


class LiveRecord(Watch):
    """Of one run, into `folder`. Give it to the world as its `watch` and to the controller as its journal. `number` is
    that of its router, where it has peers.

    `close` writes the report; whatever happens before it, what was recorded up to then can be read. Where nothing more
    can be written (`failed`), recording ends and serving goes on.
    """

    failed: OSError | None = None

    def __init__(self, folder: Path, config: Config, policies: Sequence[object], number: int | None = None) -> None:
        self.folder = folder
        self._config = config
        self._writer = RunWriter(folder, others=(JOURNAL, CONFIG_TOML))
        self._file: IO[str] = self._writer.place(JOURNAL).open("w", encoding="utf-8")
        self._began_s = time.time()
        self._cpu = os.times()
        plain = to_plain(config, live=True)
        header = Header(
            versions={"dynatwin": __version__, "xxhash": xxhash.VERSION},
            config={
                **plain,
                "live": {
                    **plain["live"],
                    "started_unix_s": self._began_s,
                    "clock": "monotonic",
                    "router": number,
                },
            },
            seed=config.seed,
            policies=tuple(type(policy).__name__ for policy in policies),
        )
        self._journal = Journal(self._file.write, header)
        self._rows: dict[RequestId, int] = {}
        self._count = 0
        self._mode = config.router.mode

    # ------------------------------------------------------------ JournalSink

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        """Every event with what was ordered for it."""
        if self.failed is not None:
            return
        try:
            self._journal.note(event, actions)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk is no reason to serve nobody."""
        self.failed = error
        log.error("%s: %s; nothing more is recorded, serving goes on", self.folder, error.strerror)
        with contextlib.suppress(OSError):
            self._file.close()

    # ------------------------------------------------------------ Watch

    def arrived(self, request: OpenRequest) -> None:
        self._rows[request.ask.request_id] = self._count
        self._count += 1

    def ordered(self, request: OpenRequest, action: Dispatch | Reject | Enqueue, at_s: float) -> None:
        if self.failed is not None:
            return
        row, request_id = self._rows[request.ask.request_id], action.request_id
        if isinstance(action, Dispatch):
            told = self._mode if action.leg is Leg.AGG else f"{self._mode} {action.leg.value}"
            shown = json.dumps([asdict(one) for one in action.candidates]) if action.candidates else None
            self._writer.decisions.append(
                (
                    at_s,
                    row,
                    request_id,
                    action.worker_id,
                    told,
                    action.rule,
                    action.overlap_blocks,
                    action.reason,
                    shown,
                )
            )
        elif isinstance(action, Enqueue):
            queued = (at_s, row, request_id, None, self._mode, "queue", None, action.reason, None)
            self._writer.decisions.append(queued)

    def tokens(self, request: OpenRequest, worker_id: WorkerId, count: int, at_s: float) -> None:
        """A gap for each token but the first: those that come together come at once."""
        if self.failed is not None:
            return
        last_s = request.last_token_s
        if last_s is not None:
            self._gap(worker_id, last_s, at_s, 1)
            count -= 1
        elif count:
            count -= 1
        if count:
            self._gap(worker_id, at_s, at_s, count)

    def _gap(self, worker_id: WorkerId, last_s: float, now_s: float, count: int) -> None:
        self._writer.steps.append(
            (worker_id, "gap", last_s, now_s, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, count, now_s - last_s, 0.0, 0.0)
        )

    def ended(self, request: OpenRequest, end: End) -> None:
        ask, row = request.ask, self._rows.pop(request.ask.request_id)
        if self.failed is not None:
            return
        stopped = end.outcome == "cancelled" and end.reason == STOP_STRING  # by us: the client has its whole answer
        status = "completed" if stopped else STATUS.get(end.outcome, end.outcome)
        reason = f"{end.code}: {end.reason}" if end.code else end.reason
        if end.retry_after_s is not None:
            self._writer.retry_after_s[row] = end.retry_after_s
        self._writer.requests[row] = (
            row,
            ask.request_id,
            ask.session_id,
            request.arrival_s,
            len(ask.token_ids),
            ask.out_tokens or (end.output_tokens if status == "completed" else ask.max_tokens),
            status,
            reason or None,
            request.worker_id,
            request.prefill_worker_id,
            request.dispatch_s,
            None,
            request.first_token_s,
            request.last_token_s,
            end.output_tokens,
            end.cached_tokens,
            0,
            end.migrations,
            request.prefilled_s,
            None,
        )
        if not self._count % SPILL_EVERY and self.failed is None:
            try:
                self._writer.spill()
            except OSError as error:
                self._give_up(error)

    # ------------------------------------------------------------ the end

    def close(self, fleet: Fleet, *, complete: bool = True) -> Report:
        """Write what is left, and the report. Every request must have ended, and nothing may have failed."""
        self._journal.flush()
        self._file.close()
        self._writer.close()
        (self.folder / CONFIG_TOML).write_text(to_toml(self._config, live=True), encoding="utf-8")
        sla = parse_sla(self._config.sla) if self._config.sla is not None else None
        report = build_report(self.folder, self._meta(fleet), sla)
        now = os.times()
        finish_run(
            self.folder,
            complete=complete,
            cpu_s=now.user + now.system - self._cpu.user - self._cpu.system,
            wall_s=time.time() - self._began_s,
            asked_requests=self._count,
            versions={"dynatwin": __version__, "xxhash": xxhash.VERSION, **_engines(fleet)},
        )
        return report

    def _meta(self, fleet: Fleet) -> RunMeta:
        workers = list(fleet.ever.values())
        return RunMeta(
            trace=TraceMeta(name="live", format="live", synthetic=False),
            cluster=tuple(
                f"{worker.up.name}: {worker.facts.engine} {worker.facts.version}, {worker.up.role.value}, "
                f"{', '.join(worker.facts.models)}"
                for worker in workers
            ),
            router=router_line(self._config),
            latency=tuple(
                LatencyMeta(group=group, model="measured", source="a live run") for group in _groups(workers)
            ),
            workers=tuple(
                WorkerMeta(
                    worker_id=worker.worker_id,
                    name=worker.up.name,
                    group=worker.group,
                    gpus=worker.up.gpus,
                    role=worker.up.role.value,
                    total_blocks=worker.up.total_blocks,
                    block_size=worker.up.block_size,
                    held_from_s=worker.up.at_s,
                    held_until_s=worker.left_s,
                )
                for worker in workers
            ),
            gpus=sum(worker.up.gpus for worker in workers),
            hash_known=True,
            seed=self._config.seed,
            simulated=any(worker.facts.engine == "mock" for worker in workers),
            config=to_plain(self._config, live=True),
            origins=dict(self._config.origins),
        )


def _groups(workers: Sequence[LiveWorker]) -> list[str]:
    return sorted({worker.group for worker in workers})


def _engines(fleet: Fleet) -> dict[str, str]:
    return {worker.facts.engine: worker.facts.version for worker in fleet.ever.values()}
