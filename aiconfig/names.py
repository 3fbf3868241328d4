"""A candidate from its name: `Candidate.name` backwards, so that what a table prints can be asked for again.

A name says everything but the model.
"""

from __future__ import annotations

import re

from aiconfig.candidate import ENGINES, MODES, ROLES, Candidate, Pool
from aiconfig.serving import USUAL_ROUTER, Serving, router_choice, size_bytes
from policies.errors import ConfigError
from twin.perf.layout import Layout
from twin.perf.names import nearest

_WHOLE = re.compile(
    rf"(?P<engine>{'|'.join(ENGINES)})-(?P<mode>{'|'.join(MODES)})-(?P<pools>.+?)(?:-mtp(?P<nextn>\d+))?"
    r"(?:-via_(?P<router>.+?))?(?:-host_(?P<host>\w+))?(?:-disk_(?P<disk>\w+))?"
)
_POOL = re.compile(
    r"(?P<replicas>\d+)x(?P<layout>tp\d+(?:/(?:pp|dp|ep)\d+)*)-(?P<gpu>.+)-(?P<weights>[a-z0-9]+)-kv(?P<kv>[a-z0-9_]+)"
    r"-b(?P<seqs>\d+)-t(?P<tokens>\d+)"
)


def candidate_of(name: str, model: str) -> Candidate:
    """The deployment of `model` that has this name. Raises ConfigError for what is no name of any."""
    found = _WHOLE.fullmatch(name)
    pools = found and _pools(found["mode"], found["pools"])
    if found and pools is not None:
        candidate = Candidate(
            model=model, engine=found["engine"], pools=pools, nextn=int(found["nextn"] or 0), serving=_serving(found)
        )
        if candidate.name == name:
            return candidate
    raise ConfigError(
        f"candidate {name!r}: not a name as a search prints it, such as vllm-agg-2xtp4-h100_sxm-bf16-kvbf16-b256-t8192"
    )


def nearest_of(name: str, known: list[str]) -> str:
    """A hint at the known name that is meant, or nothing."""
    guess = nearest(name, known)
    return f"; did you mean {guess}?" if guess else ""


def _serving(found: re.Match[str]) -> Serving:
    where = f"candidate {found.string!r}:"
    return Serving(
        router=router_choice(found["router"], where) if found["router"] else USUAL_ROUTER,
        host_kv_bytes=size_bytes(found["host"] or "0", where),
        disk_kv_bytes=size_bytes(found["disk"] or "0", where),
    )


def _pools(mode: str, text: str) -> tuple[Pool, ...] | None:
    roles = ROLES[mode]
    if mode == "agg":
        pools = [_pool(roles[0], text)]
    else:
        first, plus, second = text.rpartition("+D")
        if not plus or not first.startswith("P"):
            return None
        pools = [_pool(roles[0], first[1:]), _pool(roles[1], second)]
    return None if None in pools else tuple(pool for pool in pools if pool is not None)


def _pool(role: str, text: str) -> Pool | None:
    found = _POOL.fullmatch(text)
    if found is None:
        return None
    sizes = {word[:2]: int(word[2:]) for word in found["layout"].split("/")}
    try:
        return Pool(
            role=role,
            gpu=found["gpu"],
            layout=Layout(**sizes),
            replicas=int(found["replicas"]),
            weights=found["weights"],
            kv=found["kv"],
            max_num_seqs=int(found["seqs"]),
            max_num_batched_tokens=int(found["tokens"]),
        )
    except ValueError:
        return None
