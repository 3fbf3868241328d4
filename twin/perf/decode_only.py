"""Steps of a decode worker as the reference prices them: prompts that are computed again cost nothing there.

Only for comparison (`compat`): real decode workers pay for a recomputation like anybody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.perf.protocol import DecodePiece, LatencyModel, PrefillChunk, Provenance


class DecodeOnlyLatency:
    """The decode part of a model: everybody who emits in the step, and nothing else."""

    def __init__(self, inner: LatencyModel) -> None:
        self._inner = inner

    @property
    def provenance(self) -> Provenance:
        return self._inner.provenance

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        return self._inner.decode_piece(batch, ctx_tokens)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        emitting = batch + resumed
        return self._inner.decode_piece(emitting, ctx_tokens + resumed_ctx_tokens).g0 if emitting else 0.0
