"""The optional `silicon` latency model: steps of our engines put together from what a package of kernel tables answers.

The package prices steps of requests of one length each; ours have prompts of any lengths beside decodes. Nothing is
fitted here. How the package is found and asked for a worker: `external.py`; formulas: docs/latency-models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from policies.errors import CapabilityError
from twin.perf.protocol import DecodePiece, PrefillChunk, Provenance

PACKAGE = "aiconfigurator-core"
KNOT_TOKENS = 256
"""Decode steps are interpolated between mean contexts at multiples of this (ours: what the package has is coarser)."""

Answer = TypeVar("Answer")


class Handle(Protocol):
    """What is asked of the package's compiled engine, in milliseconds. `isl` is the context with the new tokens,
    `prefix` what of it is there already; with `osl` = 2, decodes are priced at `isl` tokens each."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int) -> float: ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int) -> float: ...

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int
    ) -> tuple[float, float, float, float]:
        """(all, what all tokens share, attention of prompts, attention of decodes). The attention of prompts is that of
        isl - prefix new tokens behind `prefix`, times ctx_tokens / isl."""
        ...


class SiliconLatency:
    """Steps of a worker without data or pipeline parallelism, as `handle` prices them. Raises CapabilityError for a
    step that it has no answer for."""

    __slots__ = ("_handle", "_knots", "provenance")

    def __init__(self, handle: Handle, provenance: Provenance) -> None:
        self._handle = handle
        self._knots: dict[tuple[int, int], float] = {}
        self.provenance = provenance

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        """Linear in the mean context from one knot to the next."""
        knot, past = divmod(ctx_tokens, batch * KNOT_TOKENS)
        low_s, high_s = self._knot_s(batch, knot), self._knot_s(batch, knot + 1)
        token_s = (high_s - low_s) / KNOT_TOKENS
        return DecodePiece(low_s + token_s * (past / batch), token_s, 0.0, KNOT_TOKENS - past // batch)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        if resumed > len(chunks):  # some compute nothing before they emit: they only decode
            more = resumed - len(chunks)
            batch, ctx_tokens = batch + more, ctx_tokens + resumed_ctx_tokens * more // resumed
        work = [(new + again, past) for new, past, again, _ in chunks if new + again]
        if not work:
            return self.decode_piece(batch, ctx_tokens).g0 if batch else 0.0
        if len(work) == 1 and not batch:
            tokens, past = work[0]
            return answer(lambda: self._handle.predict_prefill_latency(1, past + tokens, past)) / 1e3
        total = sum(tokens for tokens, _ in work)
        length = max(1, ctx_tokens // batch) if batch else total
        _, shared_ms, _, decode_ms = answer(lambda: self._handle.mixed_step_breakdown(total, batch, length, 2, 0))
        return (shared_ms + decode_ms + sum(self._attention_ms(*one) for one in work)) / 1e3

    def _attention_ms(self, tokens: int, past: int) -> float:
        """Attention of one whole chunk."""
        length = past + tokens
        share_ms = answer(lambda: self._handle.mixed_step_breakdown(tokens, 0, length, 2, past))[2]
        return share_ms * length / tokens

    def _knot_s(self, batch: int, knot: int) -> float:
        known = self._knots.get((batch, knot))
        if known is None:
            length = max(1, knot * KNOT_TOKENS)
            known = answer(lambda: self._handle.predict_decode_latency(batch, length, 2)) / 1e3
            self._knots[batch, knot] = known
        return known


def answer(ask: Callable[[], Answer]) -> Answer:
    """What the package answers; whatever it raises is an answer too."""
    try:
        return ask()
    except CapabilityError:
        raise
    except Exception as error:
        text = (str(error).strip() or "no reason given").splitlines()[0]
        raise CapabilityError(f"{PACKAGE} says {type(error).__name__}: {text}") from error
