"""A toy cluster that makes run folders for the tests of reports, and the token times to check them against.

It is a computed engine, small enough to read: whole prompts one at a time before any decoding, then decode steps of
all running requests. It must stay independent of the simulator, so that reports can be tested without it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports.build import LatencyMeta, RunMeta, TraceMeta, WorkerMeta
from reports.record import RequestRow, RunWriter, StepRow, finish_run

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the demand; `cancel_at_s` is when its client leaves."""

    arrival_s: float
    isl: int
    osl: int
    cached: int = 0
    cancel_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Costs and limits of the toy engine. A decode step takes decode_s + decode_s_per_ctx * (tokens in context)."""

    workers: int = 1
    prefill_s_per_token: float = 0.001
    decode_s: float = 0.010
    decode_s_per_ctx: float = 0.0
    max_seqs: int = 256
    total_blocks: int = 100_000
    leap: bool = True


SERIAL = Toy(max_seqs=1)


@dataclass(slots=True)
class _Life:
    """A request in the toy: what has happened to it so far."""

    row: int
    ask: Ask
    worker_id: int
    admit_s: float | None = None
    tokens: list[float] = field(default_factory=list)
    readmissions: int = 0

    @property
    def ctx(self) -> int:
        return self.ask.isl + len(self.tokens)

    @property
    def blocks(self) -> int:
        return -(-self.ctx // BLOCK_TOKENS)

    @property
    def blocks_after_next(self) -> int:
        return -(-(self.ctx + 1) // BLOCK_TOKENS)

    def gone(self, now_s: float) -> bool:
        return self.ask.cancel_at_s is not None and self.ask.cancel_at_s <= now_s

    def record(self, status: str, reason: str | None = None) -> tuple[object, ...]:
        ask, first = self.ask, self.tokens[0] if self.tokens else None
        last = self.tokens[-1] if self.tokens else None
        return (
            self.row, f"r{self.row}", None, ask.arrival_s, ask.isl, ask.osl, status, reason,
            None if status == "rejected" else self.worker_id, None, None if status == "rejected" else ask.arrival_s,
            self.admit_s, first, last, len(self.tokens), None if self.admit_s is None else ask.cached,
            self.readmissions, 0, None, None,
        )  # fmt: skip


@dataclass(slots=True)
class ToyRun:
    """What the toy did: the folder, what to tell the report, and every token time by row."""

    folder: Path
    meta: RunMeta
    token_times: dict[int, list[float]]

    @property
    def gaps(self) -> list[float]:
        """Every gap between two tokens of one answer: the pooled ITL, by brute force."""
        return [b - a for times in self.token_times.values() for a, b in itertools.pairwise(times)]


def run_toy(folder: Path, asks: Sequence[Ask], toy: Toy = SERIAL, *, hash_known: bool = False) -> ToyRun:
    """Run the demand round robin over the toy's workers and write the run folder."""
    writer = RunWriter(folder)
    lives = [_Life(row, ask, row % toy.workers) for row, ask in enumerate(asks)]
    for worker_id in range(toy.workers):
        _Worker(worker_id, toy, writer).run([life for life in lives if life.worker_id == worker_id])
    for life in lives:
        writer.decisions.append(
            (life.ask.arrival_s, life.row, f"r{life.row}", life.worker_id, "round-robin", None, None, None, None)
        )
        writer.spill()
    writer.close()
    finish_run(folder, complete=True, cpu_s=0.0, wall_s=0.0)
    return ToyRun(folder, meta_of(toy, hash_known=hash_known), {life.row: life.tokens for life in lives})


