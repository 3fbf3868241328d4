"""docs/policies.md: its recipe is written down and run, its tables and keys are those of the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from short_trace import cut_bundled_trace

from policies.router.build import MODES
from policies.router.refusals import REFUSALS
from twin.config import AffinityConfig, BusyConfig, QueueConfig, RouterConfig
from twin.config_read import load
from twin.config_schema import keys_of


def text_of(root: Path) -> str:
    return (root / "docs" / "policies.md").read_text(encoding="utf-8")


def test_the_table_of_refusals_is_that_of_the_code(root: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| (\w+) \|$", text_of(root), re.MULTILINE)
    shown = {code: (None if status == "as set for overload" else int(status), kind) for code, status, kind in rows}
    assert shown == {code: (kind.status, kind.counted.value) for code, kind in REFUSALS.items()}


def test_every_mode_and_every_key_is_there(root: Path) -> None:
    text = text_of(root)
    assert [mode for mode in MODES if f"| `{mode}` |" not in text] == []
    tables = {"queue": QueueConfig, "busy": BusyConfig, "affinity": AffinityConfig}
    assert [table for table in tables if f"[router.{table}]" not in text] == []
    keys = [entry.name for table in tables.values() for entry in keys_of(table)]
    plain = ["required_taints", "preferred_taints", "device_ratio", "prefill_tokens_per_s", "router_temperature"]
    plain += ["use_kv_events", "index_policy", "approximate_ttl_s", "predicted_ttl_s"]
    keys += plain
    assert {*plain} <= {entry.name for entry in keys_of(RouterConfig)}
    assert [key for key in keys if not re.search(rf"\b{key}\b", text)] == []


def test_the_configuration_that_it_shows_is_one(root: Path, tmp_path: Path) -> None:
    (block,) = (
        found for found in re.findall(r"```toml\n(.*?)```", text_of(root), re.DOTALL) if "[router.queue]" in found
    )
    file = tmp_path / "c.toml"
    file.write_text(block, encoding="utf-8")
    config = load(file)
    assert [one.name for one in config.classes] == ["short", "long"]
    assert config.router.queue.order == "wspt"


@pytest.mark.slow
def test_the_recipe_works_as_it_is_written(root: Path, tmp_path: Path) -> None:
    text = text_of(root)[text_of(root).index("## Add a router") :]
    for _, block in re.findall(r"```(toml|python)\n(.*?)```", text, re.DOTALL):
        place, _, source = block.partition("\n")
        path = tmp_path / place.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    cut_bundled_trace(root, tmp_path)
    site = _installed(tmp_path / "roomiest", tmp_path / "site")
    path = os.pathsep.join(map(str, (site, root, root / "tests")))
    env = {**os.environ, "PYTHONPATH": path}
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        program, *arguments = shlex.split(line)
        command = arguments if program == "python" else ["-m", "twin.cli", *arguments]
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "roomiest" in done.stdout


def _installed(package: Path, site: Path) -> Path:
    """What an installer leaves: the module, and the entry points that pyproject.toml declares."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    facts = site / f"{project['name']}-{project['version']}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    (facts / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{n} = {where}\n" for n, where in points.items()))
    (site / "roomiest.py").write_text((package / "roomiest.py").read_text())
    return site
