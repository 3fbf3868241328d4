"""What one worker's engine did with the requests that it was given, under step times that are assumed.

The engine is the twin's own, each request enters it when it did in the live run. For each request remains what the
steps between its dispatch and its first token computed, and those between first and last token: under the assumed
schedule its times are these sums, multiplied by the coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from policies.cluster.blocks import NO_BLOCKS, BlockPath, ContentTree
from policies.cluster.ids import RequestId
from policies.errors import EngineError
from policies.frozen import frozen
from twin.calibrate.live.run import Observed, ServedWorker
from twin.calibrate.shapes import F64
from twin.engine.build import build_engine
from twin.engine.plan import StepPlan
from twin.engine.sequence import Sequence as Leg
from twin.engine.settings import EngineSettings
from twin.perf.linear import LinearCoefficients, LinearLatency, step_features
from twin.perf.protocol import DecodePiece, PrefillChunk, Provenance

FEATURES = 6
"""Coefficients of a step."""


@frozen
class Passed:
    """Of one request: what the steps computed until its first token, from there to its last one; and the largest
    batch, beside prompts or not, that it was in."""

    request: Observed
    until_first: F64
    from_first: F64


@frozen
class Schedule:
    """Requests that ended, and the largest decode batch."""

    passed: tuple[Passed, ...]
    batch: int


class _Watched:
    """A latency model that remembers what its last step computed."""

    def __init__(self, inner: LinearLatency) -> None:
        self._inner = inner
        self.provenance: Provenance = inner.provenance
        self.asked: tuple[float, ...] | None = None

    def decode_piece(self, batch: int, ctx_tokens: int) -> DecodePiece:
        return self._inner.decode_piece(batch, ctx_tokens)

    def step_s(
        self, chunks: Sequence[PrefillChunk], batch: int, ctx_tokens: int, resumed: int, resumed_ctx_tokens: int
    ) -> float:
        self.asked = step_features(chunks, batch + resumed, ctx_tokens + resumed_ctx_tokens)
        return self._inner.step_s(chunks, batch, ctx_tokens, resumed, resumed_ctx_tokens)


def schedule(
    worker: ServedWorker, settings: EngineSettings, coefficients: LinearCoefficients, path_s: float
) -> Schedule:
    """Run the worker's engine on what it was given. Raises EngineError if it refuses a request that the live one
    took."""
    own = replace(settings, blocks=worker.total_blocks, block_size=worker.block_size, leap=False)
    return _Loop(worker, own, coefficients, path_s).run()


class _Loop:
    """One engine on its own clock; `_done` is what all steps up to the end of the last one have computed."""

    def __init__(
        self, worker: ServedWorker, settings: EngineSettings, coefficients: LinearCoefficients, path_s: float
    ) -> None:
        self._latency = _Watched(LinearLatency(coefficients))
        self._engine = build_engine(settings, self._latency)
        self._tree = ContentTree(worker.key_tokens or worker.block_size, worker.block_size)
        self._where = f"{worker.run}, worker {worker.name}"
        self._coming: Iterator[Observed] = iter(worker.requests)
        self._next = next(self._coming, None)
        self._path_s = path_s
        self._done = np.zeros(FEATURES)
        self._sent: dict[Leg, tuple[Observed, F64]] = {}
        self._firsts: dict[Leg, F64] = {}
        self._passed: list[Passed] = []
        self._batch = 0

    def run(self) -> Schedule:
        now_s = 0.0
        while self._next is not None or self._sent:
            if self._engine.idle and self._next is not None:
                now_s = max(now_s, self._next.dispatch_s + self._path_s)
            self._let_in(now_s, None, np.zeros(FEATURES))
            now_s = self._step(now_s)
        return Schedule(passed=tuple(self._passed), batch=self._batch)

    def _step(self, now_s: float) -> float:
        self._latency.asked = None
        plan = self._engine.plan(now_s)
        if plan is None:
            raise EngineError(f"{self._where}: nothing to do with {len(self._sent)} requests open")
        computes = self._computes(plan)
        self._let_in(plan.end_s, plan, computes)
        outcome = self._engine.commit(plan)
        self._done = self._done + computes
        for leg in outcome.firsts:
            self._firsts[leg] = self._done
        for leg in outcome.ended:
            request, since = self._sent.pop(leg)
            first = self._firsts.pop(leg, None)
            if first is not None and leg.finish_reason is None:
                self._passed.append(Passed(request=request, until_first=first - since, from_first=self._done - first))
        return plan.end_s

    def _computes(self, plan: StepPlan) -> F64:
        """What the step that is planned computes."""
        self._batch = max(self._batch, plan.decodes)
        if self._latency.asked is not None:
            return np.array(self._latency.asked)
        batch = self._engine.batch
        return np.array(step_features((), batch.size, batch.ctx_tokens))

    def _let_in(self, until_s: float, plan: StepPlan | None, computes: F64) -> None:
        """Hand over who comes by then; of the step under way they wait for what is left."""
        while self._next is not None and self._next.dispatch_s + self._path_s <= until_s:
            request, share = self._next, 0.0
            if plan is not None and plan.end_s > plan.start_s:
                share = (request.dispatch_s + self._path_s - plan.start_s) / (plan.end_s - plan.start_s)
            leg = self._leg(request)
            refusal = self._engine.submit(leg)
            if refusal is not None:
                raise EngineError(f"{self._where}: the twin's engine refuses request {request.row}: {refusal}")
            self._sent[leg] = (request, self._done + min(1.0, max(0.0, share)) * computes)
            self._next = next(self._coming, None)

    def _leg(self, request: Observed) -> Leg:
        own, blocks = self._tree.private(), request.isl // self._tree.block_size
        path = BlockPath(((own, blocks),), blocks) if blocks else NO_BLOCKS
        if request.keys is not None:
            path = self._tree.path(list(request.keys), request.isl)
        name = RequestId(str(request.row))
        return Leg(name, request.isl, request.outputs, path, own, row=request.row, dispatch_s=request.dispatch_s)
