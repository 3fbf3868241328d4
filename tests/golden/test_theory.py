"""Queueing theory as a check from outside: mean waits of M/M/1 and M/M/c against the simulated ones.

Service is exponential because prompt lengths are drawn so (one output token, 1 ms per prompt token, one request in an
engine at a time); c servers with one queue are c workers behind a policy that holds requests back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import pytest
from simulate import engine_settings, simulate, trace_row

from policies.cluster.actions import Action, Dispatch
from policies.cluster.events import Event, RequestArrived, RequestFinished
from policies.cluster.state import ClusterView
from twin.mocker.demand import Row
from twin.perf.fixed import FixedLatency

pytestmark = pytest.mark.long

SECONDS_PER_TOKEN = 1e-5
MEAN_SERVICE_S = 1.0


class OneQueue:
    """First come, first served over all workers: a request waits here until one is empty."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, RequestFinished})

    def __init__(self) -> None:
        self._waiting: deque[RequestArrived] = deque()

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, RequestArrived):
            self._waiting.append(event)
        free = [w for w in view.live if not w.in_flight]
        for worker in free[: len(self._waiting)]:
            request = self._waiting.popleft()
            yield Dispatch(request_id=request.request_id, worker_id=worker.worker_id, rule="free", reason="empty")


def demand(load: float, servers: int, rows: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(MEAN_SERVICE_S / (load * servers), rows))
    tokens = np.maximum(1, np.rint(rng.exponential(MEAN_SERVICE_S, rows) / SECONDS_PER_TOKEN)).astype(int)
    return [trace_row(i, float(a), int(n), 1) for i, (a, n) in enumerate(zip(arrivals, tokens, strict=True))]


def simulated_wait(load: float, servers: int, *, rows: int, seed: int) -> tuple[float, float]:
    """Mean wait and the half width of its 99 % interval, by batch means after a warm-up."""
    latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=SECONDS_PER_TOKEN, decode_s=1.0)
    settings = engine_settings(
        max_num_seqs=1,
        block_size=1024,
        blocks=10_000,
        max_num_batched_tokens=10_000_000,
        prefix_caching=False,
        chunked_prefill=False,
        exclusive_prefill=True,
    )
    policies = [OneQueue()] if servers > 1 else None
    seen = simulate(demand(load, servers, rows, seed), [(settings, latency)] * servers, policies=policies)
    waits = np.array([request.sequence.admit_s - request.arrival_s for _, (request, _) in sorted(seen.ended.items())])  # type: ignore[union-attr, operator]
    batches = waits[rows // 10 :].reshape(30, -1).mean(axis=1)
    return float(batches.mean()), 2.756 * float(batches.std(ddof=1)) / math.sqrt(len(batches))


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c (Erlang C)."""
    top = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return top / (sum(offered**k / math.factorial(k) for k in range(servers)) + top)


@pytest.mark.parametrize(("load", "seed"), [(0.5, 1), (0.7, 2)])
def test_one_server_waits_as_m_m_1_says(load: float, seed: int) -> None:
    wait_s, half_width_s = simulated_wait(load, 1, rows=30_000, seed=seed)
    expected_s = load / (1 - load) * MEAN_SERVICE_S
    assert abs(wait_s - expected_s) <= half_width_s
    assert half_width_s < 0.2 * expected_s, "the interval must be narrow enough to mean something"


@pytest.mark.parametrize(("servers", "load", "seed"), [(2, 0.7, 3), (4, 0.8, 4)])
def test_c_servers_with_one_queue_wait_as_m_m_c_says(servers: int, load: float, seed: int) -> None:
    wait_s, half_width_s = simulated_wait(load, servers, rows=30_000, seed=seed)
    offered = servers * load
    expected_s = erlang_c(servers, offered) / (servers - offered) * MEAN_SERVICE_S
    assert abs(wait_s - expected_s) <= half_width_s
    assert half_width_s < 0.25 * expected_s
