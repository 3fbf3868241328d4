"""The vLLM scheduler with a limit on how many adapters one batch may mix: who would be one too many is passed over.

The running requests say which adapters are in. Whoever waits with another one keeps its place in the queue and others
behind it may enter, as in vLLM (`max_loras`). Requests of the plain model need no slot. Loading an adapter takes no
time.
"""

from __future__ import annotations

from twin.engine.core import EngineParts
from twin.engine.plan import StepPlan
from twin.engine.pool import Match
from twin.engine.sequence import Sequence
from twin.engine.settings import EngineSettings
from twin.engine.vllm import VllmEngine
from twin.perf.protocol import PrefillChunk


class AdapterEngine(VllmEngine):
    """One vLLM replica with `max_loras` set; see `VllmEngine` for how it is driven."""

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        super().__init__(settings, parts)
        assert settings.max_loras is not None
        self._slots = settings.max_loras
        self._passed_all = False  # everybody who waits was passed over: a newcomer may still enter

    def submit(self, seq: Sequence) -> str | None:
        if self._passed_all:
            self._blocked = False
        return super().submit(seq)

    def _plan_exclusive(self, step: StepPlan) -> None:
        passed = self._pass_over()
        if self.waiting:
            super()._plan_exclusive(step)
        else:
            self._blocked = True
        self._put_back(passed)

    def _admit_all(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], left: int) -> None:
        """Let in whom the rules of `VllmEngine` allow, passing over those whose adapter is one too many."""
        left_out = self._leave_out()
        passed: list[Sequence] = []
        while True:
            done = len(work)
            super()._admit_all(step, work, left)
            left -= sum(chunk.new_tokens + chunk.recomputed_tokens for _, chunk in work[done:])
            more = self._pass_over()
            if not more:
                break
            passed += more
        self._put_back(passed)
        for seq in left_out:
            self._insert_as_asked(self.activated, seq)

    def _admissible(self, seq: Sequence, left: int) -> Match | None:
        return super()._admissible(seq, left) if self._has_slot(seq, self._loras()) else None

    # ------------------------------------------------------------ who is one too many

    def _loras(self) -> set[str]:
        """The adapters that run."""
        return {seq.lora for seq in self.running if seq.lora}

    def _has_slot(self, seq: Sequence, loras: set[str]) -> bool:
        return not seq.lora or seq.lora in loras or len(loras) < self._slots

    def _pass_over(self) -> list[Sequence]:
        """Take those out of the front of waiting whose adapter is one too many."""
        passed: list[Sequence] = []
        loras = self._loras()
        while self.waiting and not self._has_slot(self.waiting[0], loras):
            passed.append(self.waiting.popleft())
        return passed

    def _put_back(self, passed: list[Sequence]) -> None:
        self._passed_all = bool(passed) and not self.waiting
        self.waiting.extendleft(reversed(passed))

    def _leave_out(self) -> list[Sequence]:
        """Take those out of the activated whose adapter would be one too many beside those before them."""
        loras = self._loras()
        left_out: list[Sequence] = []
        for seq in self.activated:
            if not self._has_slot(seq, loras):
                left_out.append(seq)
            elif seq.lora:
                loras.add(seq.lora)
        if left_out:
            self.activated = [seq for seq in self.activated if seq not in left_out]
        return left_out
