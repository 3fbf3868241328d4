"""What a search takes each engine to be and to do: sizes, memory knob, how prompts share steps with decodes.

One table for memory, closed form and whoever turns a candidate into a configuration of the twin, so that all mean the
same engine. Figures come from the twin's own defaults; what differs from them is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from policies.frozen import frozen
from twin.config import KIND_DEFAULTS, EngineConfig
from twin.config_lists import accept_rates
from twin.perf.memory import MEMORY_SHARE

DEFAULTS: Final = EngineConfig()
MAX_NUM_SEQS: Final = (DEFAULTS.max_num_seqs, 4 * DEFAULTS.max_num_seqs)
"""Running requests at most: the smaller one, or the larger one where the KV pool has room for more than that."""


@frozen
class Engine:
    """One engine kind. `mixes`: prompts and decodes share a step; `chunks`: a prompt may be cut at the step's budget.

    `first_token` is whose token the client sees first if prompts are computed elsewhere; `batched_tokens` are the
    step budgets that a search tries.
    """

    kind: str
    block_size: int
    memory_share: float
    mixes: bool
    chunks: bool
    first_token: str
    batched_tokens: tuple[int, ...]


def _engine(kind: str, *, mixes: bool, chunks: bool, first_token: str, batched_tokens: tuple[int, ...]) -> Engine:
    return Engine(
        kind=kind,
        block_size=KIND_DEFAULTS.get(kind, {}).get("block_size", DEFAULTS.block_size),
        memory_share=MEMORY_SHARE[kind],
        mixes=mixes,
        chunks=chunks,
        first_token=first_token,
        batched_tokens=batched_tokens,
    )


ENGINE: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        "vllm": _engine("vllm", mixes=True, chunks=True, first_token="decode", batched_tokens=(2048, 8192)),
        "sglang": _engine("sglang", mixes=False, chunks=True, first_token="decode", batched_tokens=(8192,)),
        # TensorRT-LLM computes whole prompts unless told otherwise, and its prefill worker answers first.
        "trtllm": _engine("trtllm", mixes=True, chunks=False, first_token="prefill", batched_tokens=(8192,)),
    }
)


def tokens_per_step(nextn: int, rates: str = DEFAULTS.accept_rates) -> float:
    """Expected tokens of a decode step that verifies `nextn` drafts, each of which is accepted at its rate if those
    before it were."""
    tokens = held = 1.0
    for rate in accept_rates(rates, "accept_rates")[:nextn]:
        held *= rate
        tokens += held
    return tokens
