"""The `polynomial` latency model: step times as Dynamo 1.6.1's mocker computes them by default, for parity with it.

It follows that rule to the letter, also where it is unphysical (earlier context costs nothing in prefill, means are
floored): never mend it here, `roofline` is the model to use for anything but comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.frozen import frozen
from twin.perf.pieces import steps_on_this_side
from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk, Provenance


@frozen
class PolynomialCoefficients:
    """Seconds. Defaults: the peer's published coefficients (there in ms)."""

    prefill_quadratic_s: float = 4.209989e-10  # per squared prompt token
    prefill_linear_s: float = 1.518344e-5  # per prompt token
    prefill_constant_s: float = 1.650142e-2
    decode_quadratic_s: float = -2.574e-2  # in u, the used share of the pool
    decode_linear_s: float = 5.401e-2
    decode_constant_s: float = 5.74e-3
    decode_floor_s: float = 1e-3


DEFAULT_COEFFICIENTS = PolynomialCoefficients()


class PolynomialLatency:
    """prefill(n) + decode(u); n prompt tokens of the step, u = min(1, context tokens of the decode part / pool_tokens).

    n = b*(floor(sum_isl/b) - floor(sum_prefix/b)) over the b requests that compute prompt tokens, prefix = context
    before the step, isl = prefix + prompt tokens now. Recomputed output tokens are free; a request that finishes a
    recomputation is in the decode part with its whole length.
    """

    __slots__ = ("_c", "_floor_binds", "_pool_tokens", "provenance")

    def __init__(self, pool_tokens: int, coefficients: PolynomialCoefficients = DEFAULT_COEFFICIENTS) -> None:
        self._c = coefficients
        self._pool_tokens = pool_tokens
        self._floor_binds = _lowest_s(coefficients) <= coefficients.decode_floor_s
        usual = coefficients == DEFAULT_COEFFICIENTS
        self.provenance = Provenance(
            name="polynomial",
            source=f"{'default' if usual else 'given'} coefficients, pool {pool_tokens:,} tokens",
            engine_version="Dynamo 1.6.1 mocker",
            error_band="none: a stand-in for that mocker, not for any hardware",
            notes=(
                "prefill ignores the context before it",
                "output tokens that are computed again cost nothing in prefill",
                "step times do not depend on GPU, model or parallelism",
            ),
        )

    def _decode_s(self, ctx_tokens: int) -> float:
        c = self._c
        u = ctx_tokens / self._pool_tokens
        if u > 1.0:
            u = 1.0
        step_s = (c.decode_quadratic_s * u + c.decode_linear_s) * u + c.decode_constant_s
        return step_s if step_s > c.decode_floor_s else c.decode_floor_s

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        """Quadratic while the pool fills, constant behind it; cut where the floor begins or ends to bind."""
        g0 = self._decode_s(ctx_tokens)
        left_tokens = self._pool_tokens - ctx_tokens
        if left_tokens <= 0:
            return DecodePiece(g0, 0.0, 0.0, FOREVER_STEPS)
        c = self._c
        until_full = -(-left_tokens // batch)
        u, du = ctx_tokens / self._pool_tokens, batch / self._pool_tokens
        g1 = (2.0 * c.decode_quadratic_s * u + c.decode_linear_s) * du
        g2 = c.decode_quadratic_s * du * du
        if not self._floor_binds:
            return DecodePiece(g0, g1, g2, until_full)
        above_s = (c.decode_quadratic_s * u + c.decode_linear_s) * u + c.decode_constant_s - c.decode_floor_s
        if above_s == 0.0:
            return DecodePiece(g0, 0.0, 0.0, 1)
        steps = min(until_full, steps_on_this_side(above_s, g1, g2))
        return DecodePiece(g0, g1, g2, steps) if above_s > 0.0 else DecodePiece(g0, 0.0, 0.0, steps)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        requests = isl_tokens = prefix_tokens = 0
        for new_tokens, past_tokens, _, _ in chunks:
            if new_tokens:
                requests += 1
                isl_tokens += past_tokens + new_tokens
                prefix_tokens += past_tokens
        step_s = 0.0
        if requests:
            n = requests * (isl_tokens // requests - prefix_tokens // requests)
            if n > 0:
                c = self._c
                step_s = (c.prefill_quadratic_s * n + c.prefill_linear_s) * n + c.prefill_constant_s
        if batch + resumed:
            step_s += self._decode_s(ctx_tokens + resumed_ctx_tokens)
        return step_s


def _lowest_s(c: PolynomialCoefficients) -> float:
    """The lowest value of the decode parabola for u in [0, 1], before the floor."""
    a, b = c.decode_quadratic_s, c.decode_linear_s
    lows = [0.0, 1.0]
    if a > 0.0 and 0.0 < -b / (2.0 * a) < 1.0:
        lows.append(-b / (2.0 * a))
    return min((a * u + b) * u + c.decode_constant_s for u in lows)
