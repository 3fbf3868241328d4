"""What one simulated engine is configured with. Defaults live in `twin/config.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes of one engine: `blocks` of `block_size` tokens, at most `max_num_seqs` running requests and
    `max_num_batched_tokens` tokens in a step.

    `exclusive_prefill`: a step is one whole prompt or a decode step, prompts first. `preemption` is "lifo" or "fifo".
    `fifo_skip` and `abort_when_stuck` are behaviours of the reference simulator (docs/parity.md). `leap` False computes
    every step on its own; the results are the same.
    """

    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefix_caching: bool
    chunked_prefill: bool
    exclusive_prefill: bool
    preemption: str
    fifo_skip: bool = False
    abort_when_stuck: bool = False
    leap: bool = True
