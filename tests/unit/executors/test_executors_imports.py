"""Live serving starts light: nothing under it loads an engine, NIXL or a web client before it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULES = ("discovery", "discovery.etcd", "discovery.folder", "leases", "nixl", "plain_mover", "ports", "probe",
           "process", "storage")  # fmt: skip
HEAVY = ("torch", "vllm", "sglang", "tensorrt_llm", "nixl", "numpy", "aiohttp", "fastapi", "twin")


def test_hosts_load_no_engine_and_no_web_client(root: Path, tmp_path: Path) -> None:
    lines = [f"import executors.{name}" for name in MODULES]
    code = "\n".join([*lines, f"import sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"])
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_adapters_load_no_engine(root: Path, tmp_path: Path) -> None:
    modules = ("vllm", "sglang", "trtllm", "launch", "kv_follow", "kv_drain")
    lines = [f"import executors.engines.{name}" for name in modules]
    engines = ("torch", "vllm", "sglang", "tensorrt_llm", "nixl", "numpy", "transformers")
    code = "\n".join([*lines, f"import sys; print(*(name for name in {engines!r} if name in sys.modules))"])
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
