"""A latency model that takes a factor longer: a worker that is throttled, or shares its device."""

from __future__ import annotations

from collections.abc import Sequence

from twin.perf.protocol import DecodePiece, LatencyModel, PrefillChunk, Provenance


class Slowed:
    """`usual` with every step `factor` times as long."""

    def __init__(self, usual: LatencyModel, factor: float) -> None:
        self._usual = usual
        self._factor = factor
        self.provenance: Provenance = usual.provenance

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        g0, g1, g2, steps = self._usual.decode_piece(batch, ctx_tokens)
        factor = self._factor
        return DecodePiece(g0 * factor, g1 * factor, g2 * factor, steps)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        return self._factor * self._usual.step_s(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)
