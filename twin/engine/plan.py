"""What an engine has decided to do next, and what came of it."""

from __future__ import annotations

from typing import NamedTuple

from twin.engine.sequence import Sequence


class Look(NamedTuple):
    """The step that is under way at an instant, and who waits behind it. Without a step `wall_s` is 0.

    `prefills` prompts compute `prefill_tokens` beside `decodes` sequences that hold `ctx_tokens`. Of those who wait,
    `queued` have prompts of `queued_tokens` to compute, and `paused`, which hold `paused_tokens`, have begun to answer.
    """

    wall_s: float
    prefills: int
    prefill_tokens: int
    decodes: int
    ctx_tokens: int
    queued: int
    queued_tokens: int
    paused: int
    paused_tokens: int


class StepPlan:
    """One step, or a leap of `steps` decode steps, from `start_s` to `end_s`.

    A `mixed` step computes prompts, perhaps beside decodes; without it (and if not `literal`) the plan is decode steps
    alone. `entering` emit their first token (or first after a preemption) at the end. `literal` steps were scheduled
    request by request, and their `entering` is everybody who emits; `failed` can never go on. An `exclusive` step is
    prompt work alone: the decode batch stands still. `evict_s` is when a leap first evicts cached blocks, where
    somebody wants to know; a leap is `settled` when its first steps have been accounted for and `start_s` is behind
    them.
    """

    steps = 1  # what a plan does not set is that of the class: one is made for every step
    chunks = 0
    prefill_tokens = 0
    decodes = 0
    mixed = False
    literal = False
    exclusive = False
    preempted = 0
    evict_s: float | None = None
    settled = False
    waiting = 0  # who is left waiting when the step begins

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.end_s = start_s
        self.entering: list[Sequence] = []
        self.failed: list[Sequence] = []

    @property
    def ends_nothing(self) -> bool:
        """Whether it is a leap that was cut at the instant at which one of its steps ended, and that step has been
        accounted for: what happened at this instant since then belongs to the next plan, as it would without leaps."""
        return self.settled and not self.steps


class Outcome:
    """What a commit brought about, in order: first tokens, prompts now held for a hand-off, ends (completed, or failed
    with a reason). `freed`: blocks or slots came back, so what was refused may be tried again.
    """

    __slots__ = ("ended", "firsts", "freed", "held")

    def __init__(self) -> None:
        self.firsts: list[Sequence] = []
        self.held: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.freed = False
