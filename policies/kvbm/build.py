"""From names to policies: eviction orders and offload filters.

Outside plug-ins are found by the caller and passed in, by kind and name (`eviction.NAME`, `offload.NAME`); nothing is
imported by name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from policies.cluster.ids import Tier
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from policies.kvbm.eviction.fifo import Fifo
from policies.kvbm.eviction.lineage import Lineage
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.eviction.multi_lru import MultiLru
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.offload import (
    Chained,
    FrequencyFilter,
    MinCount,
    OffloadFilter,
    PassAll,
    Presence,
    Priority,
    TenantQuota,
)
from policies.kvbm.sketch import Sketch


@frozen
class KvSettings:
    """What policies may ask for. `sketch` counts the uses of blocks; one for all that ask, kept by the manager."""

    sketch: Callable[[], Sketch]
    min_lfu_count: int = 8
    decay_s: float = 60.0
    quota_blocks: int | None = None


EvictionMaker = Callable[[KvSettings], EvictionOrder]
OffloadMaker = Callable[[KvSettings], OffloadFilter]


def _presence_lfu(settings: KvSettings) -> OffloadFilter:
    return Chained((Presence(), MinCount(settings.sketch(), settings.min_lfu_count)))


def _tenant_quota(settings: KvSettings) -> OffloadFilter:
    if settings.quota_blocks is None:
        raise ConfigError("offload 'tenant_quota' needs tenant_quota_tokens, what one tenant may have")
    return TenantQuota(settings.quota_blocks)


EVICTIONS: Mapping[str, EvictionMaker] = MappingProxyType(
    {
        "lru": lambda _: Lru(),
        "lineage": lambda _: Lineage(),
        "multi_lru": lambda settings: MultiLru(settings.sketch()),
        "fifo": lambda _: Fifo(),
    }
)
OFFLOADS: Mapping[str, OffloadMaker] = MappingProxyType(
    {
        "pass_all": lambda _: PassAll(),
        "presence": lambda _: Presence(),
        "presence_lfu": _presence_lfu,
        "frequency_filter": lambda settings: FrequencyFilter(decay_s=settings.decay_s),
        "priority": lambda _: Priority(),
        "tenant_quota": _tenant_quota,
    }
)
PRESETS: Mapping[Tier, str] = MappingProxyType(
    {Tier.G2_HOST: "presence", Tier.G3_DISK: "presence_lfu", Tier.G4_REMOTE: "presence_lfu"}
)
"""The filter of the edge into each tier, unless another one is asked for."""
NO_PLUGINS: Mapping[str, Callable[[KvSettings], object]] = MappingProxyType({})


def build_eviction(
    name: str, settings: KvSettings, plugins: Mapping[str, Callable[[KvSettings], object]] = NO_PLUGINS
) -> EvictionOrder:
    """The order of that name. Raises ConfigError for an unknown one, naming the nearest."""
    if name == "belady":
        raise CapabilityError(
            "eviction 'belady' looks into the future: it is a bound that is computed after a run, not an order to run "
            "with; take lru, lineage, multi_lru or fifo"
        )
    outside = {key.removeprefix("eviction."): make for key, make in plugins.items() if key.startswith("eviction.")}
    return _find("eviction", name, EVICTIONS, outside)(settings)  # type: ignore[return-value]


def build_offload(
    name: str, settings: KvSettings, plugins: Mapping[str, Callable[[KvSettings], object]] = NO_PLUGINS
) -> OffloadFilter:
    """The filter of that name; several joined by `+` must all pass a block. Raises ConfigError for an unknown one."""
    outside = {key.removeprefix("offload."): make for key, make in plugins.items() if key.startswith("offload.")}
    filters = [_find("offload", part.strip(), OFFLOADS, outside)(settings) for part in name.split("+")]
    return Chained(filters) if len(filters) > 1 else filters[0]  # type: ignore[arg-type, return-value]


_Made = TypeVar("_Made")


def _find(
    what: str,
    name: str,
    ours: Mapping[str, Callable[[KvSettings], _Made]],
    outside: Mapping[str, Callable[[KvSettings], object]],
) -> Callable[[KvSettings], object]:
    usual = name.lower().replace("-", "_")
    if usual in ours:
        return ours[usual]
    if name in outside:
        return outside[name]
    known = [*ours, *outside]
    near = get_close_matches(usual, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"{what} {name!r} is not known; {hint}")
