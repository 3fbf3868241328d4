"""What the engine did while a row was measured, as a table of step shapes that no step time has a part in.

In a closed loop without think time every arrival is triggered by a step's end, and every wait is counted in steps: the
schedule does not depend on how long steps take. So each row is simulated once, with steps of length 1, by the twin's
own engine; its mean TTFT and TPOT are then sums of step times with known weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from policies.cluster.blocks import NO_BLOCKS, Branch
from policies.cluster.ids import RequestId
from policies.errors import EngineError
from policies.frozen import frozen
from twin.calibrate.measured import Measurement
from twin.calibrate.protocol import BALANCE_STEPS, ClosedLoop, closed_loop
from twin.calibrate.served import engine_settings
from twin.calibrate.shapes import ShapeLog, Shapes, window_of
from twin.calibrate.unit_time import UnitLatency
from twin.engine.build import build_engine
from twin.engine.protocol import Engine
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings


@frozen
class Inbox:
    """Engines that look for new requests every `poll_steps` steps, or wait up to `wait_steps` for `wait_tokens`; or, if
    there are `ranks`, for a prompt on each of them, up to `wait_steps` after the last ones."""

    poll_steps: int = 1
    wait_steps: int = 0
    wait_tokens: float = 0.0
    ranks: int = 1

    def is_full(self, held: Rows[Sequence], decoding: int) -> bool:
        """Whether the wait is over, or there is no decode that it would keep from being disturbed."""
        if decoding < self.ranks:
            return True
        if self.ranks > 1:
            return len(held) >= self.ranks
        return sum(seq.prompt for seq in held) >= self.wait_tokens


def inbox_of(row: Measurement, step_tokens: int) -> Inbox:
    """How the engine of a row, with so many tokens a step, takes in prompts."""
    ranks = row.placed.layout.dp
    if row.engine == "trtllm" and ranks > 1:
        return Inbox(wait_steps=BALANCE_STEPS, ranks=ranks)
    return Inbox(poll_steps=row.poll_steps, wait_steps=row.wait_steps, wait_tokens=row.wait_share * step_tokens)


def schedule(row: Measurement, seed: int = 0) -> Shapes:
    """The step shapes of one row. Raises `EngineError` if the engine refuses or never ends."""
    settings, loop = engine_settings(row), closed_loop(row, seed)
    inbox = inbox_of(row, settings.max_num_batched_tokens)
    log = ShapeLog(dp=row.placed.layout.dp, window_tokens=window_of(row.placed.model))
    Loop(settings, loop, inbox, log).run()
    return log.shapes(loop)


class Loop:
    """One closed loop in step time. TTFT counts who waits in a step, TPOT who decodes, each by its number of gaps."""

    def __init__(self, settings: EngineSettings, loop: ClosedLoop, inbox: Inbox, log: ShapeLog) -> None:
        self._unit = UnitLatency()
        self._engine: Engine = build_engine(settings, self._unit)
        self._loop, self._inbox, self._log = loop, inbox, log
        self._sent = self._answered = 0
        self._held: list[Sequence] = []
        self._waited_steps = 0
        self._since_poll = inbox.poll_steps

    def run(self) -> None:
        for _ in range(self._loop.users):
            self._send()
        now_s = 0.0
        while self._answered < len(self._loop.prompts):
            self._let_in()
            now_s = self._step(now_s)

    def _send(self) -> None:
        at = self._sent
        if at == len(self._loop.prompts):
            return
        self._sent += 1
        if not self._held and self._inbox.ranks == 1:
            self._waited_steps = 0
        prompt, outputs = self._loop.prompts[at], self._loop.outputs[at]
        self._held.append(Sequence(RequestId(str(at)), prompt, outputs, NO_BLOCKS, Branch(at), row=at))
        self._log.waiting += 1

    def _let_in(self) -> None:
        """Hand over what the engine sees now."""
        inbox = self._inbox
        seen = self._since_poll >= inbox.poll_steps
        if seen:
            self._since_poll = 0
        if not self._held:
            return
        if inbox.wait_steps:
            full = inbox.is_full(self._held, self._engine.batch.size)
            seen = full or self._waited_steps >= inbox.wait_steps
        if seen or self._engine.idle:
            for seq in self._held:
                refusal = self._engine.submit(seq)
                if refusal:
                    raise EngineError(refusal)
            self._held.clear()
            self._waited_steps = 0

    def _step(self, now_s: float) -> float:
        engine, inbox, log = self._engine, self._inbox, self._log
        self._unit.asked = None
        step = engine.plan(now_s)
        if step is None:
            raise EngineError(f"nothing to do with {len(self._held)} requests held back")
        if self._held and step.steps > 1:
            left = inbox.wait_steps - self._waited_steps if inbox.wait_steps else inbox.poll_steps - self._since_poll
            if left < step.steps:
                engine.truncate(step, now_s + left - 0.5)
        if step.mixed or step.literal:
            log.add_step(self._unit.asked, step.decodes)
        else:
            log.add_decodes(engine.batch.size, engine.batch.ctx_tokens, step.steps)
        self._polled(step.steps, looks_at_once=step.mixed and not step.decodes)
        self._waited_steps += step.steps
        outcome = engine.commit(step)
        for seq in outcome.firsts:
            log.first(seq.outputs_limit)
        for seq in outcome.ended:
            self._answered += 1
            log.ended(seq.outputs_limit)
            self._send()
        return step.end_s

    def _polled(self, steps: int, *, looks_at_once: bool) -> None:
        """Count steps since the inbox was last looked at; looks that found nothing, within a leap, count too."""
        every = self._inbox.poll_steps
        since = self._since_poll + steps
        self._since_poll = every if looks_at_once or since % every == 0 else since % every


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Shapes of a row, or why there are none."""

    shapes: Shapes | None
    reason: str = ""


def schedule_rows(rows: Rows[Measurement], *, jobs: int = 1, seed: int = 0) -> list[Scheduled]:
    """The shapes of each row, in their order; `jobs` processes share the work."""
    from twin.sweep_pool import run_jobs

    if jobs == 1:
        return [_scheduled((row, seed)) for row in rows]
    found: dict[int, Scheduled] = {}
    # Long rows first, so that no process is left alone with one in the end.
    order = sorted(range(len(rows)), key=lambda at: -rows[at].users * rows[at].osl)
    work = [(rows[at], seed) for at in order]
    for place, done in run_jobs(_scheduled, work, jobs, _died):
        found[order[place]] = done
    return [found[at] for at in range(len(rows))]


def _scheduled(job: tuple[Measurement, int]) -> Scheduled:
    row, seed = job
    try:
        return Scheduled(schedule(row, seed))
    except EngineError as error:
        return Scheduled(None, str(error))


def _died(job: tuple[Measurement, int], how: str) -> Scheduled:
    return Scheduled(None, how)
