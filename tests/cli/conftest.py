"""The real `twin` command, run in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TWIN = Path(sys.executable).parent / "twin"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that a refusal is; fails when there is more, or a traceback."""
        assert self.out == ""
        assert "Traceback" not in self.err
        (line,) = self.err.splitlines()
        assert line.startswith("twin: ")
        return line


Twin = Callable[..., Ended]


@pytest.fixture
def twin(tmp_path: Path) -> Twin:
    """Runs `twin` with the arguments given, in an empty folder, without a terminal."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(*args: str | Path, env: dict[str, str] | None = None) -> Ended:
        done = subprocess.run(
            [TWIN, *args],
            cwd=folder,
            env={**os.environ, "COLUMNS": "100", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
