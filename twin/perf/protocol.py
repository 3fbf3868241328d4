"""What a step-latency model is: pure functions from the shape of an engine step to seconds.

A model never reads a clock, never draws a random number, never knows queues, and never rounds away work. What a
latency figure rests on travels with it as `Provenance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from policies.frozen import frozen
from twin.perf.calibration import Band, Reach

FOREVER_STEPS = 2**62
"""`DecodePiece.steps` of a piece that has no end."""


class DecodePiece(NamedTuple):
    """Step times of one batch that only decodes: step j from here lasts g0 + g1*j + g2*j*j seconds, 0 <= j < steps."""

    g0: float
    g1: float
    g2: float
    steps: int

    def sum_s(self, steps: int) -> float:
        """Seconds that the first `steps` of these steps take together (closed form, integers kept exact)."""
        n = steps
        return self.g0 * n + self.g1 * (n * (n - 1) // 2) + self.g2 * ((n - 1) * n * (2 * n - 1) // 6)


class PrefillChunk(NamedTuple):
    """The part of one request that a step computes before the request decodes (again)."""

    new_tokens: int  # prompt tokens computed in this step
    past_tokens: int  # its context before this step: cached prefix and earlier chunks
    recomputed_tokens: int  # output tokens emitted before a preemption and computed again now
    ends_prompt: bool


@frozen
class Provenance:
    """Where the seconds come from. Goes into every report."""

    name: str
    source: str
    engine_version: str | None = None
    error_band: str | None = None
    extrapolates: bool = False  # answers beyond its measured points instead of refusing
    notes: tuple[str, ...] = ()
    reach: Reach | None = None  # what was measured; None: not told
    band: Band | None = None  # what `error_band` says, as figures
    nearness: str | None = None  # of which runs the band is
    beyond: tuple[str, ...] = ()  # what of the worker was never measured
    client_s: float = 0.0  # beside every first token that was measured, and no part of a step
    client_s_per_token: float = 0.0  # the same, per prompt token

    def line(self) -> str:
        """One line for people: model, source, engine version, what it does beyond its points, error band."""
        parts = [self.name, self.source]
        if self.engine_version:
            parts.append(f"engine {self.engine_version}")
        if self.extrapolates:
            parts.append("extrapolates beyond its points")
        parts.append(f"error band {self.error_band or 'unknown'}")
        return " · ".join(parts)


class LatencyModel(Protocol):
    """Seconds of engine steps. Requests are given as sums: no model may loop over the batch."""

    @property
    def provenance(self) -> Provenance: ...

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        """Pure decode steps from here on.

        `batch` >= 1 requests whose lengths sum to `ctx_tokens` before the first of them; every step adds `batch`
        tokens. The piece holds for its `steps`; ask again behind it.
        """
        ...

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        """Seconds of one step: `chunks` beside `batch` requests that decode, of total length `ctx_tokens`.

        `resumed` requests of total length `resumed_ctx_tokens` finish a recomputation in this step and emit; they are
        among `chunks` too as far as they compute anything.
        """
        ...
