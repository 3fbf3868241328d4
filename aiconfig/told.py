"""A point of a curve as an estimate: the same figures, with what binds, what is held, and what to bear in mind."""

from __future__ import annotations

from collections.abc import Mapping

from aiconfig.bands import calibrated_band
from aiconfig.bound import binding
from aiconfig.candidate import Candidate
from aiconfig.curve import Point
from aiconfig.estimate import CLOSED_FORM, Estimate, Load
from aiconfig.formats import has_rate
from aiconfig.memory import Fit, PoolFit
from aiconfig.steps import Steps
from aiconfig.workload import Workload


def told(
    candidate: Candidate,
    workload: Workload,
    load: Load,
    fit: Fit,
    point: Point,
    steps: tuple[Steps, ...],
    queued_by: str | None,
) -> Estimate:
    """`point` is of the whole deployment, `steps` are those of each of its pools; `queued_by` is what is full if
    requests wait for others to end."""
    last = candidate.pools[-1]
    decoding = point.rps * point.tpot_s * point.gaps / (last.replicas * last.layout.dp)
    bound = queued_by or binding(steps[-1], decoding, candidate.mode == "agg", point.gaps)
    return Estimate(
        candidate=candidate,
        load=load,
        level=CLOSED_FORM,
        stats=_means(point),
        requests_per_s=point.rps,
        output_tokens_per_s=point.rps * workload.mean_osl,
        kv_share=_kv_share(fit.pools[-1], workload, decoding),
        bound=bound,
        bands={
            "ttft": calibrated_band(steps[0].provenance, "ttft", workload.mean_isl),
            "tpot": calibrated_band(steps[-1].provenance, "tpot", workload.mean_isl),
        },
        unmeasured=_unmeasured(candidate, steps),
        beyond_load=_beyond_load(workload, steps, decoding),
        notes=_notes(candidate, workload, steps),
    )


def _means(point: Point) -> Mapping[str, Mapping[str, float | None]]:
    tpot_s = point.tpot_s if point.gaps > 0.0 else None
    return {
        "ttft": {"mean": point.ttft_s},
        "tpot": {"mean": tpot_s},
        "itl": {"mean": tpot_s},
        "e2e": {"mean": point.e2e_s},
        "tps_user": {"mean": 1.0 / tpot_s if tpot_s else None},
    }


def _kv_share(room: PoolFit, workload: Workload, decoding: float) -> float:
    held = decoding * (workload.mean_isl + workload.mean_osl / 2.0)
    return min(1.0, held / room.rank_kv_tokens)


def _unmeasured(candidate: Candidate, steps: tuple[Steps, ...]) -> tuple[str, ...]:
    """What of the deployment was never measured, whatever its load."""
    found = [text for one in steps for text in one.provenance.beyond]
    if candidate.mode == "disagg":
        found.append("prefill and decode apart: workers that do everything were measured")
    if candidate.nextn:
        found.append("draft tokens: none were measured")
    return tuple(dict.fromkeys(found))


def _beyond_load(workload: Workload, steps: tuple[Steps, ...], decoding: float) -> tuple[str, ...]:
    """What of the requests, and of how many are on a rank of the last pool, was never measured."""
    found: list[str] = []
    for one in steps:
        if one.provenance.reach is not None:
            found += one.provenance.reach.beyond_load(
                batch=round(decoding) * one.placed.layout.dp if one is steps[-1] else 0,
                prompt_tokens=workload.longest_prompt,
                context_tokens=round(workload.mean_isl + workload.mean_osl),
            )
    return tuple(dict.fromkeys(found))


def _notes(candidate: Candidate, workload: Workload, steps: tuple[Steps, ...]) -> tuple[str, ...]:
    notes = [
        f"{pool.gpu} does not multiply {pool.weights}: weights are small, products are in BF16"
        for pool, one in zip(candidate.pools, steps, strict=True)
        if not has_rate(one.placed.gpu, pool.weights)
    ]
    if workload.prefix_tokens:
        notes.append("the common prefix is taken to be cached on every worker")
    return tuple(dict.fromkeys(notes))
