"""The frontend's metrics, in one place: names, labels and buckets of the contract, as Prometheus text.

Times are rounded to 1 µs before they are counted, so that 100 ms falls into the bucket of 0.1 s. Gauges of requests
return to 0 when nothing is open. Model names that nobody serves share one label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector

UNKNOWN_MODEL: Final = "unknown_model"
OURS: Final = "dynatwin_frontend"
_FINE: Final = (0.001, 0.002, 0.005, 0.05, 0.25, 0.5, 2.5)
"""Added to the lists of times of Dynamo 1.6.1, so that round limits can be read off."""
_TTFT: Final = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
_ITL: Final = (
    0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44, 80,
)  # fmt: skip
_DURATION: Final = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
_INPUT: Final = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_OUTPUT: Final = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
_STAGE: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5)
_TOKENIZE: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_TEMPLATE: Final = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
_LOOP: Final = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_MIGRATION: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_BODY: Final = tuple(float(4**power) for power in range(4, 13))


def micro(seconds: float) -> float:
    return round(seconds, 6)


class Metrics:
    """Every series of the frontend. `collectors` are read at each scrape (gauges of workers and models)."""

    def __init__(self, prefix: str, *, fine: bool, collectors: Sequence[Collector] = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)
        make = _Maker(prefix, self.registry, fine)
        kinds = ("model", "endpoint", "request_type", "status", "error_type")
        self.requests = make.counter("requests", "Requests by how they ended.", kinds)
        self.started = make.counter("requests_started", "Requests that were read.", ("model", "endpoint"))
        self.failures = make.counter("failures", "Requests that failed, by reason.", ("class", "reason"))
        self.disconnected = make.gauge("disconnected_clients", "Clients that left before their answer was complete.")
        self.active = make.gauge("active_requests", "Requests that are being handled.", ("model",))
        self.inflight = make.gauge("inflight_requests", "Requests that the workers have.", ("model",))
        self.queued = make.gauge("queued_requests", "Requests without a first token yet.", ("model",))
        self.ttft = make.seconds("time_to_first_token_seconds", "From the request's head to its first token.", _TTFT)
        self.itl = make.seconds("inter_token_latency_seconds", "One gap between tokens.", _ITL)
        self.duration = make.seconds("request_duration_seconds", "From the request's head to its end.", _DURATION)
        self.input_tokens = make.histogram("input_sequence_tokens", "Tokens of prompts.", _INPUT, ("model",))
        self.cached_tokens = make.histogram("cached_tokens", "Tokens of prompts found in caches.", _INPUT, ("model",))
        self.output_tokens = make.histogram("output_sequence_tokens", "Tokens of answers.", _OUTPUT, ("model",))
        self.output_total = make.counter("output_tokens", "Tokens of answers.", ("model",))
        self.cancelled = make.counter("model_cancellation", "Requests whose client left.", ("model",))
        self.rejected = make.counter("model_rejection", "Requests refused for load or want of workers.", ("model",))
        self.migrated = make.counter("model_migration", "Requests sent again to another worker.", ("model",))
        self.migration_s = make.histogram(
            "model_migration_duration_seconds", "The longest gap of a migrated request.", _MIGRATION, ("model",)
        )
        self.stage = make.histogram("stage_duration_seconds", "Time within a stage.", _STAGE, ("stage",))
        self.stage_requests = make.gauge("stage_requests", "Requests within a stage.", ("stage",))
        self.tokenize = make.histogram("tokenize_seconds", "Encoding of one prompt.", _TOKENIZE)
        self.template = make.histogram("template_seconds", "Filling of one chat template.", _TEMPLATE)
        self.loop_delay = make.histogram("event_loop_delay_seconds", "How late the event loop wakes up.", _LOOP)
        self.last_ttft = make.gauge(
            "worker_last_time_to_first_token_seconds", "The last one.", ("worker_id", "dp_rank")
        )
        self.last_itl = make.gauge("worker_last_inter_token_latency_seconds", "The last one.", ("worker_id", "dp_rank"))
        self.last_isl = make.gauge("worker_last_input_sequence_tokens", "The last one.", ("worker_id", "dp_rank"))
        ours = _Maker(OURS, self.registry, fine)
        self.queue_wait = ours.seconds("queue_wait_seconds", "Wait for a worker.", _TTFT)
        self.slow_reader = ours.counter("slow_reader", "Clients that did not read what they asked for.")
        self.let_pass = ours.counter("let_pass", "What was dropped or ignored instead of refused.", ("what",))
        self.unknown_parameter = ours.counter("unknown_parameter", "Unknown parameters that were let pass.")
        self.body_bytes = ours.histogram("body_bytes", "Sizes of request bodies.", _BODY)
        self.auth_failures = ours.counter("auth_failures", "Missing, wrong or insufficient API keys.", ("reason",))
        self.deadline_exceeded = ours.counter(
            "deadline_exceeded", "Requests that took longer than allowed.", ("which",)
        )
        self.refused_connections = ours.counter("refused_connections", "Connections turned away.", ("reason",))
        self.own_target = ours.counter("own_target", "Requests with limits of their own.", ("metric", "met"))

    def let_by(self, what: str) -> None:
        if what == "unknown_parameter":
            self.unknown_parameter.inc()
        else:
            self.let_pass.labels(what).inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Maker:
    """Metrics of one prefix. `fine`: more buckets of times than Dynamo has."""

    def __init__(self, prefix: str, registry: CollectorRegistry, fine: bool) -> None:
        self._prefix = prefix
        self._registry = registry
        self._fine = fine

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Iterable[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", text, labels, registry=self._registry, buckets=tuple(buckets))

    def seconds(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """A latency of users, by model."""
        return self.histogram(name, text, sorted({*buckets, *_FINE}) if self._fine else buckets, ("model",))
