"""The `roofline` latency model, the default: what a step must read, multiply and send, at the shares an engine reaches.

A step is priced as a whole, so prompt chunks and decodes share one pass over the weights; prompt work pays for the
context before it. Pure and without state but caches of its own results. Never prices a recomputed token as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twin.perf.calibration import LEVELS
from twin.perf.coefficients import Block
from twin.perf.costs import StepCosts, smax, step_costs
from twin.perf.memory import Placement
from twin.perf.pieces import at_least
from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk, Provenance
from twin.perf.work import step_work, window_pairs, with_uncomputed

UNCALIBRATED_BAND = "not calibrated here (an uncalibrated prototype was off by 14 % TPOT and 45 % TTFT at the median)"
"""What a prototype of this model without any calibration was measured at (means: 17 % and 50 %); this one was not."""


class StepParts(NamedTuple):
    """Seconds of one step by cause; they add up to the step."""

    gemm_s: float
    experts_s: float
    attention_prefill_s: float
    attention_decode_s: float
    comm_s: float
    layers_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


class RooflineLatency:
    """See docs/latency-models.md for the formulas.

    Attention data parallelism: requests are taken as spread evenly over the ranks, and the fullest rank sets the step.
    Pipeline parallelism: the sum of the stages, as a token sees it (no bubbles, no overlap of microbatches).
    Window layers: the batch reads min(context, batch * window) tokens, exact for equal lengths, else a little too many.
    Host time comes on top; with `overlap` it is hidden, and a step lasts as long as the longer of device and host.
    """

    __slots__ = ("_c", "_decode", "_dp", "_overlap", "provenance")

    def __init__(self, placed: Placement, block: Block, *, overlap: bool = False) -> None:
        self._c = step_costs(placed, block.values)
        self._dp = placed.layout.dp
        self._overlap = overlap
        self._decode: dict[int, tuple[float, float, float, int]] = {}
        self.provenance = _provenance(placed, block, overlap=overlap)

    @property
    def costs(self) -> StepCosts:
        """The precomputed costs of this model, for explanations."""
        return self._c

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        """Linear in the step index; with window layers in two pieces, before and behind the window's filling. With
        `overlap` there may be a flat one before them, while the host takes longer than the device."""
        if not self._overlap:
            return self._linear_piece(batch, ctx_tokens)
        return at_least(self._linear_piece(batch, ctx_tokens), self._c.host_s + self._c.host_sequence_s * batch)

    def _linear_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        """Device and host; with `overlap` the device alone."""
        known = self._decode.get(batch)
        if known is None:
            known = self._decode[batch] = self._decode_terms(batch)
        fixed_s, token_s, window_token_s, window_ctx_tokens = known
        if not window_token_s:
            return DecodePiece(fixed_s + token_s * ctx_tokens, token_s * batch, 0.0, FOREVER_STEPS)
        left_tokens = window_ctx_tokens - ctx_tokens
        if left_tokens <= 0:
            g0 = fixed_s + token_s * ctx_tokens + window_token_s * window_ctx_tokens
            return DecodePiece(g0, token_s * batch, 0.0, FOREVER_STEPS)
        both_s = token_s + window_token_s
        return DecodePiece(fixed_s + both_s * ctx_tokens, both_s * batch, 0.0, -(-left_tokens // batch))

    def _decode_terms(self, batch: int) -> tuple[float, float, float, int]:
        """(seconds without context, per context token, the same within windows, tokens that fill the windows)."""
        c = self._c
        rank_batch = -(-batch // self._dp)
        share = c.m_decode * rank_batch / batch
        device_s = self._gemm_s(rank_batch, rank_batch) + self._experts_s(batch) + self._comm_s(rank_batch, batch)
        device_s += c.layers_s + rank_batch * c.sequence_s
        host_s = 0.0 if self._overlap else c.host_s + c.host_sequence_s * batch
        window = c.window_tokens * batch
        return device_s * c.m_decode + host_s, c.ctx_token_s * share, c.window_ctx_token_s * share, window

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        if not chunks and not resumed:
            return self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        if self._dp > 1:
            return self.parts(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens).total_s
        if resumed > len(chunks):
            batch, ctx_tokens = with_uncomputed(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)
        c = self._c
        prompt_tokens = ends = 0
        attention_s = 0.0
        for new_tokens, past_tokens, recomputed_tokens, ends_prompt in chunks:
            n = new_tokens + recomputed_tokens
            prompt_tokens += n
            ends += ends_prompt
            attention_s += c.pair_s * (n * past_tokens + n * (n + 1) // 2)
            if c.window_pair_s:
                attention_s += c.window_pair_s * window_pairs(n, past_tokens, c.window_tokens)
        if not prompt_tokens:
            return self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        tokens = prompt_tokens + batch
        samples = batch + min(len(chunks), ends + resumed)
        if batch:
            attention_s += self._decode_attention_s(batch, ctx_tokens)
        device_s = self._gemm_s(tokens, samples) + attention_s + self._comm_s(tokens, tokens) + c.layers_s
        if c.experts is not None:
            device_s += self._experts_s(tokens)
        host_s = c.host_s + c.host_sequence_s * (batch + len(chunks)) + c.host_prefill_s
        device_s *= c.m_prefill
        return max(device_s, host_s) if self._overlap else device_s + host_s

    def parts(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> StepParts:
        """`step_s` split by cause; with `overlap` the host's part is what the device does not hide."""
        c = self._c
        work = step_work(
            chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens, dp=self._dp, window_tokens=c.window_tokens
        )
        if not work.group_tokens:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        m = c.m_prefill if work.prefill else c.m_decode
        host_s = c.host_s + c.host_sequence_s * work.group_sequences + (c.host_prefill_s if work.prefill else 0.0)
        parts = StepParts(
            gemm_s=m * self._gemm_s(work.tokens, work.samples),
            experts_s=m * self._experts_s(work.group_tokens),
            attention_prefill_s=m * (c.pair_s * work.pairs + c.window_pair_s * work.window_pairs),
            attention_decode_s=m * self._decode_attention_s(work.sequences, work.ctx_tokens),
            comm_s=m * self._comm_s(work.tokens, work.group_tokens),
            layers_s=m * c.layers_s,
            host_s=0.0 if self._overlap else host_s,
        )
        return parts._replace(host_s=max(0.0, host_s - parts.total_s)) if self._overlap else parts

    def _gemm_s(self, tokens: float, samples: float) -> float:
        c = self._c
        multiply_s = c.token_s * tokens + c.sample_s * samples
        if c.half_tokens:
            multiply_s *= 1.0 + c.half_tokens / tokens
        return smax(c.weights_s, multiply_s)

    def _experts_s(self, group_tokens: float) -> float:
        e = self._c.experts
        if e is None:
            return 0.0
        multiply_s = e.token_s * (group_tokens + (e.spread_tokens * group_tokens) ** 0.5)
        if e.half_tokens:
            multiply_s *= 1.0 + e.half_tokens / group_tokens
        return smax(e.read_s * (1.0 - e.missed**group_tokens), multiply_s)

    def _comm_s(self, tokens: float, group_tokens: float) -> float:
        links = self._c.links
        return links.step_s + links.token_s * tokens + links.group_token_s * group_tokens

    def _decode_attention_s(self, sequences: float, ctx_tokens: float) -> float:
        c = self._c
        seconds = c.ctx_token_s * ctx_tokens + c.sequence_s * sequences
        if c.window_ctx_token_s:
            seconds += c.window_ctx_token_s * min(ctx_tokens, c.window_tokens * sequences)
        return seconds


