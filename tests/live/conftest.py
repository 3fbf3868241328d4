"""Real engines for the tests in this folder, started once for all of them, with the ports and the flags of our own
configuration. They need an environment with vLLM (`DYNATWIN_VLLM_PYTHON` names its interpreter; `make test-live`
installs one); without it a test skips and says what is missing, and where `DYNATWIN_LIVE_STRICT` is set a skip is a
failure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live_servers import BLOCK_SIZE, LIMITS, READY_S, SERVERS, SMALL, Server, forked
from live_service import Engines

from executors.frontend.tokens import ServedTokenizer
from twin.config import KvbmConfig, WorkerGroup

VARIABLE = "DYNATWIN_VLLM_PYTHON"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with processes of their own come before those with the engines of the whole session. These stay until the
    end, and the ones that hand KV over keep a core busy when nobody asks: NIXL's thread polls without waiting."""
    items.sort(key=lambda item: "vllm_servers" in getattr(item, "fixturenames", ()))


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
    groups = {
        name: WorkerGroup(name=name, role=role.value, tp=1, on_cpu=True, engine=LIMITS)
        for name, role in SERVERS.items()
    }
    tiers = KvbmConfig(cpu_cache_tokens=64 * BLOCK_SIZE, disk_cache_gb=0.1, disk_offload="presence")
    groups["tiered"] = replace(groups["tiered"], engine=SMALL, kvbm=tiers)
    with forked(vllm_python, tiny_model, root, groups) as servers:
        yield servers


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> ServedTokenizer:
    return ServedTokenizer.from_folder(tiny_model)


@pytest.fixture
def engines(vllm_servers: dict[str, Server], tokenizer: ServedTokenizer, tmp_path: Path) -> Engines:
    return Engines(vllm_servers, tokenizer, tmp_path)
