"""What the tiers of a run did, as plain values for its report. It adds up and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from policies.kvbm.accounting import HitCount
from policies.kvbm.level import TierBody
from policies.kvbm.manager import BlockManager
from policies.kvbm.spread import Spread
from twin.engine.layerwise import Overlap


def figures(
    hits: Sequence[HitCount], managers: Sequence[BlockManager], overlaps: Sequence[Overlap] = ()
) -> dict[str, Any]:
    """Sums over workers, as plain values; `overlaps` are of those that compute layer by layer."""
    found: dict[str, int] = {"lookups": 0}
    for each in hits:
        found["lookups"] += each.lookups
        for tier, blocks in each.hits.items():
            found[tier.value] = found.get(tier.value, 0) + blocks
        for why, blocks in each.misses.items():
            found[f"miss_{why.value}"] = found.get(f"miss_{why.value}", 0) + blocks
        for name in ("prompt_tokens", "cached_tokens", "reused_tokens", "recomputed_tokens"):
            found[name] = found.get(name, 0) + getattr(each, name)
    edges: dict[str, dict[str, int]] = {}
    for manager in managers:
        for level in manager.levels:
            edge = edges.setdefault(level.body.tier.value, {})
            done = asdict(level.counts)
            size = level.body.spec.block_bytes
            done |= {"stored_bytes": level.counts.stored * size, "loaded_bytes": level.counts.loaded * size}
            for name, count in done.items():
                edge[name] = edge.get(name, 0) + count
    spreads = {
        name: _spread([getattr(manager, name) for manager in managers])
        for name in ("age_at_hit", "age_at_evict", "reuse_at_evict")
    }
    more: dict[str, Any] = {}
    shares = dict.fromkeys(level.body for manager in managers for level in manager.levels if level.body.shares)
    if shares:
        more["tenants"] = _tenants(shares)
    views = dict.fromkeys(manager.peers for manager in managers if manager.peers is not None)  # ranks share one
    if views:
        loaded_bytes = sum(view.loaded * view.spec.block_bytes for view in views)
        counts = {name: sum(getattr(view, name) for view in views) for name in ("loaded", "failed_reads")}
        more["peers"] = counts | {"loaded_bytes": loaded_bytes}
    if overlaps:
        more["layers"] = {
            "loads": sum(overlap.loads for overlap in overlaps),
            "overlap_s": round(sum(overlap.saved_s for overlap in overlaps), 9),
        }
    asking = dict.fromkeys(view for manager in managers if (view := manager.outside.registry) is not None)
    if asking:
        more["registry"] = {name: sum(getattr(view, name) for view in asking) for name in ("asked", "late")}
    climbs = dict.fromkeys(manager.climb for manager in managers if manager.climb is not None)
    if climbs:
        more["prefetch"] = {
            name: sum(getattr(climb, f"{name}_blocks") for climb in climbs) for name in ("fetched", "used", "wasted")
        }
    return {"hits": found, "edges": edges, "spreads": spreads} | more


def _tenants(bodies: Iterable[TierBody]) -> dict[str, dict[str, int]]:
    """Blocks of each tenant at the end, by tier."""
    found: dict[str, dict[str, int]] = {}
    for body in bodies:
        tier = found.setdefault(body.tier.value, {})
        for tenant, blocks in body.shares.all().items() if body.shares is not None else ():
            tier[tenant] = tier.get(tenant, 0) + blocks
    return found


def _spread(parts: Sequence[Spread]) -> dict[str, Any]:
    blocks = sum(part.blocks for part in parts)
    total = sum(part.total for part in parts)
    counts = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    return {"blocks": blocks, "mean": total / blocks if blocks else None, "counts": counts}
