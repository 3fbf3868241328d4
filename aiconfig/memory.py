"""Whether a pool's model fits its GPUs and how many users its KV has room for, by the twin's own memory model.

Nothing is rounded to a pool that does not exist: what does not fit is a `Rejection` with the two sizes that were
compared.
"""

from __future__ import annotations

from pathlib import Path

from aiconfig.candidate import Candidate, Pool
from aiconfig.engines import ENGINE
from aiconfig.estimate import Load
from aiconfig.legality import step_rejection
from aiconfig.reasons import Rejection
from aiconfig.workload import Workload
from policies.frozen import frozen
from twin.perf.hardware import find_gpu
from twin.perf.memory import GIB, MemoryShortage, Placement, kv_pool
from twin.perf.models import find_model


@frozen
class PoolFit:
    """Room of one worker of a pool. `users` requests of mean length fit at once, on all its ranks together; of a
    prefill worker: prompts."""

    role: str
    kv_tokens: int
    rank_kv_tokens: int
    rank_users: int
    users: int
    weight_gib: float  # on the tightest rank
    kv_gib: float


@frozen
class Fit:
    """Room of a whole deployment, pool by pool."""

    pools: tuple[PoolFit, ...]
    users: int
    """Requests whose KV fits at once where answers are made."""


def placement(model: str, pool: Pool, hardware: Path | None = None) -> Placement:
    """The model on the GPUs of one worker of `pool`."""
    return Placement(
        model=find_model(model),
        gpu=find_gpu(pool.gpu, hardware),
        layout=pool.layout,
        weights=pool.weights,
        kv=pool.kv,
    )


def fit(
    candidate: Candidate, workload: Workload, load: Load | None = None, hardware: Path | None = None
) -> Fit | Rejection:
    """Room of every pool, or the first reason why one has too little.

    With `load` in users, a deployment whose KV cannot hold them all is refused as well: it would preempt or queue.
    """
    found = []
    for pool in candidate.pools:
        room = pool_fit(candidate.name, candidate.engine, candidate.model, pool, workload, hardware)
        if isinstance(room, Rejection):
            return room
        found.append(room)
    return deployment_fit(candidate, tuple(found), workload, load)


def host_rejection(candidate: Candidate, hardware: Path | None = None) -> Rejection | None:
    """The KV tier of a worker against its GPUs' share of the memory of hosts, where the hardware table knows it."""
    needs = candidate.serving.host_kv_bytes
    for pool in candidate.pools if needs else ():
        share = find_gpu(pool.gpu, hardware).host_bytes
        if pool.role == "decode" or share is None or needs <= share * pool.worker_gpus:
            continue
        return Rejection(
            name=candidate.name,
            reason="host_memory",
            needs=needs / GIB,
            has=share * pool.worker_gpus / GIB,
            unit="GiB",
            detail=f"of one {pool.role} worker, {pool.worker_gpus} x {pool.gpu}",
        )
    return None


def deployment_fit(
    candidate: Candidate, pools: tuple[PoolFit, ...], workload: Workload, load: Load | None
) -> Fit | Rejection:
    """The same, out of what is known of its pools."""
    users = pools[-1].users * candidate.pools[-1].replicas
    if load is not None and load.users is not None and load.users > users:
        has = pools[-1].kv_tokens * candidate.pools[-1].replicas
        return Rejection(
            name=candidate.name,
            reason="kv_too_small",
            needs=load.users * _user_tokens(candidate.pools[-1].role, workload),
            has=has,
            unit="tokens",
            detail=f"KV full at {users} users, {load.users} asked for",
        )
    return Fit(pools=pools, users=users)


def pool_fit(
    name: str, engine: str, model: str, pool: Pool, workload: Workload, hardware: Path | None = None
) -> PoolFit | Rejection:
    """Room of one worker of `pool`, in its memory and in a step; `name` is that of the candidate that a rejection is
    about."""
    facts = ENGINE[engine]
    small = step_rejection(name, engine, pool, workload.longest_prompt)
    if small is not None:
        return small
    try:
        room = kv_pool(
            placement(model, pool, hardware),
            engine=engine,
            block_size=facts.block_size,
            max_num_seqs=pool.max_num_seqs,
            gpu_memory_utilization=facts.memory_share,
        )
    except MemoryShortage as error:
        return _shortage(name, error)
    dp = pool.layout.dp
    rank_tokens = room.tokens // dp
    longest = workload.longest_prompt if pool.role == "prefill" else workload.longest
    if longest > rank_tokens:
        return Rejection(name=name, reason="context_too_long", needs=longest, has=rank_tokens, unit="tokens")
    rank_users = _users(rank_tokens, pool.role, workload, facts.block_size)
    return PoolFit(
        role=pool.role,
        kv_tokens=room.tokens,
        rank_kv_tokens=rank_tokens,
        rank_users=rank_users,
        users=rank_users * dp,
        weight_gib=room.weight_bytes / GIB,
        kv_gib=room.room_bytes / GIB,
    )


def _shortage(name: str, error: MemoryShortage) -> Rejection:
    has = error.has_bytes / GIB
    if error.weight_bytes > error.has_bytes:
        return Rejection(
            name=name,
            reason="weights_do_not_fit",
            needs=error.weight_bytes / GIB,
            has=has,
            unit="GiB",
            detail=str(error),
        )
    needs = (error.weight_bytes + error.block_bytes) / GIB
    return Rejection(name=name, reason="kv_too_small", needs=needs, has=has, unit="GiB", detail=str(error))


def _user_tokens(role: str, workload: Workload) -> float:
    """KV tokens that a request of mean length holds in the end."""
    return workload.mean_isl if role == "prefill" else workload.mean_isl + workload.mean_osl


def _users(rank_tokens: int, role: str, workload: Workload, block_size: int) -> int:
    """Requests at once on one rank, in whole blocks; blocks of a common prefix are there once. At least one."""
    shared = workload.prefix_tokens // block_size
    each = -(-int(_user_tokens(role, workload)) // block_size) - shared
    return max(1, (rank_tokens // block_size - shared) // max(1, each))
