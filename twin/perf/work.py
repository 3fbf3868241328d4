"""What a step asks of the slowest rank of a group, whatever it costs: tokens, pairs, sequences, context.

Nothing here depends on rates or coefficients, so a step that is described once can be priced many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twin.perf.protocol import PrefillChunk


class StepWork(NamedTuple):
    """What the slowest rank does in a step, and what its group does together (the same without data parallelism)."""

    tokens: float
    samples: float  # tokens that the head is computed for
    pairs: float  # (new token, token before it) of prompt chunks
    window_pairs: float
    sequences: float  # decoding, on the rank
    ctx_tokens: float
    group_tokens: float
    group_sequences: float
    prefill: bool


def step_work(
    chunks: Sequence[PrefillChunk],
    batch: int,
    ctx_tokens: int,
    resumed: int,
    resumed_ctx_tokens: int,
    *,
    dp: int,
    window_tokens: int,
) -> StepWork:
    """Shares of the fullest of `dp` ranks: a prompt stays whole on one rank, decodes are dealt out evenly.

    The arguments are those of `LatencyModel.step_s`; window layers look back `window_tokens`.
    """
    if resumed > len(chunks):
        batch, ctx_tokens = with_uncomputed(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)
    prompt_tokens = pairs = near_pairs = ends = most_tokens = most_pairs = most_near_pairs = 0
    for new_tokens, past_tokens, recomputed_tokens, ends_prompt in chunks:
        n = new_tokens + recomputed_tokens
        chunk_pairs = n * past_tokens + n * (n + 1) // 2
        chunk_near_pairs = window_pairs(n, past_tokens, window_tokens)
        prompt_tokens += n
        pairs += chunk_pairs
        near_pairs += chunk_near_pairs
        ends += ends_prompt
        most_tokens = max(most_tokens, n)
        most_pairs = max(most_pairs, chunk_pairs)
        most_near_pairs = max(most_near_pairs, chunk_near_pairs)
    samples = min(len(chunks), ends + resumed) if prompt_tokens else 0
    rank_batch = -(-batch // dp)
    return StepWork(
        tokens=max(most_tokens, -(-prompt_tokens // dp)) + rank_batch,
        samples=rank_batch + -(-samples // dp),
        pairs=max(most_pairs, pairs / dp),
        window_pairs=max(most_near_pairs, near_pairs / dp),
        sequences=rank_batch,
        ctx_tokens=ctx_tokens * rank_batch / batch if batch else 0.0,
        group_tokens=prompt_tokens + batch,
        group_sequences=batch + (len(chunks) if prompt_tokens else 0),
        prefill=prompt_tokens > 0,
    )


def window_pairs(new_tokens: int, past_tokens: int, window_tokens: int) -> int:
    """Sum over the new tokens of min(position, window)."""
    inside = min(new_tokens, max(0, window_tokens - past_tokens))
    return inside * past_tokens + inside * (inside + 1) // 2 + (new_tokens - inside) * window_tokens


def with_uncomputed(
    chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
) -> tuple[int, int]:
    """(batch, ctx_tokens) with the resumed requests that compute nothing before they emit: they only decode."""
    more = resumed - len(chunks)
    return batch + more, ctx_tokens + resumed_ctx_tokens * more // resumed
