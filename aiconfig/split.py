"""Prompts on workers of their own: means by load of a whole deployment (specification §6, R6).

The rate is what the slowest of prefill workers, links and decode workers serve. Decode steps are decodes alone; prompts
wait for prefill workers and then for their link, both taken to come at random.
"""

from __future__ import annotations

from aiconfig.curve import Curve, Point, wait_s
from aiconfig.mixed import Demand
from aiconfig.steps import Steps
from policies.frozen import frozen

NODES = 32
"""Points of a curve, closer together at light load."""
SLACK = 0.995
"""Share of the rate of prefill workers or links at which the curve ends; beyond it waits grow without limit."""


@frozen
class PromptRank:
    """One rank that computes prompts: as many as wait, up to `room` of them in a step, or one in chunks."""

    steps: Steps
    budget: int
    ranks: int  # of the deployment

    @property
    def room(self) -> int:
        """Whole prompts in a step, at least 1."""
        return max(1, self.budget // self.steps.new_tokens)

    def step_s(self, prompts: float) -> float:
        """One step (or, of a long prompt, all its steps)."""
        if self.steps.new_tokens > self.budget:
            return self.steps.alone_s(self.budget)
        return self.steps.prompts_s(prompts, 0)

    def most_rps(self) -> float:
        """What all ranks compute at most."""
        return self.ranks * self.room / self.step_s(self.room)

    def ttft_s(self, rps: float) -> float:
        """From a prompt's arrival to its end, at `rps` over all ranks."""
        rate = rps / self.ranks
        alone_s, full_s = self.step_s(1), self.step_s(self.room)
        more_s = (full_s - alone_s) / (self.room - 1) if self.room > 1 else 0.0
        fixed_s = alone_s - more_s
        together = min(float(self.room), max(1.0, rate * fixed_s / max(1e-9, 1.0 - rate * more_s)))
        own_s = fixed_s + more_s * together
        running_s = 0.5 * own_s * min(1.0, rate * alone_s) * (self.room - 1) / self.room
        return own_s + running_s + wait_s(full_s, rate * full_s / self.room, self.room)


class SplitCurve(Curve):
    """A deployment with `decode_ranks` ranks that decode, behind `prompts`.

    `transfer_s` is a prompt's KV on its way, over one of `prompts.ranks` links. With `first_at_decode` the client's
    first token is the decode worker's, which then makes all of them.
    """

    nodes = NODES

    def __init__(
        self,
        prompts: PromptRank,
        decode: Steps,
        demand: Demand,
        *,
        decode_ranks: int,
        slots: int,
        slots_limit: str,
        transfer_s: float,
        first_at_decode: bool,
    ) -> None:
        super().__init__()
        self._prompts, self._decode, self._demand = prompts, decode, demand
        self._ranks, self._transfer_s, self._at_decode = decode_ranks, transfer_s, first_at_decode
        per_token = demand.decode_steps / max(1.0, demand.gaps)
        self._decode_steps = demand.decode_steps + (per_token if first_at_decode else 0.0)
        limits = {
            "prefill": prompts.most_rps() * SLACK,
            "transfer": prompts.ranks / transfer_s * SLACK if transfer_s else float("inf"),
            slots_limit: self._rate(float(slots)),
        }
        self.limit = min(limits, key=lambda name: limits[name])
        self._most_batch = self._batch(limits[self.limit], float(slots))

    def idle(self) -> Point:
        step_s = self._decode.decode_s(1)
        ttft_s = self._prompts.step_s(1) + self._transfer_s + (step_s if self._at_decode else 0.0)
        tpot_s = self._tpot_s(step_s)
        rps = 1.0 / (ttft_s + tpot_s * self._demand.gaps)
        return Point(users=1.0, rps=rps, ttft_s=ttft_s, tpot_s=tpot_s, gaps=self._demand.gaps)

    def _point(self, node: int) -> Point:
        batch = self._most_batch * (node / NODES) ** 2
        step_s = self._decode.decode_between_s(batch)
        rps = self._rate(batch)
        moving_s = self._transfer_s + wait_s(self._transfer_s, rps * self._transfer_s / self._prompts.ranks, 1.0)
        ttft_s = self._prompts.ttft_s(rps) + moving_s
        if self._at_decode:
            ttft_s += step_s * (1.0 + 0.5 * min(1.0, batch))  # its first step, behind the rest of the one that runs
        tpot_s = self._tpot_s(step_s)
        users = rps * (ttft_s + tpot_s * self._demand.gaps)
        return Point(users=users, rps=rps, ttft_s=ttft_s, tpot_s=tpot_s, gaps=self._demand.gaps)

    def _tpot_s(self, step_s: float) -> float:
        return step_s * self._demand.decode_steps / max(1.0, self._demand.gaps)

    def _rate(self, batch: float) -> float:
        """Requests a second with so many decoding on each rank."""
        return self._ranks * batch / (self._decode_steps * self._decode.decode_between_s(batch))

    def _batch(self, rps: float, most: float) -> float:
        """The batch at which that rate is decoded, by bisection."""
        if self._rate(most) <= rps:
            return most
        low, high = 0.0, most
        for _ in range(30):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self._rate(middle) < rps else (low, middle)
        return high