class _Worker:
    def __init__(self, worker_id: int, toy: Toy, writer: RunWriter) -> None:
        self.id, self.toy, self.writer = worker_id, toy, writer
        self.now_s = 0.0
        self.waiting: deque[_Life] = deque()
        self.running: list[_Life] = []
        self.preempted = 0

    def run(self, lives: Sequence[_Life]) -> None:
        coming = deque(lives)
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, coming[0].ask.arrival_s)
            while coming and coming[0].ask.arrival_s <= self.now_s:
                self._arrive(coming.popleft())
            self._drop_cancelled()
            if self.waiting and len(self.running) < self.toy.max_seqs and self._fits(self.waiting[0].blocks_after_next):
                self._prefill(self.waiting.popleft())
            elif self.running:
                self._decode(coming[0].ask.arrival_s if coming else None)

    def _arrive(self, life: _Life) -> None:
        needed, has = -(-(life.ask.isl + life.ask.osl) // BLOCK_TOKENS), self.toy.total_blocks
        if needed > has:
            self.writer.requests[life.row] = life.record("rejected", f"needs {needed} blocks, the pool has {has}")
        else:
            self.waiting.append(life)

    def _fits(self, blocks: int) -> bool:
        return self._active() + blocks <= self.toy.total_blocks

    def _active(self) -> int:
        return sum(life.blocks for life in self.running)

    def _drop_cancelled(self) -> None:
        for life in [*self.waiting, *self.running]:
            if life.gone(self.now_s):
                self.writer.requests[life.row] = life.record("cancelled", "the client left")
        self.waiting = deque(life for life in self.waiting if not life.gone(self.now_s))
        self.running = [life for life in self.running if not life.gone(self.now_s)]

    def _prefill(self, life: _Life) -> None:
        start_s = self.now_s
        if life.admit_s is None:
            life.admit_s = start_s
        else:
            life.readmissions += 1
        computed = life.ctx - life.ask.cached
        self.now_s = start_s + self.toy.prefill_s_per_token * computed
        resumed_after = life.tokens[-1] if life.tokens else None
        self.running.append(life)
        life.tokens.append(self.now_s)
        self._row("step", start_s, 1, 0, 1, computed, 0, (0.0, 0.0))
        if resumed_after is not None:
            self._row("gap", start_s, 1, 0, 0, 0, 1, (self.now_s - resumed_after, 0.0))
        self._finish()

    def _decode(self, next_arrival_s: float | None) -> None:
        while not self._room_for_a_step():
            victim = self.running.pop()
            self.waiting.appendleft(victim)
            self.preempted += 1
        start_s, batch = self.now_s, len(self.running)
        ctx = sum(life.ctx for life in self.running)
        late = [life for life in self.running if life.tokens[-1] != start_s]
        steps = self._leap_steps(next_arrival_s, ctx, batch) if self.toy.leap and not late else 1
        first_s, slope_s = self.toy.decode_s + self.toy.decode_s_per_ctx * ctx, self.toy.decode_s_per_ctx * batch
        for step in range(1, steps + 1):
            end_s = start_s + step * first_s + slope_s * step * (step - 1) / 2
            for life in self.running:
                if life in late:
                    self._row("gap", start_s, 1, 0, 0, 0, 1, (end_s - life.tokens[-1], 0.0))
                life.tokens.append(end_s)
        self.now_s = end_s
        kind = "leap" if steps > 1 else "step"
        self._row(kind, start_s, steps, batch, 0, 0, batch - len(late), (first_s, slope_s), ctx)
        self._finish()

    def _room_for_a_step(self) -> bool:
        return sum(life.blocks_after_next for life in self.running) <= self.toy.total_blocks

    def _leap_steps(self, next_arrival_s: float | None, ctx: int, batch: int) -> int:
        """Steps until a request finishes, the next one arrives, a client leaves, or a block might be wanted."""
        steps = min(life.ask.osl - len(life.tokens) for life in self.running)
        if self._active() + batch * (steps // BLOCK_TOKENS + 1) > self.toy.total_blocks:
            return 1
        leaving = [life.ask.cancel_at_s for life in self.running if life.ask.cancel_at_s is not None]
        until_s = min([*leaving, math.inf if next_arrival_s is None else next_arrival_s])
        at_s, step = self.now_s, 0
        while step < steps and (at_s < until_s or step == 0):
            at_s += self.toy.decode_s + self.toy.decode_s_per_ctx * (ctx + step * batch)
            step += 1
        return step

    def _row(
        self,
        kind: str,
        start_s: float,
        steps: int,
        decodes: int,
        prefills: int,
        prefill_tokens: int,
        gap_tokens: int,
        gap: tuple[float, float],
        ctx: int = 0,
    ) -> None:
        preempted = 0 if kind == "gap" else self.preempted
        self.writer.steps.append(
            (
                self.id, kind, start_s, self.now_s, steps, decodes, ctx, prefills, prefill_tokens, len(self.running),
                len(self.waiting), self._active(), 0, preempted, gap_tokens, gap[0], gap[1], 0.0,
            )
        )  # fmt: skip
        self.preempted -= preempted

    def _finish(self) -> None:
        for life in self.running:
            if len(life.tokens) >= life.ask.osl:
                self.writer.requests[life.row] = life.record("completed")
        self.running = [life for life in self.running if len(life.tokens) < life.ask.osl]


def meta_of(toy: Toy, *, hash_known: bool = False, name: str = "toy.csv") -> RunMeta:
    """What a runner would tell about a run of the toy."""
    return RunMeta(
        trace=TraceMeta(name=name, format="csv", synthetic=True, source="tests/builders_reports.py"),
        cluster=(f"{toy.workers} toy workers, {toy.max_seqs} sequences, {toy.total_blocks} blocks of {BLOCK_TOKENS}",),
        router="round-robin",
        latency=(LatencyMeta(group="pool", model="fixed", source="the tests", error_band=None),),
        workers=tuple(
            WorkerMeta(
                worker_id=i, name=f"pool-{i}", group="pool", gpus=1, total_blocks=toy.total_blocks, block_size=16
            )
            for i in range(toy.workers)
        ),
        gpus=toy.workers,
        hash_known=hash_known,
        seed=0,
        not_modelled=("network and tokenising time",),
        config={"router": {"mode": "round-robin"}, "seed": 0},
        origins={"router.mode": "default", "seed": "default"},
    )


def draw_asks(count: int, rate_rps: float, seed: int, *, isl: int = 400, osl: int = 60) -> list[Ask]:
    """Poisson arrivals with exponential lengths around isl and osl, a third of each prompt cached now and then."""
    draw = random.Random(seed)
    at_s, asks = 0.0, []
    for _ in range(count):
        tokens = 1 + int(draw.expovariate(1 / isl))
        cached = tokens // 3 if draw.random() < 0.3 else 0
        asks.append(Ask(round(at_s, 4), tokens, 1 + int(draw.expovariate(1 / osl)), cached))
        at_s += draw.expovariate(rate_rps)
    return asks


def request_row(row: int, status: str = "completed", **given: object) -> RequestRow:
    """A request that arrived at `row` seconds, waited 1, gave its first token after 2 and its fifth after 6."""
    values: dict[str, object] = {
        "row": row, "request_id": f"r{row}", "session_id": None, "arrival_s": float(row), "isl": 100, "osl": 5,
        "status": status, "reason": None, "worker_id": 0, "prefill_worker_id": None, "dispatch_s": row + 0.5,
        "admit_s": row + 1.0, "first_token_s": row + 2.0, "last_token_s": row + 6.0, "output_tokens": 5,
        "cached_tokens": 0, "readmissions": 0, "migrations": 0, "held_s": None, "moved_s": None,
    }  # fmt: skip
    assert given.keys() <= values.keys()
    return tuple((values | given).values())  # type: ignore[return-value]


def step_row(worker_id: int, start_s: float, end_s: float, kind: str = "step", running: int = 1) -> StepRow:
    """A step in which `running` requests decode, each of them with a gap of its length."""
    gap = (end_s - start_s, 0.0, 0.0)
    return (worker_id, kind, start_s, end_s, 1, running, 0, 0, 0, running, 0, 7, 3, 0, running, *gap)
