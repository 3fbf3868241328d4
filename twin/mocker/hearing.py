"""What a planner hears of a simulated cluster: a window of traffic every so often, and forward passes of its engines.

Both only where somebody subscribes. A pass is that which was under way at a whole sample, told one sample later: it has
ended by then. Nothing depends on how steps were cut, so leaping changes nothing; and nothing is told early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from policies.cluster.events import WorkerUp
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.traffic import ForwardPass, Lengths, PassLoad, TrafficWindow, WindowKind
from policies.frozen import frozen
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.worker import MockWorker

if TYPE_CHECKING:
    from policies.cluster.events import Event
    from twin.engine.plan import Look
    from twin.engine.settings import EngineSettings
    from twin.mocker.requests import OpenRequest
    from twin.mocker.world import MockWorld

_LATE, _LOOK = int(Order.LATE), int(Order.LOOK)
MOST_LENGTHS = 128
"""Requests of a window whose lengths are told."""


@frozen
class HearingRules:
    """A window every `window_s`, a pass of each engine every `pass_s`; both `lag_s` later than they could be."""

    window_s: float
    pass_s: float = 1.0
    lag_s: float = 0.0


class Hearing:
    """Of one world; `start` before it runs."""

    def __init__(self, world: MockWorld, rules: HearingRules) -> None:
        self._world = world
        self._rules = rules
        self._window = _Window(0.0)
        self._counters: dict[tuple[WorkerId, int], int] = {}

    def start(self) -> None:
        """Begin to listen, to what somebody wants to know."""
        world = self._world
        if world.controller.wants(TrafficWindow):
            world.churn.on_arrival.append(self._arrived)
            world.when_ended(self._ended)
            self._next(self._rules.window_s, _LATE, self._tell_window)
        if world.controller.wants(ForwardPass):
            self._next(self._rules.pass_s, _LOOK, self._look)

    def _next(self, after_s: float, order: int, what: Callable[[], None]) -> None:
        self._world.clock.watch(instant(self._world.clock.now + after_s), order, what)

    def _post_later(self, event: Callable[[float], Event | None], delay_s: float) -> None:
        """Post an event after a while, if the run still goes on then."""

        def post() -> None:
            told = event(self._world.clock.now)
            if told is not None:
                self._world.post(told)

        if delay_s > 0.0:
            self._next(delay_s, _LATE, post)
        else:
            post()

    # ------------------------------------------------------------ windows of traffic

    def _arrived(self, _: int, request_id: RequestId) -> None:
        window = self._window
        window.arrivals += 1
        window.isl += self._world.open[request_id].row.isl

    def _ended(self, request: OpenRequest, status: str) -> None:
        self._window.ended(request, status)

    def _tell_window(self) -> None:
        world = self._world
        window, self._window = self._window, _Window(world.clock.now)
        keyed = world.keyed
        accept = next((found for spec in world.specs.values() if (found := _accept_length(spec.settings))), None)
        end_s = world.clock.now
        self._post_later(lambda at_s: window.told(at_s, end_s, keyed=keyed, accept_length=accept), self._rules.lag_s)
        if world.goes_on:
            self._next(self._rules.window_s, _LATE, self._tell_window)

    # ------------------------------------------------------------ forward passes

    def _look(self) -> None:
        """Take a sample of every engine; it is told with the next one."""
        world, now_s = self._world, self._world.clock.now
        for worker in world.workers.values():
            upset = world.churn.upsets.get(worker.worker_id) if world.churn.upsets else None
            if worker.down or worker.hung or worker.fenced or (upset is not None and upset.silent):
                continue
            self._take(worker, worker.look(now_s))
        if world.goes_on:
            self._next(self._rules.pass_s, _LOOK, self._look)

    def _take(self, worker: MockWorker, look: Look) -> None:
        up = worker.up
        key = (up.worker_id, up.epoch)
        counter = self._counters[key] = self._counters.get(key, 0) + 1
        self._post_later(
            lambda at_s: self._pass(worker, up, look, counter, at_s), self._rules.pass_s + self._rules.lag_s
        )

    def _pass(self, worker: MockWorker, up: WorkerUp, look: Look, counter: int, at_s: float) -> ForwardPass | None:
        """What is heard of a sample; nothing of a worker that is gone by then, or cut off."""
        worker_id = up.worker_id
        if worker.fenced or worker.up is not up or self._world.partitions.is_cut_off(worker_id):
            return None
        return ForwardPass(
            at_s=at_s,
            worker_id=worker_id,
            counter=counter,
            wall_time_s=look.wall_s,
            scheduled=PassLoad(
                num_prefill_requests=look.prefills,
                sum_prefill_tokens=look.prefill_tokens,
                num_decode_requests=look.decodes,
                sum_decode_kv_tokens=look.ctx_tokens,
            ),
            queued=PassLoad(
                num_prefill_requests=look.queued,
                sum_prefill_tokens=look.queued_tokens,
                num_decode_requests=look.paused,
                sum_decode_kv_tokens=look.paused_tokens,
            ),
        )


class _Window:
    """What came in and what ended since `start_s`."""

    __slots__ = ("arrivals", "cached", "isl", "lengths", "prompts", "start_s", "tpots", "ttfts")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.arrivals = self.isl = self.prompts = self.cached = 0
        self.lengths: list[tuple[int, int]] = []
        self.ttfts: list[float] = []
        self.tpots: list[float] = []

    def ended(self, request: OpenRequest, status: str) -> None:
        admitted, first_s, last_s, made = request.told()
        if admitted is not None and admitted.cached_tokens is not None:
            self.prompts += admitted.prompt
            self.cached += admitted.cached_tokens
        if status != "completed" or first_s is None or last_s is None:
            return
        self.lengths.append((request.row.isl, made))
        self.ttfts.append(first_s - request.arrival_s)
        if made > 1:
            self.tpots.append((last_s - first_s) / (made - 1))

    def told(self, at_s: float, end_s: float, *, keyed: bool, accept_length: float | None) -> TrafficWindow:
        """As an event. Times are per request: to the first token, and the mean gap between tokens."""
        completed = len(self.lengths)
        stride = max(1, -(-completed // MOST_LENGTHS))
        return TrafficWindow(
            at_s=at_s,
            t0_s=self.start_s,
            t1_s=end_s,
            kind=WindowKind.OBSERVED,
            num_req=float(self.arrivals),
            isl=self.isl / self.arrivals if self.arrivals else None,
            osl=sum(osl for _, osl in self.lengths) / completed if completed else None,
            kv_hit_rate=self.cached / self.prompts if keyed and self.prompts else None,
            accept_length=accept_length,
            ttft_s=_mean(self.ttfts),
            itl_s=_mean(self.tpots),
            ttft_p95_s=_p95(self.ttfts),
            itl_p95_s=_p95(self.tpots),
            completed=completed,
            lengths=tuple(Lengths(isl=isl, osl=osl) for isl, osl in self.lengths[::stride]),
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _p95(values: list[float]) -> float | None:
    return float(np.quantile(np.array(values), 0.95)) if values else None


def _accept_length(settings: EngineSettings) -> float | None:
    """Tokens that a decode step makes on average of each sequence; None without drafts."""
    if settings.speculation is None:
        return None
    total, holds = 1.0, 1.0
    for rate in settings.speculation.accept_rates:
        holds *= rate
        total += holds
    return total
