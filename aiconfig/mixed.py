"""One rank that computes prompts and decodes: means by load, from what its steps last (specification §6, R4).

With B requests decoding, each of which takes D decode steps, B/D requests end per step, so that the rate follows from
the mean step and nothing is iterated: it is the fixed point, written by its batch. Steps with prompts and steps without
are priced apart, since the fixed costs of a prompt step are large.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from aiconfig.curve import Curve, Point, wait_s
from aiconfig.engines import Engine
from aiconfig.steps import Steps
from policies.frozen import frozen


@frozen
class Demand:
    """What every request asks of a rank: output tokens, decode steps for them, and how requests come.

    `bunched`: users in a closed loop whose requests are all alike stay in step with each other, so that those whose
    prompts shared a step end together and share the next one too. `late` is the share of requests that come in the
    middle of a step: with one worker in a closed loop none do, since a user asks again when a step ends.
    """

    osl: float
    decode_steps: float
    bunched: bool
    late: float

    @property
    def gaps(self) -> float:
        """Output tokens behind the first one."""
        return self.osl - 1.0


class MixedCurve(Curve):
    """One rank; point k has k requests decoding (bunched: k users). `budget` is the step's, in tokens; `rank_users`
    is how many requests the KV holds, `sequences` how many the engine runs."""

    def __init__(
        self, steps: Steps, engine: Engine, demand: Demand, *, budget: int, rank_users: int, sequences: int
    ) -> None:
        super().__init__()
        self._steps, self._engine, self._demand, self._budget = steps, engine, demand, budget
        self._ranks = steps.placed.layout.dp
        slots = min(rank_users, sequences)
        fed = bisect_left(range(1, slots + 1), True, key=lambda batch: not self._is_fed(batch))
        self.nodes = max(1, fed)
        self.limit = "prefill" if fed < slots else "kv" if rank_users <= sequences else "sequences"

    def idle(self) -> Point:
        ttft_s = self._steps.alone_s(self._budget)
        tpot_s = self._steps.decode_s(1) * self._demand.decode_steps / max(1.0, self._demand.gaps)
        return self._of(1.0, 1.0 / (ttft_s + tpot_s * self._demand.gaps), ttft_s, tpot_s)

    def _point(self, node: int) -> Point:
        return self._bunched(node) if self._demand.bunched else self._scattered(node)

    # ------------------------------------------------------------ prompts in a step

    def _room(self, batch: int) -> float:
        """Prompts that fit into a step beside `batch` decodes, whose tokens count only where both share steps."""
        beside = self._prompts_in(self._budget - (batch if self._engine.mixes else 0))
        return self._prompts_in(self._budget) if batch == 1 and not beside else beside  # one alone has the whole step

    def _prompts_in(self, tokens: int) -> float:
        prompts = max(0.0, tokens / self._steps.new_tokens)
        return prompts if self._engine.chunks else float(int(prompts))

    def _is_fed(self, batch: int) -> bool:
        """Whether steps can take in as many prompts as end with so many requests decoding."""
        room = self._room(batch)
        if not self._engine.mixes:
            return room > 0.0  # decodes wait for prompts, however many there are
        return room > 0.0 and batch / self._demand.decode_steps <= room

    def _prompt_step_s(self, prompts: float, room: float, batch: int) -> float:
        """A step with so many prompts, or with the part of one that fits."""
        beside = batch if self._engine.mixes else 0
        if room < 1.0:
            return self._steps.chunk_s(max(1, int(room * self._steps.new_tokens)), beside)
        return self._steps.prompts_s(max(1.0, min(prompts, room)), beside)

    # ------------------------------------------------------------ both ways to come

    def _bunched(self, users: int) -> Point:
        """Groups that go round together: each computes its prompts in one step, then decodes among all. Where prompts
        go first, all groups are one: nobody decodes before the last prompt is done."""
        demand = self._demand
        room = self._room(users)
        prompts = min(float(users), room) if room >= 1.0 else room
        share = 1.0 / prompts  # prompt steps per request
        prompt_s = self._prompt_step_s(prompts, room, users - max(1, int(prompts)))
        own = max(1.0, share)
        if not self._engine.mixes:
            own = max(own, (users * share + 1.0) / 2.0)
        others = users * share - own
        free = demand.decode_steps - (others if self._engine.mixes else 0.0)
        decode_s = others * prompt_s + max(0.0, free) * self._steps.decode_s(users)
        ttft_s = own * prompt_s
        return self._of(float(users), users / (ttft_s + decode_s), ttft_s, decode_s / max(1.0, demand.gaps))

    def _scattered(self, batch: int) -> Point:
        """Requests that end and come at random: a prompt step has as many as came since the last step. Ranks of a
        worker step together, so that a prompt on any of them makes it a prompt step for all."""
        demand = self._demand
        room = self._room(batch)
        ends = batch / demand.decode_steps  # requests per decode step of the rank
        prompts = min(room, ends / -math.expm1(-ends))
        share = max(1.0 / prompts, -math.expm1(-ends * self._ranks) / ends)
        prompt_s = self._prompt_step_s(prompts, room, batch)
        decode_s = self._steps.decode_s(batch)
        plain = max(0.0, 1.0 / ends - (share if self._engine.mixes else 0.0))
        cycle_s = plain * decode_s + share * prompt_s  # per request that ends
        own_s = max(1.0, 1.0 / room) * self._prompt_step_s(1.0 + ends, room, batch)
        ttft_s = own_s + self._late_s(plain, decode_s, share, prompt_s) + self._queue_s(prompt_s, cycle_s, room)
        rps = 1.0 / cycle_s
        return self._of(batch + rps * ttft_s, rps, ttft_s, batch * cycle_s / max(1.0, demand.gaps))

    def _late_s(self, plain: float, decode_s: float, share: float, prompt_s: float) -> float:
        """What is left of the step in which a request comes."""
        square = plain * decode_s**2 + share * prompt_s**2
        return self._demand.late * square / (2.0 * (plain * decode_s + share * prompt_s))

    def _queue_s(self, prompt_s: float, cycle_s: float, room: float) -> float:
        """Waiting for prompts before one's own, at the share of time that prompt steps must take."""
        fewest = 1.0 / room
        return wait_s(max(1.0, fewest) * prompt_s, fewest * prompt_s / cycle_s, room)

    def _of(self, users: float, rps: float, ttft_s: float, tpot_s: float) -> Point:
        return Point(users=users, rps=rps, ttft_s=ttft_s, tpot_s=tpot_s, gaps=self._demand.gaps)
