"""From a mode's name to its policy, and which settings each mode reads.

Outside plug-ins are found by the caller and passed in; nothing is imported by name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from policies.cluster.controller import Policy
from policies.errors import ConfigError
from policies.router.base import Router
from policies.router.direct import Direct
from policies.router.kv import Kv, KvOutput
from policies.router.least_loaded import LeastLoaded
from policies.router.power_of_two import PowerOfTwo
from policies.router.random import Random
from policies.router.round_robin import RoundRobin
from policies.router.settings import RouterSettings

Maker = Callable[[RouterSettings], Policy]


class Mode(NamedTuple):
    """How a mode is made, and the settings that have an effect in it besides `mode` and `explain`."""

    make: Callable[[RouterSettings], Router]
    reads: frozenset[str]


def _kv(settings: RouterSettings) -> Router:
    return KvOutput(settings) if settings.track_output_blocks else Kv(settings)


_KV_READS = (
    frozenset(RouterSettings.__dataclass_fields__)
    - {"mode", "explain"}
    - {
        "host_cache_hit_weight",  # nothing is known of the lower tiers yet
        "disk_cache_hit_weight",
        "shared_cache_multiplier",
    }
)

MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "round-robin": Mode(RoundRobin, frozenset()),
        "random": Mode(Random, frozenset({"seed"})),
        "least-loaded": Mode(LeastLoaded, frozenset({"seed", "tie_break"})),
        "power-of-two": Mode(PowerOfTwo, frozenset({"seed"})),
        "direct": Mode(Direct, frozenset()),
        "kv": Mode(_kv, _KV_READS),
    }
)


def mode_name(text: str) -> str:
    """The usual spelling of a mode's name: kebab-case, lower case."""
    return text.strip().lower().replace("_", "-")


def build(settings: RouterSettings, plugins: Mapping[str, Maker] = MappingProxyType({})) -> Policy:
    """The routing policy of `settings.mode`. Raises ConfigError for an unknown mode, naming the nearest one."""
    name = mode_name(settings.mode)
    if name in MODES:
        return MODES[name].make(settings)
    if name in plugins:
        return plugins[name](settings)
    known = [*MODES, *plugins]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"router.mode is {settings.mode!r}, which is not a mode; {hint}")
