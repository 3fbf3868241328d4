"""A stdout that is full, closed or knows only ASCII: one line on stderr at most, and never called a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWIN = Path(sys.executable).parent / "twin"
REPLAY = ["replay", "t.csv", "--out", "run"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.csv").write_text("arrival_s,isl,osl\n0,10,3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(args: list[str], redirection: str, **env: str) -> tuple[int, str, str]:
    command = " ".join(["exec", str(TWIN), *args, redirection])
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, env={**os.environ, **env}, timeout=300, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("args", [REPLAY, [*REPLAY, "--json"], ["hardware"], ["--help"], ["replay", "--show-config"]])
def test_a_full_stdout_is_told_in_one_line(args: list[str]) -> None:
    code, _, err = shell(args, "> /dev/full")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("twin: stdout: No space left on device")


@pytest.mark.parametrize("args", [REPLAY, ["hardware"], ["--version"]])
def test_a_closed_stdout_is_told_in_one_line_before_anything_is_done(args: list[str], folder: Path) -> None:
    code, _, err = shell(args, ">&-")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("twin: stdout: is closed")
    assert not (folder / "run").exists()


@pytest.mark.parametrize("args", [REPLAY, [*REPLAY, "--json"]])
def test_an_ascii_stdout_gets_replacements(args: list[str]) -> None:
    code, out, err = shell(args, "", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "output_tokens_per_s" in out if "--json" in args else "? 95 %" in out


def test_a_closed_stderr_costs_only_its_text() -> None:
    assert shell(["replay", "absent.csv"], "2>&-") == (2, "", "")
    code, out, _ = shell(REPLAY, "2>&-")
    assert code == 0
    assert "TTFT" in out
