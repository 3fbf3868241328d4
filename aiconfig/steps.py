"""What steps of one rank of a worker last, by the twin's own latency model and the layers that the twin puts around it.

Requests are of one length each: their mean. Nothing here knows a queue; `mixed` and `split` do.
"""

from __future__ import annotations

from functools import cached_property

from aiconfig.candidate import Pool
from aiconfig.memory import placement
from aiconfig.physics import SHIPPED, Physics
from twin.perf.build import build_latency
from twin.perf.energy import Power, power
from twin.perf.layers import rank_latency
from twin.perf.protocol import PrefillChunk, Provenance
from twin.perf.roofline import RooflineLatency


class Steps:
    """Steps of one rank of a worker of `pool`, which computes prompts of `new_tokens` behind `past_tokens` that are
    cached, and decodes requests of `ctx_tokens` on average."""

    def __init__(
        self,
        engine: str,
        model: str,
        pool: Pool,
        nextn: int,
        *,
        new_tokens: int,
        past_tokens: int,
        ctx_tokens: float,
        physics: Physics = SHIPPED,
    ) -> None:
        layout = pool.layout
        base = build_latency(
            physics.latency,
            engine=engine,
            model=model,
            gpu=pool.gpu,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
            weights=pool.weights,
            kv=pool.kv,
            pool_tokens=1,  # of no concern to the roofline
        )
        assert isinstance(base, RooflineLatency)
        self.base = base
        self.placed = placement(model, pool, physics.hardware)
        self.new_tokens = new_tokens
        self.past_tokens = past_tokens
        self.ctx_tokens = ctx_tokens
        self._latency = rank_latency(base, pp=layout.pp, dp=layout.dp, nextn=nextn)
        self._decode: dict[int, float] = {}

    @cached_property
    def power(self) -> Power:
        """What steps ask of each GPU of the worker, for an estimate of energy."""
        return power(self.placed)

    @property
    def provenance(self) -> Provenance:
        """Where the seconds come from."""
        return self._latency.provenance

    def decode_s(self, batch: int) -> float:
        """A step of `batch` decodes."""
        known = self._decode.get(batch)
        if known is None:
            ctx_tokens = round(batch * self.ctx_tokens)
            known = self._decode[batch] = self._latency.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        return known

    def decode_between_s(self, batch: float) -> float:
        """The same for a mean of batches; below one request, a step has one."""
        low = max(1, int(batch))
        low_s = self.decode_s(low)
        rest = batch - low
        return low_s if rest <= 0.0 else low_s + rest * (self.decode_s(low + 1) - low_s)

    def prompts_s(self, prompts: float, batch: int) -> float:
        """A step of whole prompts (a mean of them, at least 1) beside `batch` decodes."""
        low = max(1, int(prompts))
        low_s = self._prompts_s(low, batch)
        rest = prompts - low
        return low_s if rest <= 0.0 else low_s + rest * (self._prompts_s(low + 1, batch) - low_s)

    def chunk_s(self, tokens: int, batch: int) -> float:
        """A step of a part of a prompt, as long as a part in the middle of it, beside `batch` decodes."""
        past = self.past_tokens + max(0, self.new_tokens - tokens) // 2
        chunk = PrefillChunk(tokens, past, 0, True)
        return self._latency.step_s((chunk,), batch, round(batch * self.ctx_tokens), 0, 0)

    def alone_s(self, budget: int) -> float:
        """A prompt on an idle rank, in chunks of `budget` tokens."""
        seconds, done = 0.0, 0
        while done < self.new_tokens:
            tokens = min(budget, self.new_tokens - done)
            ends = done + tokens == self.new_tokens
            chunk = PrefillChunk(tokens, self.past_tokens + done, 0, ends)
            seconds += self._latency.step_s((chunk,), 0, 0, 0, 0)
            done += tokens
        return seconds

    def _prompts_s(self, prompts: int, batch: int) -> float:
        chunk = PrefillChunk(self.new_tokens, self.past_tokens, 0, True)
        return self._latency.step_s((chunk,) * prompts, batch, round(batch * self.ctx_tokens), 0, 0)
