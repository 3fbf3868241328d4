"""What every simulated engine can do, whatever its scheduler.

The caller owns the clock: it submits, plans, waits, commits, and cuts leaps short when something happens. An engine
never knows other engines; a hand-off between two of them is carried out by `twin.mocker.handoff` with the moves below.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from policies.cluster.blocks import BlockRun
from twin.engine.batch import DecodeBatch
from twin.engine.plan import Look, Outcome, StepPlan
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.perf.protocol import LatencyModel


class Pool(Protocol):
    """The KV blocks of an engine, for those who count them or listen to KV events.

    `stored` and `removed` collect what became findable and what was lost until somebody empties them.
    """

    stored: list[BlockRun]
    removed: list[BlockRun]

    @property
    def active(self) -> int:
        """Blocks owned by somebody now."""
        ...

    def findable(self) -> list[BlockRun]:
        """What can be found and others can share, parents before children, each block once. Touches nothing."""
        ...

    def audit(self) -> None:
        """Recount everything; raises InvariantError where a count is off."""
        ...


class Engine(Protocol):
    """One engine replica, or a group of ranks in step. A new `latency` takes effect with `reprice`."""

    latency: LatencyModel

    @property
    def settings(self) -> EngineSettings:
        """Its sizes and switches; those of one rank where there are several."""
        ...

    @property
    def pool(self) -> Pool:
        """Its KV blocks."""
        ...

    @property
    def waiting(self) -> Sized:
        """Who waits to be admitted."""
        ...

    @property
    def batch(self) -> DecodeBatch:
        """The standing decode batch; empty when the engine has ended everything."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits. Held and reserved blocks may be there all the same."""
        ...

    @property
    def loaded_blocks(self) -> int:
        """Blocks that came up from a lower tier so far."""
        ...

    @property
    def head_is_blocked(self) -> bool:
        """Whether whoever waits cannot enter before the batch changes, so that a newcomer behind changes nothing."""
        ...

    # ------------------------------------------------------------ requests

    def submit(self, seq: Sequence) -> str | None:
        """Queue a request; returns the reason when it can never run here (it is then not queued)."""
        ...

    def cancel(self, seq: Sequence) -> None:
        """Forget a request in whatever state it is (waiting, running, held, reserved) and free its blocks.

        Between steps only: the caller cuts a leap short and cancels when the step has been committed.
        """
        ...

    def made(self, seq: Sequence) -> tuple[int, float | None]:
        """Tokens that a request has made, as far as steps are accounted for, and when it made the last of them."""
        ...

    def withhold(self, since_s: float) -> None:
        """Tokens made at `since_s` or later reach nobody until `deliver`: the record has no gaps between them."""
        ...

    def deliver(self, at_s: float) -> None:
        """The tokens that were withheld arrive now; the next gap of their requests begins here."""
        ...

    def reprice(self, step: StepPlan | None, end_s: float | None = None) -> None:
        """Step times have changed: the next step is priced anew.

        A running `step`, which the caller has cut to one, ends when it was to, or at `end_s`.
        """
        ...

    # ------------------------------------------------------------ steps

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step or leap and take what it needs; None when there is nothing to do."""
        ...

    def truncate(self, step: StepPlan, at_s: float) -> bool:
        """Shorten a planned leap to the step in which `at_s` falls; returns whether its end has moved."""
        ...

    def settle(self, step: StepPlan, at_s: float) -> None:
        """Account for the steps of a planned leap that have ended by `at_s`; its end does not move."""
        ...

    def commit(self, step: StepPlan) -> Outcome:
        """The planned step is over: hand out its tokens, let the finished go."""
        ...

    def load(self, step: StepPlan | None, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached blocks at `at_s`, within the planned `step`. Touches nothing."""
        ...

    def look(self, step: StepPlan | None, at_s: float) -> Look:
        """What the planned `step` runs behind `at_s`, and who waits. Touches nothing."""
        ...

    # ------------------------------------------------------------ hand-off

    def release(self, seq: Sequence) -> None:
        """Source side: the KV of a held sequence has been fetched (or given up): its blocks are free again."""
        ...

    def reserve(self, seq: Sequence) -> bool:
        """Destination side: take room for the whole prompt now, preempting nobody; False if it does not fit."""
        ...

    def activate(self, seq: Sequence) -> bool:
        """Destination side: the KV has arrived; the request enters waiting in the order in which it asked for room.

        Returns whether that gave blocks back.
        """
        ...

    def hold_back(self, hold: bool) -> None:
        """Whether preempted requests must stay out while others wait for room (a rule of the reference)."""
        ...

    def audit(self) -> None:
        """Recount blocks; raises InvariantError where a count is off."""
        ...
