"""Speculative decoding: a decode step verifies draft tokens and may emit several tokens of a request at once.

Steps are scheduled request by request and never leapt, since nobody knows how far a burst goes. Blocks for the largest
burst are there before a step begins, and those that were not needed go back at its end. Rules: docs/engines/options.md.
"""

from __future__ import annotations

from twin.engine.core import EngineParts
from twin.engine.drafts import Drafts
from twin.engine.plan import StepPlan
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.engine.trtllm import TrtllmEngine
from twin.engine.vllm import VllmEngine
from twin.perf.protocol import PrefillChunk


class SpeculativeEngine(VllmEngine):
    """A vLLM replica with speculative decoding; `settings.speculation` must be set."""

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        assert settings.speculation is not None
        self._drafts = Drafts(settings.speculation, settings.blocks * settings.block_size)
        self._first_decodes = settings.speculation.in_prefill
        self.ledger.drafts = self._drafts

    def _plan(self, now_s: float) -> StepPlan | None:
        """The next step, decided request by request."""
        step = StepPlan(now_s)
        if self.running:
            return self._plan_literal(step)
        work: list[tuple[Sequence, PrefillChunk]] = []
        self._admit_all(step, work, self.settings.max_num_batched_tokens)
        if not work:
            return self._plan_stuck(step) if self.waiting else None
        step.literal = True
        self._price(step, work, 0, 0)
        self._partial = None
        return step

    def _emit(self, seq: Sequence) -> int:
        made = self._drafts.burst(seq)
        seq.outputs += made
        seq.computed += made - 1
        self.ledger.trim(seq)
        return made

    def _reform(self, end_s: float) -> None:
        """Nobody decodes in a standing batch: what a step emits is not known before its end."""
        self._log.emitted(end_s)


class SpeculativeTrtllmEngine(SpeculativeEngine, TrtllmEngine):
    """A TensorRT-LLM replica with speculative decoding."""
