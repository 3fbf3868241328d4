"""Gauges that are read from whatever serves at the moment of a scrape: models and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from executors.backend import Backend, WorkerGlance
from executors.frontend.metrics import OURS
from executors.shadow.figures import Glance as Shadow

FACTS: Final = (
    "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "kv_cache_block_size", "migration_limit",
)  # fmt: skip


class Hooks(Protocol):
    """What a backend may have beside `Backend`; the frontend asks only for what is there."""

    def model_facts(self) -> Mapping[str, Mapping[str, float]]:
        """By model: those of `FACTS` that are known."""
        ...

    def peer_counts(self) -> Mapping[str, int]:
        """Of a router that shares bookings: messages by what became of them, `unknown` steps, `others` that are known;
        empty where there are no peers."""
        ...

    def predicted(self) -> Mapping[str, object]:
        """What the twin expects of now, for the dashboard: by name ("ttft_ms", "itl_ms", ...) a list of [s, value]."""
        ...

    def shadow(self) -> Shadow | None:
        """The twin beside it, predicted against measured; None where there is none."""
        ...


def model_facts(backend: Backend) -> Mapping[str, Mapping[str, float]]:
    return cast(Hooks, backend).model_facts() if hasattr(backend, "model_facts") else {}


def peer_counts(backend: Backend) -> Mapping[str, int]:
    return cast(Hooks, backend).peer_counts() if hasattr(backend, "peer_counts") else {}


def predicted(backend: Backend) -> Mapping[str, object]:
    return cast(Hooks, backend).predicted() if hasattr(backend, "predicted") else {}


def shadow(backend: Backend) -> Shadow | None:
    return cast(Hooks, backend).shadow() if hasattr(backend, "shadow") else None


class Glance(Collector):
    """Reads `backend` when a scrape comes."""

    def __init__(self, backend: Backend, prefix: str, models: tuple[str, ...]) -> None:
        self._backend = backend
        self._prefix = prefix
        self._models = models

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is asked of the backend before it serves

    def collect(self) -> Iterator[Metric]:
        yield from self._of_models()
        yield from self._of_workers()
        yield from self._of_peers()

    def _of_models(self) -> Iterator[Metric]:
        serving = self._backend.serving()
        ready = self._gauge("model_ready", "Whether every role has a worker that takes new work.", ("model",))
        context = self._gauge("model_context_length", "Tokens of prompt and answer together.", ("model",))
        for model in self._models:
            ready.add_metric((model,), float(model in serving.ready))
            context.add_metric((model,), serving.context_tokens)
        yield ready
        yield context
        facts = model_facts(self._backend)
        for name in FACTS:
            gauge = self._gauge(f"model_{name}", "As its workers say.", ("model",))
            for model, known in facts.items():
                if name in known:
                    gauge.add_metric((model,), known[name])
            if gauge.samples:
                yield gauge

    def _of_workers(self) -> Iterator[Metric]:
        workers = self._backend.workers()
        counts = self._gauge("model_workers", "Workers by role and state.", ("role", "state"))
        kinds: dict[tuple[str, str], int] = {}
        for worker in workers:
            kinds[worker.role, worker.state] = kinds.get((worker.role, worker.state), 0) + 1
        for (role, state), count in kinds.items():
            counts.add_metric((role, state), count)
        yield counts
        for name, text in _OF_A_WORKER.items():
            gauge = self._gauge(f"worker_{name}", text, ("worker_id", "dp_rank"))
            for worker in workers:
                value = _value(worker, name)
                if value is not None and worker.state != "starting":  # it has no id yet
                    gauge.add_metric((str(worker.worker_id), "0"), value)
            yield gauge

    def _of_peers(self) -> Iterator[Metric]:
        counts = peer_counts(self._backend)
        if not counts:
            return
        yield GaugeMetricFamily(f"{OURS}_peers", "Other routers that are known.", value=counts["others"])
        what = "Messages of routers to each other."
        messages = CounterMetricFamily(f"{OURS}_peer_messages", what, labels=("result",))
        for result in ("sent", "heard", "lost", "refused", "damaged"):
            messages.add_metric((result,), counts[result])
        yield messages
        what = "What they said of workers that are not known here."
        yield CounterMetricFamily(f"{OURS}_peer_unknown_steps", what, value=counts["unknown"])

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=labels)


_OF_A_WORKER: Final[Mapping[str, str]] = {
    "in_flight": "Requests that it has of ours.",
    "running": "Requests that its engine computes.",
    "waiting": "Requests that wait in its engine.",
    "kv_share": "Share of its KV blocks in use.",
    "cached_blocks": "Blocks in its cache.",
}


def _value(worker: WorkerGlance, name: str) -> float | None:
    value = getattr(worker, name)
    return None if value is None else float(value)
