"""Which links each group of workers uses, and what for: read off the configuration before anything is built.

A path that a group names counts only where something moves over it; where nothing does, this says why. Nothing here
knows what a link carries or runs anything.
"""

from __future__ import annotations

from policies.errors import ConfigError
from twin.config import LINK_KINDS, STORES, Config, WorkerGroup
from twin.perf.cargo import CARGOES, HOST, STORE, WEIGHTS


def path_of(group: WorkerGroup, use: str) -> tuple[str, ...]:
    """The links that a group names for one use, from the GPU outwards; none where it names none."""
    text: str | None = getattr(group.links, use)
    return () if text is None else tuple(text.split("+"))


def why_idle(config: Config, group: WorkerGroup, use: str) -> str | None:
    """Why nothing of this kind moves over links in the run; None where it does, or would if the group named any."""
    if use == HOST:
        if group.engine.kind == "sglang" and not group.kvbm.has_tiers:
            return "sglang loads within the step that needs the blocks, at engine.host_load_gb_per_s"
        if group.engine.host_blocks is None and not group.kvbm.has_tiers:
            return "there is no host tier: neither host_blocks nor a tier of kvbm is set"
        return None
    if use == STORE:
        kvbm = group.kvbm
        shares = kvbm.remote or (kvbm.has_disk and kvbm.disk_shared) or (kvbm.has_cpu and kvbm.peers)
        return None if shares else "no tier of kvbm is shared by all workers: neither remote nor disk_shared is set"
    if use == WEIGHTS:
        return _why_no_weights(config, group)
    if not config.is_disaggregated:
        return "nothing in this run moves KV between workers"
    if config.disaggregation.bandwidth_gb_per_s is not None:
        return "disaggregation.bandwidth_gb_per_s gives every transfer a link of its own"
    if config.compat != "none":
        return f"compat {config.compat} gives every transfer a link of its own"
    return None


def _why_no_weights(config: Config, group: WorkerGroup) -> str | None:
    if config.faults.path is None and not config.planner.is_on:
        return "nothing in this run adds workers, or brings any back"
    if group.startup_s is not None:
        return "startup_s says how long the whole start takes"
    if group.startup.weights_from is None:
        return "startup.weights_from is not given"
    return None


def used_paths(config: Config, group: WorkerGroup) -> dict[str, tuple[str, ...]]:
    """The paths of a group that something moves over in this run, by use."""
    paths = {use: path_of(group, use) for use in CARGOES if why_idle(config, group, use) is None}
    return {use: path for use, path in paths.items() if path}


def uses_links(config: Config) -> bool:
    """Whether anything moves over links that transfers share."""
    return any(used_paths(config, group) for group in config.workers)


def check_path(config: Config, group: WorkerGroup, use: str, where: str) -> None:
    """A path crosses each of its links once, and weights come from where `weights_from` says. `where` names the key."""
    path = path_of(group, use)
    twice = next((name for name in path if path.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {twice} is there {path.count(twice)} times; a path crosses a link once")
    source = group.startup.weights_from
    if use != WEIGHTS or not path or source is None:
        return
    kinds = {link.name: link.kind for link in config.links}
    stores = [name for name in path if kinds.get(name, name) in STORES]
    if source == "peer" and stores:
        raise ConfigError(
            f"{where}: weights come from a peer, and {stores[0]} is a store; leave it out, or set "
            f"workers.{group.name}.startup.weights_from to disk or object"
        )
    if source != "peer" and not stores:
        known = ", ".join(name for name, kind in LINK_KINDS.items() if kind.kind in STORES)
        raise ConfigError(
            f"{where}: weights come from {source}, and no link of the path is a store; add one ({known}, or a link of "
            f"kind {' or '.join(STORES)}), or set workers.{group.name}.startup.weights_from to peer"
        )
