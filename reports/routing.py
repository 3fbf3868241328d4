"""What the router did, as far as every run tells: who got how much, how often there was a choice, what was reached.

Counters come from the router, the count of an endless cache from whoever ran the requests. Single decisions, where
their terms were recorded, are the business of reports/explained.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reports import metrics
from reports.columns import Columns
from reports.record import RunRecord
from reports.report import HitBound, RoutingFigures, RunMeta, ShareFigures, WorkerFigures


def share_figures(workers: Sequence[WorkerFigures]) -> tuple[ShareFigures, ...]:
    """One entry per role with several workers, in order of appearance."""
    told = []
    for role in dict.fromkeys(worker.role for worker in workers):
        peers = [worker for worker in workers if worker.role == role]
        if len(peers) > 1:
            requests = np.array([worker.requests for worker in peers], dtype=np.float64)
            tokens = np.array([worker.input_tokens + worker.output_tokens for worker in peers], dtype=np.float64)
            told.append(
                ShareFigures(
                    role=role,
                    workers=len(peers),
                    requests_fairness=metrics.jain_fairness(requests),
                    requests_share=metrics.share_range(requests),
                    tokens_fairness=metrics.jain_fairness(tokens),
                    tokens_share=metrics.share_range(tokens),
                )
            )
    return tuple(told)


def hit_bound(requests: Columns, meta: RunMeta) -> HitBound | None:
    """The hit rate reached and its upper bound; None where the trace has no hash ids, or nobody counted."""
    size = _block_size(meta)
    if not meta.hash_known or "prompt_blocks" not in meta.ideal or size is None:
        return None
    admitted = ~np.isnan(requests.floats("admit_s"))
    cached, isl = requests.floats("cached_tokens")[admitted], requests.floats("isl")[admitted]
    hits, blocks = meta.ideal["hit_blocks"], meta.ideal["prompt_blocks"]
    return HitBound(
        reached=metrics.block_hit_rate(cached, isl, size),
        upper_bound=metrics.upper_bound_hit_rate(hits, blocks),
        prompt_blocks=blocks,
        ideal_blocks=hits,
    )


def _block_size(meta: RunMeta) -> int | None:
    """Blocks as the router counts them: those of the first worker."""
    return meta.workers[0].block_size if meta.workers else None


def routing_figures(record: RunRecord, meta: RunMeta) -> RoutingFigures | None:
    """None where the router told nothing."""
    counters = prompt_counters(meta.routing)
    if "decisions" not in counters:
        return None
    explained = oracle = None
    if meta.explained:
        from reports.explained import explained_figures, oracle_figures

        explained = explained_figures(record)
        oracle = None if meta.oracle is None else oracle_figures(meta.oracle)
    decisions, lost = counters["decisions"], counters.get("overlap_lost_blocks")
    differing, size = counters.get("overlap_differs"), _block_size(meta)
    return RoutingFigures(
        decisions=decisions,
        effectiveness=None if differing is None else metrics.routing_effectiveness(differing, decisions),
        non_max_overlap=counters.get("non_max_overlap"),
        overlap_lost_blocks=lost,
        overlap_lost_tokens=None if lost is None or size is None else lost * size,
        explained=explained,
        oracle=oracle,
    )


def prompt_counters(counters: Mapping[str, int]) -> Mapping[str, int]:
    """The counters of whoever places prompts: with legs, of the prefill leg."""
    of_leg = {name.removeprefix("prefill_"): n for name, n in counters.items() if name.startswith("prefill_")}
    return of_leg if "decisions" in of_leg else counters
