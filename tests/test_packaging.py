"""The wheel: every room with its data files is in it, nothing else is, and it runs without the checkout.

It is built from a copy, so that leftovers of an earlier build can neither get in nor hide a file that is missing.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOMS = ("policies", "traces", "reports", "twin", "executors", "aiconfig")
LEFTOVERS = ("__pycache__", "*.pyc", "*.egg-info", ".*")

pytestmark = pytest.mark.slow


def run(command: list[str | Path], cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(root / name, source)
    for room in (*ROOMS, "tests", "docs", "benchmarks"):
        shutil.copytree(root / room, source / room, ignore=shutil.ignore_patterns(*LEFTOVERS))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", top, source], top)
    (built,) = top.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; third-party packages are those of the running interpreter."""
    env = tmp_path_factory.mktemp("clean") / "env"
    run([sys.executable, "-m", "venv", "--without-pip", env], env.parent)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", env / "bin" / "python"]
    run([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel], env.parent)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return env


def distributions(lines: list[str]) -> set[str]:
    """The names in lines of dependencies."""
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def imported_by(root: Path, *rooms: str) -> set[str]:
    """The packages that these rooms import, at whatever place in a file."""
    nodes = [
        node
        for room in rooms
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - set(ROOMS)


def test_runtime_dependencies_are_exactly_what_the_rooms_import(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = distributions(project["dependencies"]) - {"pyyaml"} | {"yaml", "markupsafe"}  # its import name; of jinja2
    assert imported_by(root, *(room for room in ROOMS if room != "executors")) == names
    optional = project["optional-dependencies"]
    extras = distributions(optional["live"] + optional["kserve"] + optional["kubernetes"])
    others = {"pyzmq": "zmq", "prometheus-client": "prometheus_client", "grpcio": "grpc", "protobuf": "google"}
    in_its_own_process = {"nixl", "vllm", "torch"}  # `engines/in_vllm` is loaded by vLLM itself
    parts = {"starlette", "h11", "urllib3"}  # of fastapi, of uvicorn, of kubernetes
    live = {others.get(name, name) for name in extras}
    assert imported_by(root, "executors") <= names | live | parts | in_its_own_process


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(root: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(root))
        for room in ROOMS
        for path in (root / room).rglob("*")
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.parts[len(root.parts) :])
    }
    assert packed == there


def test_the_installed_command_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    told = run([installed / "bin" / "twin", "--help"], tmp_path)
    assert "replay" in told


def test_the_installed_rooms_are_not_those_of_the_checkout(root: Path, installed: Path, tmp_path: Path) -> None:
    code = f"import {', '.join(ROOMS)}; print(*(m.__file__ for m in ({', '.join(ROOMS)})))"
    places = run([installed / "bin" / "python", "-c", code], tmp_path).split()
    assert len(places) == len(ROOMS)
    assert all(Path(place).is_relative_to(installed) for place in places), places
