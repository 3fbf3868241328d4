"""How a deployment is served beside its engines: who routes requests to workers, and where KV goes below a device.

The closed form cannot tell one way of serving from another, so the space has none of them. A search simulates each
finalist under every one that is asked for (`aiconfig.variants`): `--router` and `--host-kv`, `--disk-kv` multiply the
finalists. A `Serving` is part of a candidate, its name and its best.toml.
"""

from __future__ import annotations

import re
from typing import Final

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.config import KvbmConfig, PathConfig, RouterConfig
from twin.config_schema import keys_of
from twin.config_values import Given, checked, toml_value
from twin.perf.names import pick

USUAL_ROUTER: Final = RouterConfig().mode
ROUTERS: Final = ("round-robin", "random", "least-loaded", "power-of-two", "kv", "thunder")
"""Modes that a search tries."""
NOT_SEARCHED: Final = {
    "direct": "it sends requests where they say themselves",
    "device-aware-weighted": "it is for workers without GPUs, and no candidate has such",
}
HOST_LINK: Final = "pcie"
GB: Final = 10**9
UNITS: Final = {"tib": 2**40, "tb": 10**12, "gib": 2**30, "gb": GB, "mib": 2**20, "mb": 10**6, "b": 1}
"""Bytes of each unit of a size, larger ones first; names and texts take the first that divides it."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


@frozen
class Serving:
    """One way to serve. `router` is a mode with the keys of `[router]` that differ from their defaults, as in
    kv:router_temperature=0.5 (`router_choice` makes it of what people write). `host_kv_bytes` and `disk_kv_bytes` are
    host memory and disk for KV of each worker that computes prompts; 0: none."""

    router: str = USUAL_ROUTER
    host_kv_bytes: int = 0
    disk_kv_bytes: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What differs from the usual, in a few words each."""
        found = [] if self.router == USUAL_ROUTER else [f"{self.router} router"]
        found += [f"{size_text(self.host_kv_bytes)} host KV"] if self.host_kv_bytes else []
        found += [f"{size_text(self.disk_kv_bytes)} disk KV"] if self.disk_kv_bytes else []
        return tuple(found)

    @property
    def text(self) -> str:
        """For people."""
        return ", ".join(self.parts) or f"{USUAL_ROUTER} router, no KV tiers"

    @property
    def suffix(self) -> str:
        """What it adds to the name of a candidate; nothing if it is the usual one."""
        parts = [f"-via_{self.router}"] if self.router != USUAL_ROUTER else []
        for tier, size in (("host", self.host_kv_bytes), ("disk", self.disk_kv_bytes)):
            parts += [f"-{tier}_{size_text(size).replace(' ', '').lower()}"] if size else []
        return "".join(parts)

    @property
    def mode(self) -> str:
        """The router's mode alone."""
        return self.router.partition(":")[0]

    def router_config(self) -> RouterConfig:
        """The `[router]` table."""
        return _router_config(self.router, "router")

    def kvbm_config(self, role: str) -> KvbmConfig:
        """The `[workers.kvbm]` table of workers in that role. Workers that only decode have no tiers: what comes to
        them by hand-off comes from no tier of theirs."""
        if role == "decode":
            return KvbmConfig()
        host, disk = self.host_kv_bytes, self.disk_kv_bytes
        return KvbmConfig(cpu_cache_gb=host / GB if host else None, disk_cache_gb=disk / GB if disk else None)

    def paths(self, role: str) -> PathConfig:
        """The `[workers.links]` table: KV goes to and from tiers over the host link of each GPU."""
        return PathConfig(host=HOST_LINK) if self.kvbm_config(role).has_tiers else PathConfig()


USUAL_SERVING: Final = Serving()


def serving_of(router: RouterConfig, kvbm: KvbmConfig) -> Serving:
    """The way to serve that these tables say; what a `Serving` cannot say of them is left out."""
    options = [f"{name}={value}" for name, value in _changed(router)]
    return Serving(
        router=":".join((router.mode, *options)),
        host_kv_bytes=round((kvbm.cpu_cache_gb or 0.0) * GB),
        disk_kv_bytes=round((kvbm.disk_cache_gb or 0.0) * GB),
    )


# ---------------------------------------------------------------- what people write


def router_choice(text: str, where: str = "--router") -> str:
    """MODE or MODE:KEY=VALUE:..., with dashes or underscores, as `Serving.router`. Raises ConfigError."""
    return serving_of(_router_config(text, where), KvbmConfig()).router


def _router_config(text: str, where: str) -> RouterConfig:
    mode, *options = text.split(":")
    kebab = mode.strip().lower().replace("_", "-")
    if kebab in NOT_SEARCHED:
        raise ConfigError(f"{where} {text}: {kebab} is not searched, {NOT_SEARCHED[kebab]}; take one of {_modes()}")
    pick("router", kebab, dict.fromkeys(ROUTERS))
    known = {entry.name: entry for entry in keys_of(RouterConfig) if entry.name != "mode" and entry.kind in _KINDS}
    found: dict[str, object] = {}
    for option in options:
        name, equals, value = option.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name in found:
            raise ConfigError(f"{where} {text}: write MODE:KEY=VALUE, each key once, as in kv:router_temperature=0.5")
        pick("key of [router]", name, known)
        entry = known[name]
        found[name] = checked(
            Given(value.strip(), where, text=True), f"router.{name}", entry.kind, entry.default, entry.limits
        )
    return RouterConfig(mode=kebab, **found)  # type: ignore[arg-type]  # each is of its key's kind


_KINDS: Final = ("int", "float", "bool", "str")


def _changed(router: RouterConfig) -> list[tuple[str, str]]:
    """Keys of `[router]` beside the mode that a text can say and that are not at their defaults."""
    keys = (entry for entry in keys_of(RouterConfig) if entry.name != "mode" and entry.kind in _KINDS)
    values = ((entry, getattr(router, entry.name)) for entry in keys)
    return [
        (entry.name, value if isinstance(value, str) else toml_value(value))
        for entry, value in values
        if value != entry.default
    ]


def _modes() -> str:
    return ", ".join(ROUTERS)


def size_bytes(text: str, where: str) -> int:
    """Bytes of a size such as 64GiB, 1.5 TB or 0. Raises ConfigError."""
    plain = text.strip().lower()
    if plain in ("0", "off", "none"):
        return 0
    found = _SIZE.fullmatch(plain)
    unit = UNITS.get(found[2]) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{where} {text}: write a size like 64GiB, 500GB or 1TB of each worker, or 0 for none")
    size = round(float(found[1]) * unit)
    if size < UNITS["mb"]:
        raise ConfigError(f"{where} {text}: must be 1MB or more, or 0 for none")
    return size


def size_text(size: int) -> str:
    """A size in the largest unit that divides it: 64 GiB."""
    name = next(name for name, unit in UNITS.items() if size % unit == 0) if size else "b"
    return f"{size // UNITS[name]} {name[:-1].upper().replace('I', 'i')}B"
