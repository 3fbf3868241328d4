"""The `table` latency model: measured points, interpolated. Refuses points outside them unless told to extrapolate.

It adds nothing of its own: what the table does not measure (prior context, batch size) is not priced, and the notes of
its provenance say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.grid import Grid
from twin.perf.protocol import DecodePiece, PrefillChunk, Provenance


class Walk(NamedTuple):
    """Where a batch stands on the decode grid, and how far one step takes it."""

    x: float
    y: float
    dx: float
    dy: float


DecodeAxes = Callable[[int, int], Walk]
"""(batch, ctx_tokens) -> position on the decode grid."""


def by_batch_and_mean(batch: int, ctx_tokens: int) -> Walk:
    """x: batch size; y: mean context of a request."""
    return Walk(batch, ctx_tokens / batch, 0.0, 1.0)


def by_batch(batch: int, ctx_tokens: int) -> Walk:
    """x: batch size; context is not in the table."""
    return Walk(batch, 0.0, 0.0, 0.0)


def by_ctx(batch: int, ctx_tokens: int) -> Walk:
    """y: context of the whole batch; batch size is not in the table."""
    return Walk(0.0, ctx_tokens, 0.0, batch)


def by_ctx_and_floored_mean(batch: int, ctx_tokens: int) -> Walk:
    """x: context of the whole batch; y: mean context, rounded down, as the peer's profiles have it."""
    return Walk(ctx_tokens, ctx_tokens // batch, batch, 1.0)


@frozen
class MeasuredTable:
    """The points of one file as grids (None: it has no such rows)."""

    where: str
    prefill: Grid | None
    decode: Grid | None
    decode_axes: DecodeAxes
    notes: tuple[str, ...]
    digest: str  # of the file
    rows: int


class TableLatency:
    """Prefill from (new tokens, prior context), decode from (batch, context); a step with both costs their sum.

    Several chunks count as one: their tokens together, their prior contexts averaged with the tokens as weights (so
    that the number of token pairs with prior context is right). Recomputed tokens count as prompt tokens, and a request
    that recomputes is not in the decode part.
    """

    __slots__ = ("_axes", "_decode", "_prefill", "_where", "provenance")

    def __init__(
        self, table: MeasuredTable, *, extrapolate: bool, engine_version: str | None = None, source: str | None = None
    ) -> None:
        self._where = table.where
        self._prefill = table.prefill
        self._decode = table.decode
        self._axes = table.decode_axes
        named = f"{source}, " if source else ""
        self.provenance = Provenance(
            name="table",
            source=f"{named}{table.where} ({table.rows:,} points, sha256 {table.digest})",
            engine_version=engine_version,
            error_band="interpolation between measured points, not measured",
            extrapolates=extrapolate,
            notes=(*table.notes, "a step with prompt chunks and decodes costs the sum of both: an upper bound"),
        )

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        if self._decode is None:
            raise self._no_decode(batch)
        return self._decode.piece(*self._axes(batch, ctx_tokens))

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        more = resumed - len(chunks)
        if more > 0:  # resumed requests that compute nothing before they emit: they only decode
            batch, ctx_tokens = batch + more, ctx_tokens + resumed_ctx_tokens * more // resumed
        tokens = pairs = 0
        for new_tokens, past_tokens, recomputed_tokens, _ in chunks:
            n = new_tokens + recomputed_tokens
            tokens += n
            pairs += n * past_tokens
        step_s = 0.0
        if tokens:
            if self._prefill is None:
                raise ConfigError(f"{self._where}: no prefill points, but a step computes {tokens} prompt tokens")
            past_tokens_mean = pairs / tokens if self._prefill.x_name else 0.0
            step_s = self._prefill.seconds(past_tokens_mean, tokens)
        if batch:
            step_s += self._decode_s(batch, ctx_tokens)
        return step_s

    def _decode_s(self, batch: int, ctx_tokens: int) -> float:
        if self._decode is None:
            raise self._no_decode(batch)
        x, y, _, _ = self._axes(batch, ctx_tokens)
        return self._decode.seconds(x, y)

    def _no_decode(self, batch: int) -> ConfigError:
        return ConfigError(f"{self._where}: no decode points, but {batch} requests decode")
