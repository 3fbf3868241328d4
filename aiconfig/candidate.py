"""What a search chooses among: deployments, as plain values with one name each.

A `Candidate` says which engine serves the model, in which roles, on which GPUs, how each worker is split and how many
there are. It holds no measured or predicted figure, and two equal ones have the same name.
"""

from __future__ import annotations

from aiconfig.serving import USUAL_SERVING, Serving
from policies.frozen import frozen
from twin.perf.layout import Layout

ENGINES = ("vllm", "sglang", "trtllm")
MODES = ("agg", "disagg")
ROLES = {"agg": ("mixed",), "disagg": ("prefill", "decode")}
"""Roles of the pools of each mode, in order."""


@frozen
class Pool:
    """Equal workers of one role: `replicas` of them, each with `layout` on GPUs of one kind.

    `weights` and `kv` are number formats (docs/latency-models.md). `max_num_seqs` and `max_num_batched_tokens` are
    those of a worker's rank.
    """

    role: str
    gpu: str
    layout: Layout
    replicas: int
    weights: str
    kv: str
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def worker_gpus(self) -> int:
        """GPUs of one worker."""
        return self.layout.ranks * self.layout.pp

    @property
    def gpus(self) -> int:
        """GPUs of all workers of the pool."""
        return self.worker_gpus * self.replicas

    @property
    def label(self) -> str:
        """For people and for names: 2xTP4 or 1xTP2/DP4/EP8."""
        return f"{self.replicas}x{self.layout.label().replace(' ', '/')}"


@frozen
class Candidate:
    """One deployment of `model` (a key, or the path of a config.json): one pool if `mode` is "agg", a pool for prefill
    and one for decode if it is "disagg". `nextn` draft tokens are verified by a decode step (0: none). `serving` is how
    requests and KV go about its workers."""

    model: str
    engine: str
    pools: tuple[Pool, ...]
    nextn: int = 0
    serving: Serving = USUAL_SERVING

    @property
    def mode(self) -> str:
        """ "agg" or "disagg". (A pool of one of two roles alone stands for what is said of its workers.)"""
        return "agg" if self.pools[0].role == "mixed" else "disagg"

    @property
    def has_choice(self) -> bool:
        """Whether a router has workers to choose among."""
        return any(pool.replicas > 1 for pool in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs that are used."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def name(self) -> str:
        """Unique within a search: engine, mode, pools, what differs from one pool to the next, and how it is served
        if that is not the usual way."""
        pools = "+".join(
            f"{pool.role[0].upper() if self.mode == 'disagg' else ''}{_pool_name(pool)}" for pool in self.pools
        )
        drafts = f"-mtp{self.nextn}" if self.nextn else ""
        return f"{self.engine}-{self.mode}-{pools}{drafts}{self.serving.suffix}"

    @property
    def simplicity(self) -> tuple[int, int, int, int, int, str]:
        """Orders equally good candidates: fewer GPUs, then less pp, dp and tp, then served more plainly, then the
        name."""
        layouts = [pool.layout for pool in self.pools]
        return (
            self.gpus,
            max(layout.pp for layout in layouts),
            max(layout.dp for layout in layouts),
            max(layout.tp for layout in layouts),
            len(self.serving.parts),
            self.name,
        )


def _pool_name(pool: Pool) -> str:
    sizes = f"b{pool.max_num_seqs}-t{pool.max_num_batched_tokens}"
    return f"{pool.label.lower()}-{pool.gpu}-{pool.weights}-kv{pool.kv}-{sizes}"
