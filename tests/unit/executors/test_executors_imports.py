"""Live serving starts light: nothing under it loads an engine, NIXL or a web client before it is asked for."""

from __future__ import annotations

import ast
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
    modules = ("vllm", "sglang", "trtllm", "launch", "kv_follow", "kv_drain", "kv_tiers", "in_vllm.books")
    lines = [f"import executors.engines.{name}" for name in modules]
    engines = ("torch", "vllm", "sglang", "tensorrt_llm", "nixl", "numpy", "transformers")
    code = "\n".join([*lines, f"import sys; print(*(name for name in {engines!r} if name in sys.modules))"])
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_what_engines_load_is_loaded_by_nobody_else(root: Path) -> None:
    """Only vLLM imports the files that import it; ours see no more than the books of tiers."""
    theirs = root / "executors" / "engines" / "in_vllm"
    for path in sorted((root / "executors").rglob("*.py")):
        if path.is_relative_to(theirs) and path.name != "books.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        wrong = {name for name in named if name.split(".")[0] in ("vllm", "torch") or "in_vllm" in name}
        assert not wrong, f"{path}: {wrong}"