def _provenance(placed: Placement, block: Block, *, overlap: bool) -> Provenance:
    notes = ["client and server path not included (tokeniser, HTTP, streaming)"]
    if block.values.client_s:
        per_token = f" and {block.values.client_s_per_token * 1e6:.1f} us per prompt token"
        notes[0] += f"; measured with such clients it was about {block.values.client_s * 1e3:.0f} ms"
        notes[0] += per_token if block.values.client_s_per_token else ""
    notes += block.notes
    if block.engine is None and block.level is None:
        notes.append("no coefficients for this engine and GPU family: generic ones")
    if overlap:
        notes.append("overlap scheduling: host time is hidden unless it is longer than the device's")
    if placed.layout.pp > 1:
        notes.append("pipeline: sum of the stages, as one token sees it")
    if placed.model.window or placed.model.indexer:
        notes.append("window and sparse layers: batch taken as of equal lengths")
    if placed.model.linear:
        notes.append("linear-attention layers: state traffic only, their products are left out")
    if placed.gpu.note:
        notes.append(f"{placed.gpu.name}: {placed.gpu.note}")
    return Provenance(
        name="roofline",
        source=f"{placed.label()}, {placed.kv} KV · coefficients {block.label} ({block.origin})",
        engine_version=block.engine_version,
        error_band=block.error_band or (UNCALIBRATED_BAND if block.level is None else None),
        notes=tuple(notes),
        reach=block.reach,
        band=block.band,
        beyond=block.notes,
        nearness=LEVELS[block.level] if block.level is not None else None,
        client_s=block.values.client_s,
        client_s_per_token=block.values.client_s_per_token,
    )
