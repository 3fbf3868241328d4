"""Real engines for the tests in this folder, started once for all of them, with the ports and the flags of our own
configuration. They need an environment with vLLM (`DYNATWIN_VLLM_PYTHON` names its interpreter; `make test-live`
installs one); without it a test skips and says what is missing, and where `DYNATWIN_LIVE_STRICT` is set a skip is a
failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from live_service import Engines

from executors.engines.launch import Place, Ports, launch, port_needs
from executors.frontend.tokens import ServedTokenizer
from executors.ports import LOOPBACK, PortAllocator
from policies.cluster.ids import Role
from twin.config import EngineConfig, WorkerGroup

VARIABLE = "DYNATWIN_VLLM_PYTHON"
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
BLOCK_BYTES = 16_384
"""Of the tiny model."""


@dataclass(frozen=True)
class Server:
    """A server that is up: what it does, where it is and logs, and the leader of its process group."""

    name: str
    role: Role
    url: str
    log: Path
    pid: int = 0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What was skipped guards nothing: where all must run, that is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    # A module that skips itself while it is collected has a report without keywords, and guards nothing here: those
    # of this folder decide inside their fixtures.
    if os.environ.get("DYNATWIN_LIVE_STRICT") and any("live" in getattr(report, "keywords", ()) for report in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment that vLLM is installed in."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(
            f"SKIP vLLM: {VARIABLE} is not set; install with tools/live/install_engines.sh VENV, and name its python"
        )
    return Path(named)


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy answers notice KV that arrives damaged."""
    made = os.environ.get("DYNATWIN_TINY_MODEL")
    if made:
        return Path(made)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    command = [str(vllm_python), str(root / "tools" / "live" / "make_tiny_model.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=READY_S)
    return folder


@pytest.fixture(scope="session")
def vllm_servers(vllm_python: Path, tiny_model: Path, root: Path) -> Iterator[dict[str, Server]]:
    """Servers of vLLM by name: three mixed ones, of which tests kill the spare one and one has tiers below a small
    device, one for prefills and one that answers; stopped at the end, logs shown when one does not start."""
    with tempfile.TemporaryDirectory(prefix="dt") as folder, closing(PortAllocator()) as allocator:
        servers, spec = specified(Path(folder), str(tiny_model), allocator)
        path = Path(folder, "spec.json")  # a short path: those of sockets are limited
        path.write_text(json.dumps(spec), encoding="utf-8")
        command = [str(vllm_python), str(root / "tools" / "live" / "fork_servers.py"), str(path)]
        limits = ["--timeout-s", str(READY_S), "--max-life-s", str(LIFE_S)]
        zygote = subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True)
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


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> ServedTokenizer:
    return ServedTokenizer.from_folder(tiny_model)


@pytest.fixture
def engines(vllm_servers: dict[str, Server], tokenizer: ServedTokenizer, tmp_path: Path) -> Engines:
    return Engines(vllm_servers, tokenizer, tmp_path)


def specified(folder: Path, model: str, allocator: PortAllocator) -> tuple[dict[str, Server], dict[str, object]]:
    """What is started, from our own configuration."""
    servers, lines = {}, []
    for name, role in SERVERS.items():
        limits = replace(LIMITS, kv_blocks=41, max_model_len=1024) if name == "tiered" else LIMITS
        group = WorkerGroup(name=name, role=role.value, tp=1, on_cpu=True, engine=limits)
        own = folder / name
        own.mkdir(mode=0o700)
        ports = Ports(host=LOOPBACK, **allocator.take(name, port_needs(group)))
        place = Place(name=name, model=model, served_as="tiny", ports=ports, folder=str(own), lease_s=10)
        started = launch(group, place)
        server = Server(name, role, f"http://{ports.host}:{ports.http}", own / "log")
        servers[name] = server
        lines.append(
            {
                "name": name,
                "port": ports.http,
                "env": dict(started.env),
                "args": [*started.argv[2:], *(_tiers(own) if name == "tiered" else ())],
                "log": str(server.log),
            }
        )
    return servers, {"env": {}, "servers": lines}


def _tiers(folder: Path) -> list[str]:
    """Host memory for 64 blocks, and files below it."""
    disk = {"type": "fs", "root_dir": str(folder / "disk"), "n_read_threads": 1, "n_write_threads": 1}
    extra = {
        "spec_name": "HostCopyTieringSpec",
        "spec_module_path": "cpu_offload_spec",
        "cpu_bytes_to_use": 64 * BLOCK_BYTES,
        "self_describing_kv_events": True,
        "secondary_tiers": [{**disk, "enable_kv_events": True}],
    }
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]
