"""Every deployment that a request allows, in one fixed order, and for each that is not legal the rule that it breaks.

Legality and the memory of single workers are asked for once per worker, not once per deployment. Nothing here knows
time or load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from aiconfig.candidate import ROLES, Candidate, Pool
from aiconfig.engines import ENGINE, MAX_NUM_SEQS
from aiconfig.layouts import layouts_of, ratios
from aiconfig.legality import Worker, budget_rejection, pair_rejection, worker_rejection
from aiconfig.memory import PoolFit, placement, pool_fit
from aiconfig.physics import uncalibrated
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from policies.frozen import frozen

LARGEST_EXACT = 2000
"""Legal points up to which a space is searched exactly (specification §9)."""


@frozen
class Legal:
    """A deployment that engines would start, and the room of each of its pools' workers."""

    candidate: Candidate
    pools: tuple[PoolFit, ...]


class Space:
    """The space of one request. Iterating gives the same `Legal` and `Rejection` in the same order every time."""

    def __init__(self, request: SearchRequest) -> None:
        self.request = request
        self._model = request.find_model()

    def __iter__(self) -> Iterator[Legal | Rejection]:
        for engine in self.request.engines:
            for nextn in self.request.nextn:
                for mode in self.request.modes:
                    found = self._agg(engine, nextn) if mode == "agg" else self._disagg(engine, nextn)
                    yield from found

    def legal(self) -> Iterator[Legal]:
        """Legal ones alone."""
        return (one for one in self if isinstance(one, Legal))

    @property
    def is_large(self) -> bool:
        """More legal points than are searched exactly: sample them instead."""
        return sum(1 for _ in islice(self.legal(), LARGEST_EXACT + 1)) > LARGEST_EXACT

    def dimensions(self) -> Mapping[str, tuple[object, ...]]:
        """The choices of each dimension, for whoever samples."""
        request = self.request
        roles = sorted({role for mode in request.modes for role in ROLES[mode]})
        layouts = {f"layout.{engine}": layouts_of(request, engine) for engine in request.engines}
        formats = {f"weights.{role}": request.weights_of(role) for role in roles}
        kv = {f"kv.{role}": request.kv_of(role) for role in roles}
        return {"engine": request.engines, "mode": request.modes, "nextn": request.nextn, **layouts, **formats, **kv}

    # ------------------------------------------------------------ one pool

    def _agg(self, engine: str, nextn: int) -> Iterator[Legal | Rejection]:
        for worker in self._workers(engine, "mixed", nextn):
            if isinstance(worker, Rejection):
                yield worker
                continue
            pool, room = worker
            for replicas in range(1, self.request.gpus // pool.worker_gpus + 1):
                yield Legal(candidate=self._candidate(engine, nextn, _times(pool, replicas)), pools=(room,))

    # ------------------------------------------------------------ two pools

    def _disagg(self, engine: str, nextn: int) -> Iterator[Legal | Rejection]:
        sides: dict[str, list[tuple[Pool, PoolFit]]] = {}
        for role in ROLES["disagg"]:
            sides[role] = []
            for worker in self._workers(engine, role, nextn):
                if isinstance(worker, Rejection):
                    yield worker
                else:
                    sides[role].append(worker)
        for prefill in sides["prefill"]:
            for decode in sides["decode"]:
                if prefill[0].kv == decode[0].kv and prefill[0].layout.pp == decode[0].layout.pp:
                    yield from self._pairs(engine, nextn, prefill, decode)

    def _pairs(
        self, engine: str, nextn: int, prefill: tuple[Pool, PoolFit], decode: tuple[Pool, PoolFit]
    ) -> Iterator[Legal | Rejection]:
        first = self._candidate(engine, nextn, prefill[0], decode[0])
        broken = pair_rejection(first.name, self._model, prefill[0], decode[0], self.request.gpu_of("prefill"))
        broken = broken or budget_rejection(first.name, first.gpus, self.request.gpus)
        if broken is not None:
            yield broken
            return
        rooms = (prefill[1], decode[1])
        for p, d in ratios(self.request.gpus, prefill[0].worker_gpus, decode[0].worker_gpus):
            yield Legal(
                candidate=self._candidate(engine, nextn, _times(prefill[0], p), _times(decode[0], d)), pools=rooms
            )

    # ------------------------------------------------------------ one worker

    def _workers(self, engine: str, role: str, nextn: int) -> Iterator[tuple[Pool, PoolFit] | Rejection]:
        """Legal workers with their room, each as a pool of one."""
        gpu = self.request.gpu_of(role)
        for layout in layouts_of(self.request, engine):
            for weights in self.request.weights_of(role):
                for kv in self.request.kv_of(role):
                    for tokens in self._batched_tokens(engine, role):
                        pool = Pool(
                            role=role,
                            gpu=gpu.name,
                            layout=layout,
                            replicas=1,
                            weights=weights,
                            kv=kv,
                            max_num_seqs=MAX_NUM_SEQS[0],
                            max_num_batched_tokens=tokens,
                        )
                        yield from self._sized(engine, pool, nextn)

    def _sized(self, engine: str, pool: Pool, nextn: int) -> Iterator[tuple[Pool, PoolFit] | Rejection]:
        """The pool with each number of sequences to try; the larger default only where the KV holds more users."""
        request = self.request
        name = self._candidate(engine, nextn, pool).name
        worker = Worker(
            name=name, engine=engine, model=self._model, gpu=request.gpu_of(pool.role), pool=pool, nextn=nextn
        )
        broken = worker_rejection(worker) or budget_rejection(name, pool.worker_gpus, request.gpus)
        if broken is None and request.strict:
            broken = uncalibrated(name, engine, placement(request.model, pool, request.hardware), request.physics)
        if broken is not None:
            yield broken
            return
        for sequences in request.max_num_seqs or MAX_NUM_SEQS[:1]:
            sized = _sequences(pool, sequences)
            room = self._room(engine, sized, nextn)
            if request.max_num_seqs is None and not isinstance(room, Rejection) and room.rank_users > sequences:
                larger = _sequences(pool, MAX_NUM_SEQS[1])
                more = self._room(engine, larger, nextn)
                if not isinstance(more, Rejection):
                    sized, room = larger, more
            yield room if isinstance(room, Rejection) else (sized, room)

    def _room(self, engine: str, pool: Pool, nextn: int) -> PoolFit | Rejection:
        request = self.request
        name = self._candidate(engine, nextn, pool).name
        return pool_fit(name, engine, request.model, pool, request.workload, request.hardware)

    def _batched_tokens(self, engine: str, role: str) -> tuple[int, ...]:
        """Step budgets to try; workers of one role have no use for a small one, and whole prompts need room."""
        given = self.request.max_num_batched_tokens
        if given is not None:
            return given
        usual = ENGINE[engine].batched_tokens
        if role != "mixed":
            usual = usual[-1:]
        if ENGINE[engine].chunks:
            return usual
        longest = self.request.workload.longest_prompt + MAX_NUM_SEQS[0]  # a prompt beside a full batch of decodes
        return tuple(max(tokens, -(-longest // 1024) * 1024) for tokens in usual)

    def _candidate(self, engine: str, nextn: int, *pools: Pool) -> Candidate:
        return Candidate(model=self.request.model, engine=engine, pools=pools, nextn=nextn)


def _times(pool: Pool, replicas: int) -> Pool:
    return _changed(pool, replicas, pool.max_num_seqs)


def _sequences(pool: Pool, sequences: int) -> Pool:
    return _changed(pool, pool.replicas, sequences)


def _changed(pool: Pool, replicas: int, sequences: int) -> Pool:
    """`dataclasses.replace`, at a third of its time: it is called for every deployment."""
    if (replicas, sequences) == (pool.replicas, pool.max_num_seqs):
        return pool
    return Pool(
        role=pool.role,
        gpu=pool.gpu,
        layout=pool.layout,
        replicas=replicas,
        weights=pool.weights,
        kv=pool.kv,
        max_num_seqs=sequences,
        max_num_batched_tokens=pool.max_num_batched_tokens,
    )
