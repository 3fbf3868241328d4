"""Layers around a step-latency model: what parallelism, speculation and CUDA graphs make of a step.

Each takes a model and is one, and says in the provenance what it did. They only change the shape that the model inside
is asked for, or the time that it answers; none knows queues or requests. Formulas: docs/engines/options.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from twin.perf.pieces import slower
from twin.perf.protocol import DecodePiece, LatencyModel, PrefillChunk, Provenance


def _noted(provenance: Provenance, note: str) -> Provenance:
    return replace(provenance, notes=(*provenance.notes, note))


class RankLatency:
    """Steps of one of `ranks` attention-DP ranks, out of a model of their whole group.

    The others are taken to be as full as this one; that matters to the experts, which see the tokens of all ranks.
    """

    __slots__ = ("_inner", "_ranks", "provenance")

    def __init__(self, inner: LatencyModel, ranks: int) -> None:
        self._inner = inner
        self._ranks = ranks
        self.provenance = _noted(inner.provenance, f"{ranks} ranks: experts see every rank as full as the one priced")

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        return self._inner.decode_piece(batch * self._ranks, ctx_tokens * self._ranks)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        n = self._ranks
        return self._inner.step_s([*chunks] * n, batch * n, ctx_tokens * n, resumed * n, resumed_ctx_tokens * n)


class VerifyLatency:
    """Decode steps that verify `drafts` draft tokens per request: so many more tokens, the context read once.

    Making the drafts is not priced.
    """

    __slots__ = ("_inner", "_tokens", "provenance")

    def __init__(self, inner: LatencyModel, drafts: int) -> None:
        self._inner = inner
        self._tokens = drafts + 1
        self.provenance = _noted(inner.provenance, f"speculation: {drafts} drafts a step verified, made for free")

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        piece = self._inner.decode_piece(batch * self._tokens, ctx_tokens)
        return slower(piece, 1.0 / self._tokens)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        return self._inner.step_s(chunks, batch * self._tokens, ctx_tokens, resumed, resumed_ctx_tokens)


class PaddedLatency:
    """Decode steps under CUDA graphs: a batch is padded to the next of `sizes`; above the largest, steps last
    `eager_factor` times as long. Steps with prompt work are not padded.
    """

    __slots__ = ("_eager_factor", "_inner", "_sizes", "provenance")

    def __init__(self, inner: LatencyModel, sizes: Sequence[int], eager_factor: float) -> None:
        self._inner = inner
        self._sizes = tuple(sizes)
        self._eager_factor = eager_factor
        shown = f"{len(self._sizes)} captured sizes up to {self._sizes[-1]}, eager above: x {eager_factor:g}"
        self.provenance = _noted(inner.provenance, f"CUDA graphs: {shown}")

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        at = bisect_left(self._sizes, batch)
        if at == len(self._sizes):
            return slower(self._inner.decode_piece(batch, ctx_tokens), 1.0, self._eager_factor)
        padded = self._sizes[at]
        piece = self._inner.decode_piece(padded, ctx_tokens)
        return piece if padded == batch else slower(piece, batch / padded)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        if chunks or resumed:
            return self._inner.step_s(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)
        return self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0


class PipelinedLatency:
    """Steps of `stages` pipeline stages, out of a model that adds the stages up as one token sees them.

    A step's requests run as m = min(stages, requests) microbatches. Each of them takes the time of its share of the
    batch through all stages; with m < stages the rest of the pipeline is idle (a bubble). A chunk is not split: beside
    decodes a step lasts at least as long as its longest chunk alone. A step that completes no prompt and decodes nobody
    lasts one stage: the next chunk follows it into the pipeline.
    """

    __slots__ = ("_inner", "_stages", "provenance")

    def __init__(self, inner: LatencyModel, stages: int) -> None:
        self._inner = inner
        self._stages = stages
        self.provenance = _noted(inner.provenance, f"pipeline of {stages}: a step runs as up to {stages} microbatches")

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        parts = min(self._stages, batch)
        share = -(-batch // parts)
        return slower(self._inner.decode_piece(share, ctx_tokens // parts), batch / (parts * share))

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        if not chunks and not resumed:
            return self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        whole_s = self._inner.step_s(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)
        if not batch and not resumed and not any(chunk.ends_prompt for chunk in chunks):
            return whole_s / self._stages
        shared_s = whole_s / min(self._stages, len(chunks) + batch)
        decode_s = self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        longest = max(chunks, key=lambda chunk: chunk.new_tokens + chunk.recomputed_tokens, default=None)
        alone_s = self._inner.step_s((longest,), 0, 0, 0, 0) if longest is not None else 0.0
        return max(shared_s, decode_s, alone_s)


def rank_latency(
    model: LatencyModel,
    *,
    pp: int = 1,
    dp: int = 1,
    nextn: int = 0,
    graph_sizes: Sequence[int] | None = None,
    eager_factor: float = 1.0,
    physical: bool = True,
) -> LatencyModel:
    """What the steps of one rank of a worker cost, out of a model of the worker. Parallelism and drafts are added to
    `physical` models alone: the others' times are whole steps."""
    if physical and dp > 1:
        model = RankLatency(model, dp)
    if physical and nextn:
        model = VerifyLatency(model, nextn)
    if graph_sizes is not None:
        model = PaddedLatency(model, graph_sizes, eager_factor)
    if physical and pp > 1:
        model = PipelinedLatency(model, pp)
    return model
