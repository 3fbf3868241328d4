"""A router of its own making: the worker where the first token is expected soonest, in seconds.

Prompts are computed at so many tokens a second and every open request slows that down a little; what is cached need not
be computed. It stands on mode kv, whose index and books know what is cached and open where, and replaces its formula.
"""

from __future__ import annotations

from policies.cluster.events import RequestArrived
from policies.router.kv import Kv, Seen

PREFILL_TOKENS_PER_S = 20_000.0
"""About what a 70B model computes on four H100."""
SLOWED_BY_EACH = 0.01
"""How much longer a prompt takes for each request that decodes beside it."""


class LeastWait(Kv):
    """Cost: seconds until the first token."""

    def _costs(self, event: RequestArrived, seen: Seen) -> list[float]:
        block_size = self.settings.block_size
        return [
            (queued + event.isl - cached * block_size) / PREFILL_TOKENS_PER_S * (1 + SLOWED_BY_EACH * requests)
            for queued, requests, cached in zip(seen.prefill_tokens, seen.requests, seen.device_blocks, strict=True)
        ]
