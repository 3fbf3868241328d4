"""A router from another package: found by its entry point, checked by the contract, run by `twin replay`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from builders import Scene, router_settings
from contract.policy_contract import RouterContract
from short_trace import cut_bundled_trace

from policies.cluster.actions import Dispatch
from policies.cluster.controller import Policy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from dynatwin_least_wait import LeastWait  # noqa: E402  # its folder is not on the path before


def installed(site: Path) -> Path:
    """What an installer leaves of the package: its code, and its entry points as pyproject.toml has them."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    package = project["name"].replace("-", "_")
    shutil.copytree(HERE / package, site / package)
    facts = site / f"{package}-{project['version']}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in project["entry-points"].items()
    )
    (facts / "entry_points.txt").write_text("\n".join(groups))
    return site


def twin(site: Path | None, *arguments: str, cwd: Path, root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (site, root) if site is not None else (root,)))
    command = [sys.executable, "-m", "twin.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


class TestContract(RouterContract):
    """The promises that every router makes."""

    def make(self) -> Policy:
        return LeastWait(router_settings("least-wait"))


def test_it_has_a_formula_of_its_own() -> None:
    scene = Scene(LeastWait(router_settings("least-wait", explain=True, tie_break="lowest_id")), 2)
    prompt = list(range(10))
    scene.stored(1, prompt[:5])
    sent = scene.arrive("r0", keys=prompt)
    assert isinstance(sent, Dispatch)
    assert [c.cost for c in sent.candidates] == [640 / 20_000, 320 / 20_000]
    assert sent.worker_id == 1
    busy = scene.arrive("r1", keys=prompt)
    assert isinstance(busy, Dispatch)
    assert [c.cost for c in busy.candidates] == [640 / 20_000, pytest.approx(640 / 20_000 * 1.01)]
    assert busy.worker_id == 0


def test_it_runs_where_it_is_installed(root: Path, tmp_path: Path) -> None:
    cut_bundled_trace(root, tmp_path)
    site = installed(tmp_path / "site")
    trace = str(next((tmp_path / "traces").glob("*.parquet")))
    asked = ("replay", trace, "--limit", "60", "--router", "least_wait", "--no-html", "--out")
    done = twin(site, *asked, "run", cwd=tmp_path, root=root)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["meta"]["router"].startswith("least-wait")
    assert report["counts"]["completed"] == 60

    queued = ("--set", "router.queue.prefill_busy_tokens=2000")
    done = twin(site, *asked, "queued", *queued, cwd=tmp_path, root=root)
    assert done.returncode == 0, done.stderr

    gone = twin(None, *asked, "none", cwd=tmp_path, root=root)
    assert gone.returncode == 2
    assert "least_wait" in gone.stderr
