"""The commands of docs/aiconfig.md run one after the other, as a reader would type them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_docs import shown_commands

pytestmark = pytest.mark.long

MODULES = {"aiconfig": "aiconfig", "twin": "twin.cli"}


@pytest.mark.slow
def test_the_commands_of_the_document_run(root: Path, tmp_path: Path) -> None:
    lines = shown_commands(root / "docs" / "aiconfig.md")
    assert {shlex.split(line)[1] for line in lines if line.startswith("aiconfig ")} == {
        "search", "estimate", "explain", "compare", "emit", "import", "models", "systems"
    }  # fmt: skip
    for line in lines:
        program, *args = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", MODULES[program], *args], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout, line
