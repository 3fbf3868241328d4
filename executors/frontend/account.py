"""What is counted of one request, from its head to its end: every gauge that goes up comes down again.

Latencies are counted when the answer is complete: those of clients that left, and of answers that broke off, are not
latencies of the service.
"""

from __future__ import annotations

import logging
from typing import Literal

from executors.backend import End
from executors.frontend.errors import CANCELLED, RATE_LIMIT, ApiError
from executors.frontend.metrics import UNKNOWN_MODEL, micro
from executors.frontend.requests.wanted import Wanted
from executors.frontend.services import Call, Services

log = logging.getLogger(__name__)

Endpoint = Literal["chat_completions", "completions", "responses", "anthropic_messages", "kserve"]


class Account:
    """One request. `begin` once its model is known, `close` always."""

    def __init__(self, services: Services, call: Call, endpoint: Endpoint) -> None:
        self._services = services
        self._metrics = services.metrics
        self._call = call
        self._endpoint = endpoint
        self._model = UNKNOWN_MODEL
        self._kind = "unary"
        self._begun = False
        self._waiting = False
        self._inflight = 0
        self._error: ApiError | None = None
        self._wanted: Wanted | None = None
        self._gaps_s: list[float] = []
        self._ends: list[End] = []
        self._output_tokens = 0
        self._prompt_tokens: list[int] = []
        self.ttft_s: float | None = None

    def begin(self, wanted: Wanted) -> None:
        self._model = self._services.label(wanted.model)
        self._wanted = wanted
        self._kind = "stream" if wanted.stream else "unary"
        self._begun = self._waiting = True
        self._metrics.started.labels(self._model, self._endpoint).inc()
        self._metrics.active.labels(self._model).inc()
        self._metrics.queued.labels(self._model).inc()

    def submitted(self, prompt_tokens: list[int]) -> None:
        """The workers have it, once for each answer."""
        self._prompt_tokens = prompt_tokens
        self._inflight += 1
        self._metrics.inflight.labels(self._model).inc()

    def tokens(self, at_s: float, count: int, gap_s: float | None) -> None:
        """Tokens came at `at_s`, `gap_s` after the ones before them of the same answer; all at once, so that the gaps
        between them are 0."""
        self._output_tokens += count
        if self.ttft_s is None:
            self.ttft_s = micro(at_s - self._call.received_s)
            self._services.live.first_token(at_s, self.ttft_s)
            self._no_longer_waiting()
        self._services.live.tokens(at_s, count, gap_s)
        if gap_s is not None:
            self._gaps_s.append(micro(gap_s))
        self._gaps_s.extend([0.0] * (count - 1))

    def answered(self, end: End) -> None:
        """One answer of the request ended, well or not."""
        self._ends.append(end)
        if end.migrations:
            self._metrics.migrated.labels(self._model).inc(end.migrations)
            self._metrics.migration_s.labels(self._model).observe(max(self._gaps_s, default=0.0))

    def fail(self, error: ApiError) -> None:
        if self._error is None:
            self._error = error

    def close(self) -> None:
        """Everything is counted that is counted at an end."""
        now = self._services.now()
        self._no_longer_waiting()
        if self._begun:
            self._metrics.active.labels(self._model).dec()
        self._metrics.inflight.labels(self._model).dec(self._inflight)
        self._services.live.end(now, failed=self._error is not None)
        self._services.rate.tokens(self._call.principal, sum(self._prompt_tokens) + self._output_tokens)
        self._metrics.output_total.labels(self._model).inc(self._output_tokens)
        status, counted = ("success", "") if self._error is None else ("error", self._error.kind.counted)
        self._metrics.requests.labels(self._model, self._endpoint, self._kind, status, counted).inc()
        if self._error is None:
            self._latencies(now)
        else:
            self._failure(self._error)

    def _failure(self, error: ApiError) -> None:
        self._metrics.failures.labels(error.kind.counted, error.code or "").inc()
        if error.kind is CANCELLED:
            self._metrics.cancelled.labels(self._model).inc()
            if error.code == "client":
                self._metrics.disconnected.inc()
        elif error.kind.counted in ("overload", "unavailable") and error.kind is not RATE_LIMIT:
            self._metrics.rejected.labels(self._model).inc()
        elif error.kind.counted == "response_timeout":
            self._metrics.deadline_exceeded.labels(error.code or "").inc()
        log.info("request %s: %s %s", self._call.request_id, error.kind.status, error.code or error.kind.type)

    def _latencies(self, now: float) -> None:
        metrics, model = self._metrics, self._model
        if self.ttft_s is not None:
            metrics.ttft.labels(model).observe(self.ttft_s)
        itl = metrics.itl.labels(model)
        for gap_s in self._gaps_s:
            itl.observe(gap_s)
        metrics.duration.labels(model).observe(micro(now - self._call.received_s))
        metrics.output_tokens.labels(model).observe(self._output_tokens)
        for count in self._prompt_tokens:
            metrics.input_tokens.labels(model).observe(count)
        for end in self._ends:
            metrics.cached_tokens.labels(model).observe(end.cached_tokens or 0)
            if "queue_s" in end.timing:
                metrics.queue_wait.labels(model).observe(micro(end.timing["queue_s"]))
                metrics.stage.labels("route").observe(micro(end.timing["queue_s"]))
        self._of_worker()
        self._own_targets()

    def _of_worker(self) -> None:
        named = {worker.name: str(worker.worker_id) for worker in self._services.backend.workers()}
        for end in self._ends:
            worker = named.get(end.worker or "")
            if worker is None:
                continue
            if self.ttft_s is not None:
                self._metrics.last_ttft.labels(worker, "0").set(self.ttft_s)
            if self._gaps_s:
                self._metrics.last_itl.labels(worker, "0").set(self._gaps_s[-1])
            self._metrics.last_isl.labels(worker, "0").set(max(self._prompt_tokens, default=0))

    def _own_targets(self) -> None:
        """The limits that the client set for itself, kept or not; those of gaps are for their mean."""
        assert self._wanted is not None
        asked = self._wanted.extensions
        mean_s = sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else None
        for metric, limit_s, value_s in (
            ("ttft", asked.ttft_target_s, self.ttft_s),
            ("itl", asked.itl_target_s, mean_s),
        ):
            if limit_s is not None and value_s is not None:
                self._metrics.own_target.labels(metric, str(value_s <= limit_s).lower()).inc()

    def _no_longer_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._metrics.queued.labels(self._model).dec()
