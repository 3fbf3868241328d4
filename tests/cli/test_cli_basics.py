"""How the command line behaves whatever the command: help, version, usage errors, plug-ins, closed pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twin.commands.tree import BUILT_IN


def test_version_is_that_of_the_distribution(twin) -> None:
    ended = twin("--version")
    assert (ended.code, ended.out) == (0, "dynatwin 0.1.0\n")


def test_help_lists_every_command_with_what_it_does(twin) -> None:
    ended = twin("--help")
    assert ended.code == 0
    for name in BUILT_IN:
        (line,) = [line for line in ended.out.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 3


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_command_has_help(twin, name: str) -> None:
    ended = twin(name, "--help")
    assert ended.code == 0
    assert ended.out.startswith(f"Usage: twin {name} ")
    assert ended.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rpelay"], "there is no command rpelay; did you mean replay"),
        (["xyzzy"], "there are replay, compare"),
        (["replay", "--workres", "3"], "No such option: --workres"),
        (["replay", "t.csv", "u.csv"], "unexpected extra argument"),
        (["replay", "--seed"], "requires an argument"),
    ],
)
def test_a_wrong_line_is_refused_in_one_line(twin, args: list[str], words: str) -> None:
    ended = twin(*args)
    assert ended.code == 2
    assert words in ended.complaint
    assert "--help" in ended.complaint


@pytest.mark.parametrize(("args", "listed"), [([], "replay "), (["traces"], "show ")])
def test_a_group_of_commands_without_one_prints_its_help(twin, args: list[str], listed: str) -> None:
    ended = twin(*args)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("Usage: twin")
    assert any(line.strip().startswith(listed) for line in ended.err.splitlines())


def test_show_config_prints_toml_with_origins(twin, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("seed = 4\n[router]\nmode = 'kv'\n", encoding="utf-8")
    ended = twin(
        "replay", "t.csv", "--config", file, "--workers", "2", "--set", "router.tie_break=lowest_id", "--show-config"
    )
    assert ended.code == 0
    rows = [line.split("  # ") for line in ended.out.splitlines() if "  # " in line]
    origins = {setting.strip(): origin for setting, origin in rows}
    assert origins["seed = 4"] == f"{file}:1"
    assert origins['mode = "kv"'] == f"{file}:3"
    assert origins["count = 2"] == "--workers"
    assert origins['tie_break = "lowest_id"'] == "--set"
    assert origins['gpu = "h100_sxm"'] == "default"


def test_debug_shows_where_an_error_comes_from(twin) -> None:
    ended = twin("replay", "--set", "x", "--debug")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "ConfigError" in ended.err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{Path(sys.executable).parent / 'twin'} replay t.csv --show-config | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


PLUGIN = '''
import typer
from typing import Annotated

def greet(name: Annotated[str, typer.Argument(help="Whom.")]) -> int:
    """Say hello from outside."""
    print(f"hello {name}")
    return 3

several = typer.Typer(help="Two more.")

@several.command("one")
def one() -> None:
    print("one")

@several.command("two")
def two() -> None:
    print("two")

from policies.router.round_robin import RoundRobin

class Always1(RoundRobin):
    def _choose(self, event, live):
        return super()._choose(event, live)._replace(at=1, rule="mine")
'''


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """An installed package that adds commands, one of them broken: as an environment to run in."""
    (tmp_path / "outside.py").write_text(PLUGIN, encoding="utf-8")
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[dynatwin.commands]\ngreet = outside:greet\nseveral = outside:several\nbroken = nowhere:command\n"
        "[dynatwin.routers]\nalways-1 = outside:Always1\n",
        encoding="utf-8",
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_a_command_of_another_package_is_found(twin, plugin: dict[str, str]) -> None:
    ended = twin("greet", "you", env=plugin)
    assert (ended.code, ended.out) == (3, "hello you\n")
    assert twin("several", "two", env=plugin).out == "two\n"


def test_a_broken_plug_in_is_said_so_and_harms_no_other_command(twin, plugin: dict[str, str]) -> None:
    ended = twin("broken", env=plugin)
    assert ended.code == 2
    assert "broken: its plug-in nowhere:command cannot be loaded" in ended.complaint
    listed = twin("--help", env=plugin)
    assert listed.code == 0
    assert "greet" in listed.out
    assert twin("--version", env=plugin).code == 0


def test_a_router_of_another_package_routes(twin, plugin: dict[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n0,10,2\n1,10,2\n2,10,2\n", encoding="utf-8")
    ended = twin("replay", trace, "--router", "always-1", "--json", env=plugin)
    assert ended.code == 0, ended.err
    assert [worker["requests"] for worker in json.loads(ended.out)["workers"]] == [0, 3, 0, 0]
    assert "must be round-robin" in twin("replay", trace, "--router", "always-1").complaint


def test_python_m_twin_is_the_command(root: Path) -> None:
    command = [sys.executable, "-m", "twin", "--version"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "dynatwin")
