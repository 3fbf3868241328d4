"""Engines with a block manager below their pool whose scheduler is more than plain vLLM's.

What tiers add stands in front of a scheduler and never changes whom it lets in once blocks are there; how they wait and
come up is in `tiered.py`.
"""

from __future__ import annotations

from twin.engine.adapters import AdapterEngine
from twin.engine.sequence import Sequence
from twin.engine.speculative import SpeculativeEngine, SpeculativeTrtllmEngine
from twin.engine.tiered import TieredEngine
from twin.engine.trtllm import TrtllmEngine


class TieredSpeculativeEngine(TieredEngine, SpeculativeEngine):
    """Draft tokens: what is computed ahead and does not hold never goes down."""


class TieredTrtllmEngine(TieredEngine, TrtllmEngine):
    """TensorRT-LLM: who waits for blocks has entered, as far as promises go; a prompt that lies below to its last block
    computes nothing, like one that is on the device."""


class TieredSpeculativeTrtllmEngine(TieredEngine, SpeculativeTrtllmEngine):
    """TensorRT-LLM with draft tokens."""


class TieredAdapterEngine(AdapterEngine, TieredEngine):
    """A limit on the adapters of a batch: nothing comes up for whoever would be one too many, and those behind may
    pass. Prompts of different adapters are different content in every tier."""

    def _may_load(self, seq: Sequence) -> bool:
        return self._has_slot(seq, self._loras()) and super()._may_load(seq)
