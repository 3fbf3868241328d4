"""`twin serve`: a configuration as a running service, on mock engines or with --live on real ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from executors.commands.lines import (
    check_kserve,
    check_packages,
    flags_of,
    no_effect_live,
    pairs_of,
    pythons,
    tiers_of,
    whole_of,
)
from twin.commands.replay_line import Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from executors.assemble import Host, LiveCluster
    from executors.engines.protocol import Ability
    from executors.frontend.settings import Settings
    from executors.frontend.tokens import ServedTokenizer
    from executors.shadow.watch import Wanted as Shadowed
    from twin.config import Config

PREDICTED = "predicted"
"""Where in the folder of a record the simulated run is."""

OPTIONS = (
    Option("--config", "FILE", "Configuration (best.toml of a search, or any other of the twin)."),
    Option("--set", "KEY=VALUE", "One setting; may be given several times.", many=True),
    Option("--live", "", "Real engines; without it, the twin's own engines in real time."),
    Option("--checkpoint", "DIR", "What engines load: a folder with weights and tokenizer."),
    Option("--tokenizer", "DIR", "Folder with tokenizer.json, where it is not that of --checkpoint."),
    Option("--served-as", "NAME", "Name that clients ask for; otherwise that of the model or folder."),
    Option("--attach", "GROUP=URL", "A running engine as a worker of a group; several times.", many=True),
    Option("--discovery", "PLACE", "Workers of other processes: etcd://HOST:2379, a shared folder, or a .toml file."),
    Option("--peers", "PLACE", "Other frontends to share bookings with: a discovery store, or tcp://HOST:PORT,..."),
    Option("--peer-listen", "HOST:PORT", "Where this one hears of their bookings (127.0.0.1, any port)."),
    Option("--peer-key", "FILE", "Secret that all of them seal their messages with; none: there is none."),
    Option("--python", "ENGINE=PATH", "Interpreter of the environment that an engine is in.", many=True),
    Option("--logs", "DIR", "Folder for the logs of engines; otherwise a temporary one."),
    Option("--lease", "S", "Seconds that a prefill worker keeps KV that nobody fetched (disaggregation.lease_s)."),
    Option("--kv-disk", "DIR", "Folder for the disk tiers of workers that are started (workers.kvbm)."),
    Option("--kv-objects", "URL", "Their remote tier: s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]."),
    Option("--record", "DIR", "Write the run there: journal, requests, report; twin replay reads the journal."),
    Option("--shadow", "", "Simulate the same requests beside the cluster: predicted against measured in /metrics."),
    Option("--shadow-wait", "S", "Seconds that the shadow waits for the length of an open answer (60)."),
    Option("--shadow-window", "S", "Seconds over which predicted and measured are compared (300)."),
    Option("--plan", "", "Print what would be started, and stop."),
    Option("--host", "ADDRESS", "Address to listen on (127.0.0.1)."),
    Option("--port", "N", "Port to listen on (8000; 0: any)."),
    Option("--admin-port", "N", "A port of 127.0.0.1 of its own for paths of administrators."),
    Option("--kserve-grpc-port", "N", "Serve KServe v2 over gRPC there too (extra `kserve`)."),
    Option("--api-keys", "FILE", "API keys, one a line: key, name, role (user, trusted, admin)."),
    Option("--require-auth", "", "Refuse to start without --api-keys."),
    Option("--tls-cert", "FILE", "Certificate, in PEM."),
    Option("--tls-key", "FILE", "Its key, in PEM."),
    Option("--debug-endpoints", "", "/debug/decisions and /debug/state, for administrators."),
    Option("--grace", "S", "Seconds after a signal in which new requests are still taken (resilience.grace_s)."),
    Option("--drain", "S", "Seconds that open requests may then take (resilience.drain_timeout_s)."),
    Option("--quiet", "", "No notices on stderr.", short="-q"),
)


def run(values: Values) -> int:
    """Serve until a signal. Exit 0 if every request could finish, 4 if some were cut."""
    check_packages("serve")
    check_kserve(values)
    from twin.config_read import load

    config = load(
        Path(values["config"]) if "config" in values else None, flags_of(values), (*values.get("set", ()), _ALL)
    )
    _check(values, config)
    tokenizer, name, tokens = _tokenizer(values, config)
    host = _host(values, config, name, tokens)
    if "plan" in values:
        return _plan(config, host)
    settings, shadow = _settings(values, config, name), _shadow(values)
    return asyncio.run(_serve(config, host, {name: tokenizer}, settings, shadow, quiet="quiet" in values))


serve = command_of(run, OPTIONS, "Serve a configuration: the same policies, live.")


PEERS = ("peer_listen", "peer_key")
_ALL = "allow_no_effect=true"  # what has no effect in a simulation may have one here: it is told, not refused


_PROGRESS_S = 15.0
"""Between two lines about engines that are still starting."""
_OF_LIVE = (
    "checkpoint", "attach", "discovery", "peers", "python", "logs", "lease", "plan", "kv_disk",
    "kv_objects",
)  # fmt: skip


def _check(values: Values, config: Config) -> None:
    """What has no effect, or means nothing, is refused."""
    live = "live" in values
    for name in (*PEERS, *_OF_LIVE):
        if name in values and not live:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without --live: mock engines load and start nothing"
            )
    if live and "checkpoint" not in values and "tokenizer" not in values:
        raise ConfigError(
            "--live: which weights? give --checkpoint DIR (with --attach or --discovery, --tokenizer DIR is enough)"
        )
    for name in PEERS:
        if name in values and "peers" not in values:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --peers: nobody is told of it")
    _check_shadow(values)
    found = "discovery" in values or len(pairs_of(values, "attach")) >= len(config.workers)
    if live and "checkpoint" not in values and not found:
        raise ConfigError(
            "--live without --checkpoint: nothing is started, so say where workers are: --discovery PLACE, or --attach "
            "for every group"
        )
    if "quiet" in values:
        return
    if config.trace.path is not None:
        print("note: the trace of the configuration is not played: clients bring the demand", file=sys.stderr)
    for text in no_effect_live(config, live):
        print(f"note: without effect: {text}", file=sys.stderr)


def _check_shadow(values: Values) -> None:
    """A shadow sees the requests of this frontend, and can predict them where they are all that the workers have."""
    for name in ("shadow_wait", "shadow_window"):
        if name in values and "shadow" not in values:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --shadow")
    if "shadow" in values and "peers" in values:
        raise ConfigError(
            "--shadow with --peers: the workers have requests of other frontends too, which this one does not see; "
            "leave one of them out"
        )


def _shadow(values: Values) -> Shadowed | None:
    from executors.shadow.watch import Wanted

    if "shadow" not in values:
        return None
    usual = Wanted()
    return Wanted(
        wait_s=whole_of(values, "shadow_wait", int(usual.wait_s)),
        window_s=max(1, whole_of(values, "shadow_window", int(usual.window_s))),
        record=Path(values["record"]) / PREDICTED if "record" in values else None,
    )


def _tokenizer(values: Values, config: Config) -> tuple[ServedTokenizer, str, tuple[int, int]]:
    """The tokenizer, the name that is served, and the token ids that mock engines make."""
    from executors import mock_model
    from executors.frontend.tokens import ServedTokenizer

    folder = values.get("tokenizer", values.get("checkpoint"))
    if folder is None:
        name = values.get("served_as", config.workers[0].model)
        return mock_model.tokenizer(), name, (mock_model.READABLE, mock_model.VOCABULARY)
    found = ServedTokenizer.from_folder(Path(folder))
    usual = config.workers[0].model if "live" not in values else Path(folder).resolve().name
    return found, values.get("served_as", usual), (min(100, found.vocab_size - 1), found.vocab_size)


def _host(values: Values, config: Config, name: str, tokens: tuple[int, int]) -> Host:
    from executors.assemble import Host
    from executors.discovery.record import fingerprint_of
    from executors.peering import peering
    from executors.starter import Model

    groups = {group.name for group in config.workers}
    attached: dict[str, list[str]] = {}
    for group, url in pairs_of(values, "attach"):
        if group not in groups:
            raise ConfigError(
                f"--attach {group}={url}: there is no group {group!r}; there are {', '.join(sorted(groups))}"
            )
        attached.setdefault(group, []).append(url)
    return Host(
        model=Model(checkpoint=str(Path(values.get("checkpoint", ".")).resolve()), served_as=name),
        mock="live" not in values,
        pythons=pythons(values),
        attached={group: tuple(urls) for group, urls in attached.items()},
        discovery=values.get("discovery"),
        fingerprint=fingerprint_of(Path(values.get("tokenizer", values.get("checkpoint", ".")))),
        peering=peering(values["peers"], *map(values.get, PEERS)) if "peers" in values else None,
        logs=Path(values["logs"]).absolute() if "logs" in values else None,
        record=Path(values["record"]) if "record" in values else None,
        tokens=tokens,
        tiers=tiers_of(values),
    )


def _abilities(config: Config) -> frozenset[Ability]:
    """What every engine of the configuration can do beyond tokens: a request for more is refused by name."""
    from executors.engines.protocol import Ability

    more = {"vllm": {Ability.LOGPROBS, Ability.GRAMMAR}, "sglang": {Ability.LOGPROBS}, "trtllm": {Ability.GRAMMAR}}
    found = [more.get(group.engine.kind, set()) for group in config.workers]
    return frozenset(set.intersection(*found))


def _settings(values: Values, config: Config, served_as: str) -> Settings:
    from executors.frontend.settings import Settings, Tls

    usual = Settings.of(config, served_as)
    if ("tls_cert" in values) != ("tls_key" in values):
        raise ConfigError("--tls-cert and --tls-key go together")
    tls = Tls(cert=Path(values["tls_cert"]), key=Path(values["tls_key"])) if "tls_cert" in values else None
    return replace(
        usual,
        host=values.get("host", usual.host),
        port=whole_of(values, "port", usual.port),
        admin_port=whole_of(values, "admin_port", 0) if "admin_port" in values else None,
        kserve_port=whole_of(values, "kserve_grpc_port", 0) if "kserve_grpc_port" in values else None,
        tls=tls,
        abilities=_abilities(config) if "live" in values else frozenset(),
        debug="debug_endpoints" in values,
        access=replace(
            usual.access,
            keys_file=Path(values["api_keys"]) if "api_keys" in values else None,
            require_auth="require_auth" in values,
        ),
    )


def _plan(config: Config, host: Host) -> int:
    """What would be started here, one shell line for each worker."""
    from executors.assemble import live_config
    from executors.gpus import gpus_here
    from executors.starter import HostStarter, Terms

    served, notices = live_config(config, host)
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    started = served.workers if host.discovery is None else ()
    groups = {group.name: group for group in started if group.name not in host.attached}
    gpus, wanted = gpus_here(), sum(one.gpus * one.count for one in groups.values() if not one.on_cpu)
    if wanted and not gpus:
        gpus = tuple(map(str, range(wanted)))
        print(f"note: no GPUs are seen here: the plan is for a host with {wanted}", file=sys.stderr)
    starter = HostStarter(
        groups, host.model, host.pythons, lambda: 0.0, host.logs, Terms.of(served), tiers=host.tiers, gpus=gpus
    )
    for planned in starter.plan():
        print(planned.text())
    for group, urls in host.attached.items():
        for url in urls:
            print(f"# attached as a worker of {group}: {url}")
    if host.discovery is not None:
        print(f"# workers of the other groups are those of {host.discovery}")
    return Exit.OK


async def _serve(
    config: Config,
    host: Host,
    tokenizers: Mapping[str, ServedTokenizer],
    settings: Settings,
    shadowed: Shadowed | None,
    *,
    quiet: bool,
) -> int:
    from executors.assemble import LiveCluster, live_config
    from executors.clock import WallClock
    from executors.frontend.server import Frontend
    from executors.shadow.watch import Shadow

    clock, shadow = WallClock(asyncio.get_running_loop()), None
    if shadowed is not None:
        shadow = await Shadow.start(live_config(config, host)[0], clock, shadowed)
    try:
        cluster = LiveCluster(config, host, clock, shadow)
    except BaseException:
        if shadow is not None:
            await shadow.kill()
        raise
    if not quiet:
        for notice in cluster.notices:
            print(f"note: {notice}", file=sys.stderr)
    frontend = Frontend(cluster.service, tokenizers, settings, now=cluster.clock.now)
    try:
        started = asyncio.ensure_future(cluster.start())
        serving = asyncio.ensure_future(frontend.run())
        telling = asyncio.gather(
            _tell(frontend, started, quiet=quiet), *(() if quiet else (_wait_aloud(cluster, started),))
        )
        try:
            done, _ = await asyncio.wait({started, serving}, return_when=asyncio.FIRST_COMPLETED)
            if started in done:
                started.result()
            return await serving
        finally:
            running = (started, serving, telling)
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    finally:
        await cluster.close()
        if host.record is not None and not quiet:
            whole = cluster.record is not None and cluster.record.failed is None
            print(f"record  {host.record}{'' if whole else ' is not whole'}", file=sys.stderr)
            if shadow is not None and shadow.up:
                print(f"shadow  {host.record / PREDICTED}", file=sys.stderr)


async def _wait_aloud(cluster: LiveCluster, started: asyncio.Future[None]) -> None:
    """Say on stderr whom we wait for: a real engine imports for minutes on a busy host, and says nothing meanwhile."""
    while not (await asyncio.wait({started}, timeout=_PROGRESS_S))[0]:
        starting = cluster.world.fleet.starting
        if starting:
            now_s = cluster.clock.now()
            logs = f"; logs in {cluster.starter.folder}" if cluster.starter is not None else ""
            print(f"starting {', '.join(sorted(starting))}: {now_s:.0f} s so far{logs}", file=sys.stderr, flush=True)


async def _tell(frontend: object, started: asyncio.Future[None], *, quiet: bool) -> None:
    """Say on stdout where it listens, and when it serves: lines that scripts can wait for."""
    while not frontend.ports:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    address = f"http://{frontend.settings.host}:{frontend.port}"  # type: ignore[attr-defined]
    print(json.dumps({"listening": address}) if quiet else f"listening on {address}", flush=True)
    await asyncio.wait({started})
    if not started.cancelled() and started.exception() is None:
        print(
            json.dumps({"ready": address}) if quiet else f"ready: {address}/v1, dashboard {address}/dashboard",
            flush=True,
        )
