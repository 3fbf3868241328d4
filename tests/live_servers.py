"""Real servers of vLLM for tests, started out of one import, with the ports and the flags of our own configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from executors.engines.kv_tiers import KvPlaces, ObjectStore, shared_memory
from executors.engines.launch import Place, Ports, launch, port_needs
from executors.ports import LOOPBACK, PortAllocator
from policies.cluster.ids import Role
from twin.config import EngineConfig, WorkerGroup

READY_S = 400
LIFE_S = 900
BLOCK_SIZE = 32
SERVERS = {
    "mixed": Role.MIXED,
    "spare": Role.MIXED,
    "tiered": Role.MIXED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
LIMITS = EngineConfig(
    block_size=BLOCK_SIZE,
    kv_blocks=1000,
    gpu_memory_utilization=0.1,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    max_model_len=4096,
)
SMALL = replace(LIMITS, kv_blocks=41, max_model_len=1024)
"""A device with room for two prompts of 500 tokens."""


@dataclass(frozen=True)
class Server:
    """A server that is up: what it does, where it is and logs, and the leader of its process group."""

    name: str
    role: Role
    url: str
    log: Path
    pid: int = 0


@contextmanager
def forked(
    python: Path,
    model: Path,
    root: Path,
    groups: Mapping[str, WorkerGroup],
    objects: ObjectStore | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Server]]:
    """A server of each group, by name, out of one import; their tiers are in a folder of theirs and in `objects`."""
    with tempfile.TemporaryDirectory(prefix="dt") as folder, closing(PortAllocator()) as allocator:
        servers, spec = specified(Path(folder), str(model), allocator, groups, objects)
        path = Path(folder, "spec.json")  # a short path: those of sockets are limited
        path.write_text(json.dumps(spec), encoding="utf-8")
        command = [str(python), str(root / "tools" / "live" / "fork_servers.py"), str(path)]
        limits = ["--timeout-s", str(READY_S), "--max-life-s", str(LIFE_S)]
        zygote = subprocess.Popen(
            [*command, *limits], stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        try:
            assert zygote.stdout is not None
            said = []
            for line in zygote.stdout:
                said.append(line)
                if line.startswith("ALL READY"):
                    break
            else:
                logs = "".join(f"\n--- {one.name}\n{one.log.read_text()[-3000:]}" for one in servers.values())
                pytest.fail(f"servers did not start:\n{''.join(said)}{logs}")
            pids = {words[1]: int(words[5]) for line in said if (words := line.split()) and words[0] == "ready"}
            yield {name: replace(one, pid=pids[name]) for name, one in servers.items()}
        finally:
            zygote.send_signal(signal.SIGTERM)
            zygote.wait(READY_S)
            for left in shared_memory(Path(folder).name):  # vLLM leaves its host tiers there when it is told to end
                left.unlink()


def specified(
    folder: Path,
    model: str,
    allocator: PortAllocator,
    groups: Mapping[str, WorkerGroup],
    objects: ObjectStore | None,
) -> tuple[dict[str, Server], dict[str, object]]:
    """What is started, from our own configuration."""
    servers, lines = {}, []
    for name, group in groups.items():
        own = folder / name
        own.mkdir(mode=0o700)
        ports = Ports(host=LOOPBACK, **allocator.take(name, port_needs(group)))
        tiers = KvPlaces(disk=own / "disk", objects=objects)
        tag = f"{folder.name}-{name}"
        place = Place(
            name=name, model=model, served_as="tiny", ports=ports, folder=str(own), lease_s=10, tiers=tiers, tag=tag
        )
        started = launch(group, place)
        server = Server(name, Role(group.role), f"http://{ports.host}:{ports.http}", own / "log")
        servers[name] = server
        lines.append(
            {
                "name": name,
                "port": ports.http,
                "env": dict(started.env),
                "args": list(started.argv[2:]),
                "log": str(server.log),
            }
        )
    return servers, {"env": {}, "servers": lines}
