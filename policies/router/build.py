"""From a mode's name to its policy.

Outside plug-ins are found by the caller and passed in. A mode is imported when it is built: a run has one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType

from policies.cluster.controller import Policy
from policies.errors import CapabilityError, ConfigError
from policies.router.base import Router
from policies.router.settings import RouterSettings

Maker = Callable[[RouterSettings], Policy]


def _mode(module: str, name: str) -> Maker:
    """The class `name` of `policies.router.<module>`, imported when it is first built."""

    def make(settings: RouterSettings) -> Policy:
        policy: Policy = getattr(import_module(f"policies.router.{module}"), name)(settings)
        return policy

    return make


def _kv(settings: RouterSettings) -> Policy:
    from policies.router.kv import Kv, KvOutput

    if settings.index == "engine":
        from policies.router.kv_engine import KvEngine, KvEngineOutput

        return KvEngineOutput(settings) if settings.track_output_blocks else KvEngine(settings)
    return KvOutput(settings) if settings.track_output_blocks else Kv(settings)


MODES: Mapping[str, Maker] = MappingProxyType(
    {
        "round-robin": _mode("round_robin", "RoundRobin"),
        "random": _mode("random", "Random"),
        "least-loaded": _mode("least_loaded", "LeastLoaded"),
        "power-of-two": _mode("power_of_two", "PowerOfTwo"),
        "device-aware-weighted": _mode("device_aware", "DeviceAware"),
        "direct": _mode("direct", "Direct"),
        "kv": _kv,
        "thunder": _mode("thunder", "Thunder"),
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
            raise CapabilityError(
                f"router.mode = {name} cannot have a queue in front of it, only a mode that is a Router can; leave "
                "router.queue out"
            )
        from policies.router.queued import Queued

        return Queued(router, settings.queue)
    known = [*MODES, *plugins]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"router.mode is {settings.mode!r}, which is not a mode; {hint}")
