"""The `linear` latency model: a step costs a constant, and so much for each thing that it computes.

The shape that small engines show when they are measured, on CPUs too. Its coefficients are fitted (`twin record`,
`twin calibrate --from live`) or given; it knows no hardware and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from policies.frozen import frozen
from twin.perf.calibration import Reach
from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk, Provenance


@frozen
class LinearCoefficients:
    """Seconds, none negative: per step, per prompt token and per pair of a token and one before it that it looks at,
    per prompt in the step, per request that decodes and per token of its context."""

    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prefill_s_per_pair: float = 0.0
    prefill_s_per_prompt: float = 0.0
    decode_s_per_request: float = 0.0
    decode_s_per_ctx_token: float = 0.0


@frozen
class LinearSource:
    """What coefficients rest on; without `name` they are simply given."""

    name: str = ""
    engine_version: str | None = None
    error_band: str | None = None
    reach: Reach | None = None


class LinearLatency:
    """step + token P + pair Σ a (c + a/2) + prompt n + request B + ctx C, over n prompts with a new tokens after c
    earlier ones (P new tokens in all) beside B requests that decode with C tokens of context.

    Output tokens that are computed again after a preemption are new tokens; a request that ends such a recomputation
    counts among those that decode.
    """

    __slots__ = ("_c", "provenance")

    def __init__(self, coefficients: LinearCoefficients, source: LinearSource | None = None) -> None:
        self._c = coefficients
        about = source or LinearSource()
        self.provenance = Provenance(
            name="linear",
            source=about.name or "given coefficients",
            engine_version=about.engine_version,
            error_band=about.error_band or (None if about.name else "none: an assumption, not a measurement"),
            reach=about.reach,
        )

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        c = self._c
        first_s = c.step_s + c.decode_s_per_request * batch + c.decode_s_per_ctx_token * ctx_tokens
        return DecodePiece(first_s, c.decode_s_per_ctx_token * batch, 0.0, FOREVER_STEPS)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        work = step_features(chunks, batch + resumed, ctx_tokens + resumed_ctx_tokens)
        coefficients: tuple[float, ...] = astuple(self._c)
        return sum(each * much for each, much in zip(coefficients, work, strict=True))


def step_features(
    chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int
) -> tuple[float, float, float, float, float, float]:
    """What each coefficient of a step is multiplied by, in their order; no entry has a unit."""
    tokens, pairs, prompts = 0, 0.0, 0
    for new_tokens, past_tokens, recomputed_tokens, _ in chunks:
        computed = new_tokens + recomputed_tokens
        if computed:
            tokens += computed
            pairs += computed * (past_tokens + computed / 2)
            prompts += 1
    return 1.0, float(tokens), pairs, float(prompts), float(batch), float(ctx_tokens)
