"""From a mode's name to its policy.

Outside plug-ins are found by the caller and passed in; nothing is imported by name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from policies.cluster.controller import Policy
from policies.errors import CapabilityError, ConfigError
from policies.router.base import Router
from policies.router.direct import Direct
from policies.router.kv import Kv, KvOutput
from policies.router.least_loaded import LeastLoaded
from policies.router.power_of_two import PowerOfTwo
from policies.router.random import Random
from policies.router.round_robin import RoundRobin
from policies.router.settings import RouterSettings

Maker = Callable[[RouterSettings], Policy]


def _kv(settings: RouterSettings) -> Policy:
    return KvOutput(settings) if settings.track_output_blocks else Kv(settings)


def _device_aware(settings: RouterSettings) -> Policy:
    from policies.router.device_aware import DeviceAware

    return DeviceAware(settings)


MODES: Mapping[str, Maker] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "random": Random,
        "least-loaded": LeastLoaded,
        "power-of-two": PowerOfTwo,
        "device-aware-weighted": _device_aware,
        "direct": Direct,
        "kv": _kv,
    }
)


def mode_name(text: str) -> str:
    """The usual spelling of a mode's name: kebab-case, lower case."""
    return text.strip().lower().replace("_", "-")


def build(settings: RouterSettings, plugins: Mapping[str, Maker] = MappingProxyType({})) -> Policy:
    """The routing policy of `settings.mode`, behind a queue where one is asked for. Raises ConfigError for an unknown
    mode, naming the nearest one, and CapabilityError for a plug-in that cannot have a queue.
    """
    name = mode_name(settings.mode)
    maker = MODES.get(name) or plugins.get(name) or plugins.get(settings.mode)
    if maker is not None:
        router = maker(settings)
        if settings.queue is None:
            return router
        if not isinstance(router, Router):
            raise CapabilityError(f"router.mode = {name}: this plug-in cannot have a queue; it must be a Router")
        from policies.router.queued import Queued

        return Queued(router, settings.queue)
    known = [*MODES, *plugins]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"router.mode is {settings.mode!r}, which is not a mode; {hint}")
