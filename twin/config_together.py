"""What no single value of a configuration can tell: names that meet, lists that have a form, values that go together.

Every refusal is one line: where, which key, the value, what to do.
"""

from __future__ import annotations

import re
from itertools import product

from policies.errors import ConfigError
from twin.config import LINK_KINDS, Config, WorkerGroup
from twin.config_lists import accept_rates, graph_sizes, name_pairs, taint_weights
from twin.config_schema import keys_of
from twin.config_values import nearest, toml_value
from twin.link_use import check_path, path_of
from twin.perf.cargo import CARGOES


def check_together(config: Config) -> None:
    """Raises ConfigError."""
    origins, trace = config.origins, config.trace
    taken = {entry.name for entry in keys_of(WorkerGroup)} | {"engine", "latency", "startup", "kvbm", "links"}
    names = [group.name for group in config.workers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} groups of workers are named {name}; give each its own: name = ...")
        if name in taken or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ConfigError(
                f"{origins[f'workers.{name}.name']}: workers.name = {toml_value(name)}: "
                "must be letters, digits, - and _, and not the name of a key"
            )
    _check_links(config)
    _check_blocks(config)
    _check_loras(config)
    _check_router(config)
    _check_live(config)
    if trace.arrivals == "closed" and trace.concurrency is None:
        raise ConfigError(f"{origins['trace.arrivals']}: trace.arrivals = closed needs --concurrency N")
    if trace.rate_rps is not None and trace.speedup != 1 and trace.arrivals != "closed":
        raise ConfigError(
            f"{origins['trace.rate_rps']}: trace.rate_rps = {trace.rate_rps} and trace.speedup = {trace.speedup} "
            "both set the rate of arrivals; give one of them"
        )
    if trace.start_s is not None and trace.end_s is not None and trace.end_s <= trace.start_s:
        raise ConfigError(
            f"{origins['trace.end_s']}: trace.end_s = {trace.end_s}: must be more than trace.start_s, {trace.start_s}"
        )
    for group in config.workers:
        for name, check in (("accept_rates", accept_rates), ("cuda_graph_sizes", graph_sizes)):
            text = getattr(group.engine, name)
            if text is not None:
                key = f"workers.{group.name}.engine.{name}"
                check(text, f"{origins[key]}: {key}")
    roles = {group.role for group in config.workers}
    if (len(roles) > 1 and "mixed" in roles) or roles in ({"prefill"}, {"decode"}):
        raise ConfigError(
            f"the groups of workers have the roles {', '.join(sorted(roles))}: either all are mixed, or some are "
            "prefill and some decode"
        )
    if config.sla is not None:
        from reports.sla import parse_sla

        parse_sla(config.sla)


def _check_links(config: Config) -> None:
    """Links have names of their own, and groups name links that there are."""
    names = [link.name for link in config.links]
    for name in names:
        where = config.origins[f"links.{name}.name"]
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {names.count(name)} links are named {name}; give each its own: name = ...")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ConfigError(f"{where}: links.name = {toml_value(name)}: must be letters, digits, - and _")
    known = {*names, *LINK_KINDS}
    for group, use in product(config.workers, CARGOES):
        path = path_of(group, use)
        key = f"workers.{group.name}.links.{use}"
        where = f"{config.origins.get(key, 'default')}: {key} = {toml_value('+'.join(path))}"
        for name in path:
            if name not in known:
                raise ConfigError(
                    f"{where}: there is no link {toml_value(name)}{nearest(name, sorted(known))}; "
                    f"there are {', '.join(sorted(known))}"
                )
        check_path(config, group, use, where)


def _check_blocks(config: Config) -> None:
    """A router that compares blocks needs them of one size."""
    first = config.workers[0]
    for group in config.workers[1:]:
        if config.router.mode == "kv" and group.engine.block_size != first.engine.block_size:
            key = f"workers.{group.name}.engine.block_size"
            raise ConfigError(
                f"{config.origins[key]}: {key} = {group.engine.block_size}, and the router would hash prompts by the "
                f"{first.engine.block_size} of {first.name}: kv routing would see no overlap; give all groups one "
                "block_size, or take another router.mode"
            )


def _check_loras(config: Config) -> None:
    """Either every group says which adapters it serves, or none does."""
    listed = [group.name for group in config.workers if group.loras is not None]
    for group in config.workers:
        if listed and group.loras is None:
            key = f"workers.{listed[0]}.loras"
            raise ConfigError(
                f"{config.origins[key]}: {key} is given, and workers.{group.name}.loras is not: list the adapters of "
                f"every group, with loras = [] where there are none"
            )


def _check_router(config: Config) -> None:
    """Classes of the queue are whole, and somebody has the taints that requests need."""
    router, origins = config.router, config.origins
    if router.preferred_taints is not None:
        where = f"{origins['router.preferred_taints']}: router.preferred_taints"
        taint_weights(router.preferred_taints, where)
    needed = set(router.required_taints or ())
    if needed and not any(needed <= {*(group.taints or ())} for group in config.workers):
        raise ConfigError(
            f"{origins['router.required_taints']}: router.required_taints = {toml_value(router.required_taints)}: no "
            "group of workers has them all, so every request would be refused; see workers.taints"
        )
    if config.classes and router.queue.is_on:
        from policies.router.queue import Classes
        from twin.routing import queue_classes

        try:
            Classes(queue_classes(config))
        except ConfigError as error:
            first = f"classes.{config.classes[0].name}.name"
            raise ConfigError(f"{origins[first]}: {error}") from None


def _check_live(config: Config) -> None:
    """Lists of names and texts of `[live.frontend]` that have a form of their own."""
    table, origins = config.live.frontend, config.origins
    for name in ("aliases", "loras"):
        name_pairs(getattr(table, name), f"{origins[f'live.frontend.{name}']}: live.frontend.{name}")
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", table.metrics_prefix):
        raise ConfigError(
            f"{origins['live.frontend.metrics_prefix']}: live.frontend.metrics_prefix = "
            f"{toml_value(table.metrics_prefix)}: must be letters, digits, _ and :, and not begin with a digit"
        )
