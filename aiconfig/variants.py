"""The ways to serve one finalist that are worth a simulation; for each of the others why it is not.

A setting that cannot change anything (a router with one worker to choose, a tier that nothing is read from) is left out
and says so. Where that leaves nothing of an axis, its first value stays: somebody has to be simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from aiconfig.candidate import Candidate
from aiconfig.demand import LEAST_PREFIX
from aiconfig.deployment import to_config
from aiconfig.estimate import Load
from aiconfig.memory import host_rejection
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.serving import USUAL_ROUTER, Serving, size_text
from aiconfig.workload import Workload
from policies.frozen import frozen
from twin.config_effect import without_effect

T = TypeVar("T", str, int)
_NO_ROWS: Final = Path("workload.parquet")


@frozen
class Variants:
    """Candidates to simulate, in the order of the request's servings; rejections of the others."""

    played: tuple[Candidate, ...]
    left_out: tuple[Rejection, ...]


def variants(request: SearchRequest, plain: Candidate, load: Load) -> Variants:
    """One finalist under each way to serve that the request asks for and that can have an effect on it."""
    workload = request.workload
    routers = _reasons(request.routers, lambda router: idle_router(router, plain, workload))
    hosts = _reasons(request.host_kv, lambda size: idle_tier(size, workload))
    disks = _reasons(request.disk_kv, lambda size: idle_tier(size, workload))
    played: list[Candidate] = []
    left_out: list[Rejection] = []
    for serving in request.servings:
        one = replace(plain, serving=serving)
        idle = routers[serving.router] or hosts[serving.host_kv_bytes] or disks[serving.disk_kv_bytes]
        idle = idle or idle_keys(one, workload, load)
        too_large = host_rejection(one, request.hardware)
        if idle is not None:
            left_out.append(Rejection(name=one.name, reason="no_effect", detail=idle))
        elif too_large is not None:
            left_out.append(too_large)
        else:
            played.append(one)
    if not played and all(one.reason == "no_effect" for one in left_out):
        played.append(replace(plain, serving=request.servings[0]))  # the twin refuses it, and says why
    return Variants(played=tuple(played), left_out=tuple(left_out))


def idle_servings(request: SearchRequest) -> Iterator[str]:
    """A line for each value of an axis that can have no effect on this workload, whatever the candidate."""
    workload = request.workload
    for router in request.routers:
        if (why := _idle_prefixes(router, workload)) is not None:
            yield f"{router} router: {why}"
    for what, sizes in (("host", request.host_kv), ("disk", request.disk_kv)):
        for size in sizes:
            if (why := idle_tier(size, workload)) is not None:
                yield f"{size_text(size)} {what} KV: {why}"


def idle_router(router: str, candidate: Candidate, workload: Workload) -> str | None:
    """Why a router can change nothing that another one would not; None if it can."""
    if router == USUAL_ROUTER:
        return None
    if not candidate.has_choice:
        each = "" if candidate.mode == "agg" else " of each role"
        return f"there is one worker{each} to choose"
    return _idle_prefixes(router, workload)


def _idle_prefixes(router: str, workload: Workload) -> str | None:
    if Serving(router=router).mode != "kv" or shares_prefixes(workload):
        return None
    return "no two prompts share a prefix, so it could only balance load, as least-loaded does"


def idle_tier(size: int, workload: Workload) -> str | None:
    """Why a KV tier of that size would hold nothing that is asked for again; None if it may, or there is none."""
    if not size:
        return None
    if not shares_prefixes(workload):
        return "no two prompts share a prefix, so nothing that went down is asked for again"
    if workload.trace is None:
        return "all prompts share one prefix, which never leaves the devices"
    return None


def idle_keys(candidate: Candidate, workload: Workload, load: Load) -> str | None:
    """The first key that so serving it sets in vain, as the twin says it."""
    config = to_config(candidate, workload, load, workload.trace or _NO_ROWS)
    found = (f"{key}: {why}" for key, why in without_effect(config) if key.startswith("router.") or ".kvbm." in key)
    return next(found, None)


def shares_prefixes(workload: Workload) -> bool:
    """Whether any prompt begins as an earlier one did, for long enough to be cached."""
    return workload.prefix_tokens >= (1 if workload.trace is not None else LEAST_PREFIX)


def _reasons(values: Sequence[T], idle: Callable[[T], str | None]) -> dict[T, str | None]:
    """Why each value of an axis has no effect; if none has any, the first is taken all the same."""
    found = {value: idle(value) for value in values}
    if None not in found.values():
        found[values[0]] = None
    return found
