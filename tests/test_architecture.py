"""The house rules that a machine can check: which room may import which, and what each kind of file must never do.

Every rule is shown to fail on a planted offence, so that a rule which stopped looking would be noticed.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = ("policies", "traces", "reports", "twin", "executors", "aiconfig")
NOT_ROOMS = {"tests", "benchmarks", "docs"}


def lint_imports(top: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(top)}
    return subprocess.run(command, cwd=top, env=env, capture_output=True, text=True, check=False)


def python_files(root: Path, *rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((root / room).rglob("*.py"))


# ---------------------------------------------------------------- imports between rooms


def test_rooms_import_downwards_only(root: Path) -> None:
    done = lint_imports(root)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "offence", "contract"),
    [
        ("policies/router/planted.py", "import time", "policies are pure"),
        ("policies/router/planted.py", "import traces.schema", "rooms import downwards only"),
        ("traces/planted.py", "import policies.errors", "rooms import downwards only"),
        ("reports/planted.py", "import twin.config", "rooms import downwards only"),
        ("twin/planted.py", "import executors", "rooms import downwards only"),
        ("twin/engine/planted.py", "import simpy", "the simulated engine is pure"),
        ("executors/planted.py", "import twin.mocker", "the live world does not use the simulated one"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(
    root: Path, tmp_path: Path, module: str, offence: str, contract: str
) -> None:
    for room in ROOMS:
        shutil.copytree(root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "*.parquet"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / module).write_text(f'"""Planted."""\n{offence}\n', encoding="utf-8")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout, done.stdout


def test_no_room_beside_the_six(root: Path) -> None:
    folders = {path.parent.name for path in root.glob("*/*.py") if not path.parent.name.startswith(".")}
    assert folders - NOT_ROOMS <= set(ROOMS)
    assert not list(root.glob("*.py"))


# ---------------------------------------------------------------- what a file must never do


def test_every_file_begins_with_what_it_is_for(root: Path) -> None:
    silent = []
    for path in python_files(root, *ROOMS, *NOT_ROOMS):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            silent.append(str(path.relative_to(root)))
    assert not silent


def calls(source: str, names: set[str]) -> list[str]:
    """The calls in `source` to one of `names` (dotted, or bare builtins), with their lines."""
    tree = ast.parse(source)
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [f"{node.lineno}: {ast.unparse(node.func)}" for node in found if ast.unparse(node.func) in names]


def offences(root: Path, rooms: tuple[str, ...], names: set[str]) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line}"
        for path in python_files(root, *rooms)
        for line in calls(path.read_text(encoding="utf-8"), names)
    ]


@pytest.mark.parametrize(
    ("rooms", "names", "why"),
    [
        (("policies", "twin/engine"), {"open", "print", "input", "exec", "eval"}, "decisions and engines do no I/O"),
        (("policies", "twin/engine", "twin/mocker"), {"hash", "id"}, "order must not depend on PYTHONHASHSEED"),
        (("policies", "traces", "reports", "twin/engine", "twin/mocker", "twin/perf"), {"sys.exit", "exit", "quit"},
         "libraries raise, the command line exits"),
        (("tests",), {"time.sleep", "sleep", "time.perf_counter", "time.monotonic", "time.time", "mock.patch"},
         "tests neither sleep, nor time, nor mock"),
    ],
)  # fmt: skip
def test_nobody_calls(root: Path, rooms: tuple[str, ...], names: set[str], why: str) -> None:
    assert not offences(root, rooms, names), why


def test_the_call_rule_sees_a_call() -> None:
    assert calls("x = hash(y)\ntime.sleep(1)\nself.hash(3)", {"hash", "time.sleep"}) == ["1: hash", "2: time.sleep"]


# ---------------------------------------------------------------- start-up

HEAVY = ("pandas", "matplotlib", "scipy", "jinja2", "simpy", "pyarrow", "numpy", "rich.progress", "pydantic")
HEAVY_FOR_REPLAY = ("pandas", "matplotlib", "scipy", "pydantic", "jinja2", "typer", "rich")


def modules_after(code: str, cwd: Path, packages: tuple[str, ...]) -> list[str]:
    """Which of `packages` are loaded in a fresh interpreter once it has run `code`."""
    report = f"import sys; print('LOADED', *(m for m in {packages!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1].split()
    assert last[0] == "LOADED", done.stdout
    return last[1:]


def test_the_command_line_starts_without_heavy_packages(tmp_path: Path) -> None:
    assert modules_after("import twin.cli", tmp_path, HEAVY) == []


def test_a_replay_loads_no_heavy_package(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,isl,osl\n0,10,2\n1,20,3\n", encoding="utf-8")
    line = ["replay", "t.csv", "--router", "kv", "--no-html", "--json"]
    code = f"from twin.cli import run; assert run({line}) == 0"
    assert modules_after(code, tmp_path, HEAVY_FOR_REPLAY) == []


def test_aiconfig_starts_without_heavy_packages(tmp_path: Path) -> None:
    assert modules_after("import aiconfig.cli", tmp_path, HEAVY) == []
    ours = tuple(name for name in HEAVY if name != "pydantic")  # typer itself loads it where it is installed
    assert modules_after("from aiconfig.cli import run; assert run(['models']) == 0", tmp_path, ours) == []


@pytest.mark.parametrize("room", ["policies", "traces", "reports", "executors", "aiconfig"])
def test_importing_a_room_costs_nothing(room: str, tmp_path: Path) -> None:
    assert modules_after(f"import {room}", tmp_path, HEAVY) == []


def test_the_start_up_rule_sees_an_import(tmp_path: Path) -> None:
    assert modules_after("import json, scipy", tmp_path, HEAVY) == ["scipy", "numpy"]
