"""The simulated engine that stands for the one a row was measured on: its limits, and a KV pool from memory."""

from __future__ import annotations

from typing import Any

from policies.errors import ConfigError
from twin.calibrate.measured import Measurement
from twin.engine.settings import EngineSettings, SglangSettings
from twin.engine.trtllm import TrtllmSettings
from twin.perf.memory import kv_pool

BLOCK_TOKENS = {"vllm": 16, "sglang": 16, "trtllm": 32}
MEMORY_SHARE = {"vllm": 0.9, "sglang": 0.85, "trtllm": 0.9}
"""What the public launch scripts give the engines of their memory."""
SEQUENCES, STEP_TOKENS = 1024, 8192
"""Limits per rank where a row does not say."""
ROOM = 1.3
"""Where our estimate of memory says that weights do not fit, although they did: room for so many times the users."""


def engine_settings(row: Measurement) -> EngineSettings:
    """Attention-DP ranks are simulated as one engine with the room of all: requests are dealt out evenly."""
    ranks = row.placed.layout.dp
    block_tokens = BLOCK_TOKENS[row.engine]
    sequences = row.max_num_seqs or SEQUENCES
    step_tokens = (row.max_num_batched_tokens or STEP_TOKENS) * ranks
    limits: dict[str, Any] = {
        "block_size": block_tokens,
        "blocks": _blocks(row, block_tokens, sequences),
        "max_num_seqs": sequences * ranks,
        "max_model_len": None,
    }
    ways: dict[str, Any] = {"prefix_caching": False, "exclusive_prefill": False, "preemption": "lifo"}
    if row.engine == "vllm":
        return EngineSettings(**limits, **ways, max_num_batched_tokens=step_tokens, chunked_prefill=True)
    if row.engine == "trtllm":  # whole prompts only
        whole = max(step_tokens, int(ROOM * row.isl) + 1)
        return TrtllmSettings(
            **limits,
            **ways,
            max_num_batched_tokens=whole,
            chunked_prefill=False,
            capacity_policy="guaranteed_no_evict",
        )
    return SglangSettings(
        **limits,
        **ways,
        max_num_batched_tokens=step_tokens,
        chunked_prefill=True,
        schedule_policy="fifo",
        chunked_prefill_size=step_tokens,
        max_prefill_tokens=max(16384 * ranks, step_tokens),
        schedule_conservativeness=1.0,
        clip_max_new_tokens=4096,
        prefill_decode_interval=0,
    )


def _blocks(row: Measurement, block_tokens: int, sequences: int) -> int:
    try:
        pool = kv_pool(
            row.placed,
            engine=row.engine,
            block_size=block_tokens,
            max_num_seqs=min(sequences, row.users),
            gpu_memory_utilization=MEMORY_SHARE[row.engine],
        )
    except ConfigError:
        return int(row.users * ROOM * (row.isl + row.osl) / block_tokens) + 10
    return pool.blocks
