"""A latency model in which every step lasts 1, and which remembers what it was asked to price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk, Provenance


class Asked(NamedTuple):
    """The arguments of `LatencyModel.step_s`."""

    chunks: tuple[PrefillChunk, ...]
    batch: int
    ctx_tokens: int
    resumed: int
    resumed_ctx_tokens: int


class UnitLatency:
    """`asked`: the last step that was to be priced."""

    provenance = Provenance(name="unit", source="every step lasts 1")

    def __init__(self) -> None:
        self.asked: Asked | None = None

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        self.asked = Asked((), batch, ctx_tokens, 0, 0)
        return DecodePiece(1.0, 0.0, 0.0, FOREVER_STEPS)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        self.asked = Asked(tuple(chunks), batch, ctx_tokens, resumed, resumed_ctx_tokens)
        return 1.0
