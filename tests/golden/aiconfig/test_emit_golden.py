"""Every emitted file of eight plans, byte by byte: a change in them is seen before it is shipped.

`DYNATWIN_WRITE_GOLDEN=1 python -m pytest tests/golden/aiconfig` writes the files anew; the round trips and schemas in
tests/unit/aiconfig_emit would still fail if they were wrong.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from emit_builders import agg, disagg, plan, wide

from aiconfig.emit.files import emit, emit_all, write
from aiconfig.emit.plan import Plan
from twin.config import Config, EngineConfig, WorkerGroup

HERE = Path(__file__).parent
PLANS: dict[str, Plan] = {
    "vllm-agg": plan(
        agg("vllm", "llama-3.1-8b"),
        config=Config(
            workers=(WorkerGroup(model="llama-3.1-8b", gpu="h200_sxm", tp=2, count=2, engine=EngineConfig()),)
        ),
    ),
    "vllm-disagg": plan(disagg("vllm")),
    "vllm-wide": plan(wide("vllm"), checkpoint="/models/deepseek v3"),
    "sglang-agg": plan(agg("sglang"), engine_version="0.5.2"),
    "sglang-disagg": plan(disagg("sglang")),
    "sglang-wide": plan(wide("sglang")),
    "trtllm-disagg": plan(disagg("trtllm"), engine_version="1.5"),
    "trtllm-wide": plan(wide("trtllm")),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_files_are_those_that_were_reviewed(name: str) -> None:
    emitted = emit_all(PLANS[name])
    files = {path: text for path, text in emitted.files.items() if path != "verify.py"}  # the same in all of them
    files["left_out.txt"] = "".join(f"{line}\n" for line in emitted.left_out)
    folder = HERE / name
    if os.environ.get("DYNATWIN_WRITE_GOLDEN"):
        write(files, folder)
    there = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert sorted(files) == sorted(there)
    for path, text in files.items():
        assert text == there[path], f"{path} changed; see the head of this file"


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.sh")), ids=lambda path: str(path.relative_to(HERE)))
def test_bash_can_read_every_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_twins_configuration_loads_again(tmp_path: Path) -> None:
    from twin.config_read import load

    made = PLANS["vllm-agg"]
    write(emit(made, "twin"), tmp_path)
    assert load(tmp_path / "best.toml") == made.config
