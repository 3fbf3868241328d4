"""The `fixed` latency model: constant costs that a person can add up, for hand-checked cases and for theory.

It never looks at context, hardware or model, and has no floor: a step may cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk, Provenance


class FixedLatency:
    """`prefill_s` for a step that computes at least one prompt token, plus `prefill_s_per_token` for every token that
    it computes outside decoding, plus `decode_s` if any request decodes.

    Output tokens that are computed again after a preemption cost `prefill_s_per_token` like prompt tokens, since they
    are work too; alone they do not cost `prefill_s`. A request that finishes a recomputation counts as decoding.
    """

    __slots__ = ("_decode_s", "_piece", "_prefill_s", "_prefill_s_per_token", "provenance")

    def __init__(self, *, prefill_s: float, prefill_s_per_token: float, decode_s: float) -> None:
        self._prefill_s = prefill_s
        self._prefill_s_per_token = prefill_s_per_token
        self._decode_s = decode_s
        self._piece = DecodePiece(decode_s, 0.0, 0.0, FOREVER_STEPS)
        self.provenance = Provenance(
            name="fixed",
            source=f"as configured: prefill {prefill_s:g} s + {prefill_s_per_token:g} s a token, decode {decode_s:g} s",
            error_band="none: an assumption, not a measurement",
        )

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        return self._piece

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        new_tokens = computed_tokens = 0
        for chunk_new_tokens, _, recomputed_tokens, _ in chunks:
            new_tokens += chunk_new_tokens
            computed_tokens += chunk_new_tokens + recomputed_tokens
        step_s = self._prefill_s_per_token * computed_tokens
        if new_tokens:
            step_s += self._prefill_s
        if batch + resumed:
            step_s += self._decode_s
        return step_s
