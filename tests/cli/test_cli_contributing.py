"""CONTRIBUTING.md walks through adding a policy: the files that it shows are written, its edits made, its steps run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from short_trace import cut_bundled_trace

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOMS = ("policies", "traces", "reports", "twin")


def blocks(root: Path, language: str) -> list[str]:
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def walked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the walk has been made."""
    copy = tmp_path_factory.mktemp("walk")
    for room in ROOMS:
        shutil.copytree(root / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        root / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "golden", "data", "cli")
    )
    shutil.copytree(root / "docs", copy / "docs")
    shutil.copy(root / "pyproject.toml", copy)
    cut_bundled_trace(root, copy)
    for block in blocks(root, "python"):
        place, _, source = block.partition("\n")
        (copy / place.removeprefix("# ")).write_text(source, encoding="utf-8")
    for block in blocks(root, "diff"):
        for name, edit in re.findall(r"--- (\S+)\n((?:[ +-](?!-- ).*\n)+)", block):
            edited(copy / name, edit.splitlines())
    return copy


def edited(path: Path, edit: list[str]) -> None:
    """Put `+` lines behind the context line above them, or in place of the `-` line above them."""
    text = path.read_text(encoding="utf-8")
    for before, line in pairwise(edit):
        if line.startswith("+"):
            assert text.count(f"{before[1:]}\n") == 1, f"{path}: {before[1:]!r}"
            kept = "" if before.startswith("-") else f"{before[1:]}\n"
            text = text.replace(f"{before[1:]}\n", f"{kept}{line[1:]}\n")
    path.write_text(text, encoding="utf-8")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_test_fails_without_the_policy(root: Path, walked: Path, tmp_path: Path) -> None:
    shutil.copytree(walked, tmp_path / "before", ignore=shutil.ignore_patterns("least_tokens.py"))
    (test,) = (tmp_path / "before").rglob("test_policies_least_tokens.py")
    assert run(tmp_path / "before", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)).returncode != 0


def test_the_tests_pass_with_it(walked: Path) -> None:
    tests = [str(path) for path in (walked / "tests" / "unit" / "policies").glob("test_*.py")]
    done = run(walked, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "tests/unit/twin_config")
    assert done.returncode == 0, done.stdout
    assert "least-tokens" in run(walked, "-m", "pytest", "--collect-only", "-q", *tests).stdout


def test_what_it_adds_is_clean(walked: Path) -> None:
    added = [str(path.relative_to(walked)) for path in walked.rglob("*least_tokens.py")]
    assert len(added) == 2
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy", "policies/router/least_tokens.py"]):
        files = [] if command[0] == "mypy" else added
        done = run(walked, "-m", *command, *files)
        assert done.returncode == 0, done.stdout


def test_the_policy_can_be_replayed_and_compared(root: Path, walked: Path) -> None:
    (shell,) = (block for block in blocks(root, "bash") if "twin replay" in block)
    for line in shell.splitlines():
        done = run(walked, "-m", "twin.cli", *line.split()[1:])
        assert done.returncode == 0, done.stderr
    assert "least-tokens" in done.stdout
