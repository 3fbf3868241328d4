"""`twin worker`: the workers of one group on this host, for frontends that find them in a discovery store."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from executors.commands.lines import check_packages, flags_of, pythons, tiers_of, whole_of
from twin.commands.replay_line import Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from executors.discovery.record import WorkerRecord
    from executors.hosting import WorkerHost
    from twin.config import Config, WorkerGroup

OPTIONS = (
    Option("--config", "FILE", "Configuration, the same as that of the frontends."),
    Option("--set", "KEY=VALUE", "One setting; may be given several times.", many=True),
    Option("--group", "NAME", "Group of workers; may be left out where there is one."),
    Option("--count", "N", "How many are started here; otherwise the count of the group."),
    Option("--checkpoint", "DIR", "What engines load: a folder with weights and tokenizer."),
    Option("--served-as", "NAME", "Name that clients ask for; otherwise that of the folder."),
    Option("--discovery", "PLACE", "Where they are registered: etcd://HOST:2379 or a shared folder."),
    Option("--host", "ADDRESS", "Address of this host that they listen on, as frontends reach it (127.0.0.1)."),
    Option("--name", "NAME", "What their names begin with; otherwise host and process number."),
    Option("--python", "ENGINE=PATH", "Interpreter of the environment that an engine is in.", many=True),
    Option("--logs", "DIR", "Folder for the logs of engines; otherwise a temporary one."),
    Option("--lease", "S", "Seconds that a prefill worker keeps KV that nobody fetched (disaggregation.lease_s)."),
    Option("--kv-disk", "DIR", "Folder for their disk tier (workers.kvbm); each has one of its own in it."),
    Option("--kv-objects", "URL", "Their remote tier: s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]."),
    Option("--grace", "S", "Seconds after a signal until engines are told to end (resilience.grace_s)."),
    Option("--drain", "S", "Seconds that open requests may then take (resilience.drain_timeout_s)."),
    Option("--quiet", "", "Lines for scripts on stdout.", short="-q"),
)


def run(values: Values) -> int:
    """Run workers until a signal. Exit 0 if every engine ended by itself in time, 4 if one was killed."""
    check_packages("worker")
    from twin.config_read import load

    for name in ("config", "checkpoint", "discovery"):
        if name not in values:
            raise ConfigError(f"twin worker needs --{name}; twin worker --help says what it is")
    if str(values["discovery"]).endswith(".toml"):
        raise ConfigError(
            f"--discovery {values['discovery']}: a file of workers is kept by people; start the engines with "
            "twin serve --plan's lines, or use a folder or etcd"
        )
    config = load(Path(values["config"]), flags_of(values), (*values.get("set", ()), "allow_no_effect=true"))
    group = _group(values, config)
    _check_host(values.get("host", "127.0.0.1"))
    return asyncio.run(_run(values, config, group))


worker = command_of(run, OPTIONS, "Run the workers of a group on this host, for frontends elsewhere.")


def _group(values: Values, config: Config) -> WorkerGroup:
    groups = {group.name: group for group in config.workers}
    if "group" not in values and len(groups) == 1:
        return config.workers[0]
    if values.get("group") not in groups:
        said = (
            f"--group {values['group']}: there is no such group" if "group" in values else "which group? --group NAME"
        )
        raise ConfigError(f"{said}; there are {', '.join(sorted(groups))}")
    return groups[values["group"]]


def _check_host(host: str) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return  # a name: whoever cannot resolve it will say so
    if address.is_unspecified:
        raise ConfigError(f"--host {host}: frontends cannot reach that; give an address of this host that they can")


async def _run(values: Values, config: Config, group: WorkerGroup) -> int:
    from executors.discovery import open_discovery
    from executors.discovery.record import fingerprint_of
    from executors.hosting import Self, Terms, WorkerHost
    from executors.starter import HostStarter, Model
    from executors.starter import Terms as StartTerms

    checkpoint = Path(values["checkpoint"]).resolve()
    starter = HostStarter(
        {group.name: group},
        Model(checkpoint=str(checkpoint), served_as=values.get("served_as", checkpoint.name)),
        pythons(values),
        asyncio.get_running_loop().time,
        Path(values["logs"]).absolute() if "logs" in values else None,
        StartTerms.of(config),
        values.get("host", "127.0.0.1"),
        shared=True,
        tiers=tiers_of(values),
    )
    here = socket.gethostname()
    own = Self(
        prefix=values.get("name", f"{here}-{os.getpid()}"),
        host=here,
        fingerprint=fingerprint_of(checkpoint),
    )
    terms = Terms.of(config)
    quiet = "quiet" in values
    host = WorkerHost(
        starter, group.name, open_discovery(values["discovery"]), own, terms, lambda record: _tell(record, quiet)
    )
    try:
        return await _until_told(host, whole_of(values, "count", group.count))
    finally:
        await host.close()


async def _until_told(host: WorkerHost, count: int) -> int:
    """Start, serve until a signal, drain. A second signal ends all waiting."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if asked.is_set():
            host.hurry()
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.ensure_future(host.start(count))
    asking = asyncio.ensure_future(asked.wait())
    await asyncio.wait({starting, asking}, return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    else:
        starting.result()
        await host.serve(asked)
    return Exit.OK if await host.stop() else Exit.LIVE_CUT


def _tell(record: WorkerRecord, quiet: bool) -> None:
    told = {"registered": record.name, "url": record.url}
    print(json.dumps(told) if quiet else f"registered {record.name} at {record.url}", flush=True)
