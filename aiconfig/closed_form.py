"""Means of a candidate at a load, without simulating it: for choosing what to simulate (specification §6, R4 and R6).

Step costs are the twin's own and are asked for once per worker, whatever the number of workers and loads. It knows
means: a limit on a percentile is not judged by it (R8).
"""

from __future__ import annotations

from aiconfig.candidate import Candidate, Pool
from aiconfig.curve import Curve, Point
from aiconfig.engines import ENGINE, tokens_per_step
from aiconfig.estimate import Estimate, Load
from aiconfig.memory import Fit
from aiconfig.mixed import Demand, MixedCurve
from aiconfig.physics import SHIPPED, Physics
from aiconfig.power import power_w
from aiconfig.split import PromptRank, SplitCurve
from aiconfig.steps import Steps
from aiconfig.told import told
from aiconfig.workload import Workload
from twin.perf.kv_layout import kv_cache, plan_layout

_Key = tuple[object, ...]


class ClosedForm:
    """Estimates for one workload; Keeps what it computed."""

    def __init__(self, workload: Workload, physics: Physics = SHIPPED) -> None:
        self.workload = workload
        self._physics = physics
        self._steps: dict[_Key, Steps] = {}
        self._curves: dict[_Key, Curve] = {}
        self._transfers: dict[_Key, float] = {}

    @property
    def strict(self) -> bool:
        """Whether estimates beyond the calibrated range are not wanted."""
        return self._physics.strict

    # ------------------------------------------------------------ what callers ask for

    def estimate(self, candidate: Candidate, load: Load, fit: Fit) -> Estimate | None:
        """Means at that load; None if its queue would grow for ever."""
        point = self.point(candidate, load, fit)
        return None if point is None else self._told(candidate, load, fit, point)

    def idle(self, candidate: Candidate, fit: Fit) -> Estimate:
        """One user alone: no deployment of these workers answers faster."""
        point = self.curve(candidate, fit).idle()
        return self._told(candidate, Load(users=1), fit, point)

    def power_w(self, candidate: Candidate, estimate: Estimate) -> float | None:
        """Watts of all its GPUs under an estimate of this form."""
        steps = tuple(self._steps_of(candidate, pool) for pool in candidate.pools)
        return power_w(candidate, self.workload, estimate, steps)

    def point(self, candidate: Candidate, load: Load, fit: Fit) -> Point | None:
        """Figures of the whole deployment at that load; None if its queue would grow for ever."""
        curve, count = self.curve(candidate, fit), self._copies(candidate)
        if load.users is not None:
            return curve.at_users(load.users / count).times(count)
        assert load.rps is not None
        found = curve.at_rate(load.rps / count)
        return None if found is None else found.times(count)

    def most(self, candidate: Candidate, fit: Fit) -> Point:
        """The largest load that is served without a queue, of the whole deployment."""
        return self.curve(candidate, fit).top.times(self._copies(candidate))

    def curve(self, candidate: Candidate, fit: Fit) -> Curve:
        """All loads: of one rank of one worker if workers do everything, of the whole deployment if not."""
        late = self.workload.arrivals != "closed" or candidate.pools[0].replicas > 1
        engine = (candidate.engine, candidate.model, candidate.nextn)
        if candidate.mode == "agg":
            key: _Key = (*engine, late, _pool_key(candidate.pools[0]))
        else:
            counts = tuple(pool.replicas for pool in candidate.pools)
            key = (*engine, late, counts, *(_pool_key(pool) for pool in candidate.pools))
        found = self._curves.get(key)
        if found is None:
            build = self._mixed if candidate.mode == "agg" else self._split
            found = self._curves[key] = build(candidate, fit, late)
        return found

    def provenance(self, candidate: Candidate) -> tuple[str, ...]:
        """Where the seconds of its steps come from, one line for each kind of worker, and what that leaves out."""
        found = [self._steps_of(candidate, pool).provenance for pool in candidate.pools]
        lines = [one.line() for one in found] + [note for one in found for note in one.notes]
        return tuple(dict.fromkeys(lines))

    # ------------------------------------------------------------ how curves are made

    def _mixed(self, candidate: Candidate, fit: Fit, late: bool) -> Curve:
        pool = candidate.pools[0]
        return MixedCurve(
            self._steps_of(candidate, pool),
            ENGINE[candidate.engine],
            self._demand(candidate, late),
            budget=pool.max_num_batched_tokens,
            rank_users=fit.pools[0].rank_users,
            sequences=pool.max_num_seqs,
        )

    def _split(self, candidate: Candidate, fit: Fit, late: bool) -> Curve:
        prefill, decode = candidate.pools
        rank_users = fit.pools[1].rank_users
        return SplitCurve(
            PromptRank(
                steps=self._steps_of(candidate, prefill),
                budget=prefill.max_num_batched_tokens,
                ranks=prefill.replicas * prefill.layout.dp,
            ),
            self._steps_of(candidate, decode),
            self._demand(candidate, late),
            decode_ranks=decode.replicas * decode.layout.dp,
            slots=min(rank_users, decode.max_num_seqs),
            slots_limit="kv" if rank_users <= decode.max_num_seqs else "sequences",
            transfer_s=self._transfer_s(candidate),
            first_at_decode=ENGINE[candidate.engine].first_token == "decode",
        )

    def _demand(self, candidate: Candidate, late: bool) -> Demand:
        workload = self.workload
        closed = workload.arrivals == "closed" and workload.trace is None
        steps = (workload.mean_osl - 1.0) / tokens_per_step(candidate.nextn)
        return Demand(
            osl=workload.mean_osl,
            decode_steps=max(1.0, steps),
            bunched=closed and workload.min_ratio == 1.0,
            late=1.0 if late else 0.0,
        )

    def _steps_of(self, candidate: Candidate, pool: Pool) -> Steps:
        nextn = 0 if pool.role == "prefill" else candidate.nextn
        key = (candidate.engine, candidate.model, nextn, _pool_key(pool))
        found = self._steps.get(key)
        if found is None:
            workload = self.workload
            block = ENGINE[candidate.engine].block_size
            cached = workload.prefix_tokens // block * block
            found = self._steps[key] = Steps(
                candidate.engine,
                candidate.model,
                pool,
                nextn,
                new_tokens=max(1, round(workload.mean_isl) - cached),
                past_tokens=cached,
                ctx_tokens=workload.mean_isl + workload.mean_osl / 2.0,
                physics=self._physics,
            )
        return found

    def _transfer_s(self, candidate: Candidate) -> float:
        """A mean prompt's KV over the network cards of the prefill rank that has most to send."""
        prefill, decode = candidate.pools
        key = (candidate.model, prefill.gpu, prefill.kv, prefill.layout.tp, decode.layout.tp)
        found = self._transfers.get(key)
        if found is None:
            placed = self._steps_of(candidate, prefill).placed
            layout = plan_layout(kv_cache(placed.model, prefill.kv), prefill.layout.tp, decode.layout.tp)
            tokens = round(self.workload.mean_isl)
            found = self._transfers[key] = layout.time_s(tokens, placed.gpu.network_bytes_per_s())
        return found

    def _told(self, candidate: Candidate, load: Load, fit: Fit, point: Point) -> Estimate:
        curve = self.curve(candidate, fit)
        queued = point.users > curve.top.users * self._copies(candidate) * (1.0 + 1e-9)
        steps = tuple(self._steps_of(candidate, pool) for pool in candidate.pools)
        return told(candidate, self.workload, load, fit, point, steps, curve.limit if queued else None)

    @staticmethod
    def _copies(candidate: Candidate) -> int:
        """How many times the curve is there."""
        pool = candidate.pools[0]
        return pool.replicas * pool.layout.dp if candidate.mode == "agg" else 1


def estimate(
    candidate: Candidate, workload: Workload, load: Load, fit: Fit, physics: Physics = SHIPPED
) -> Estimate | None:
    """One estimate; whoever asks for several keeps a `ClosedForm`."""
    return ClosedForm(workload, physics).estimate(candidate, load, fit)


def _pool_key(pool: Pool) -> _Key:
    """A worker of the pool: all of it but how many there are. (Hashing the records themselves takes longer.)"""
    layout = pool.layout
    sizes = (pool.max_num_seqs, pool.max_num_batched_tokens)
    return (pool.role, pool.gpu, layout.tp, layout.pp, layout.dp, layout.ep, pool.weights, pool.kv, *sizes)
