"""`make serve-demo`, its very command line: it becomes ready, stock clients are answered, Ctrl-C leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.live
LIMIT_S = 600
MARK = "DYNATWIN_TEST_MARK"
QUESTION = [{"role": "user", "content": "hello"}]


def command(root: Path, vllm_python: Path, model: Path, folder: Path) -> list[str]:
    """What make would run, with this interpreter's `twin`."""
    variables = {
        "VENV": str(folder / "venv"),
        "ENGINES": str(vllm_python.parent.parent),
        "TINY": str(model),
        "LIVE": str(folder),
        "ARGS": "--port 0",
    }
    line = ["make", "--dry-run", "serve-demo", *(f"{name}={value}" for name, value in variables.items())]
    told = subprocess.run(line, cwd=root, capture_output=True, text=True, check=True).stdout
    *_, last = (text for text in told.replace("\\\n", " ").splitlines() if "twin serve" in text)
    program, *rest = shlex.split(last)
    assert program == f"{variables['VENV']}/bin/twin"
    return [sys.executable, "-m", "twin", *rest]


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment: whatever was started by whom we started."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                environment = (path / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0"):
                found.append(int(path.name))
    return found


def test_it_serves_and_ends_with_all_that_it_started(
    root: Path, vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(root), MARK: mark}
    with (tmp_path / "notices").open("w") as notices:
        demo = subprocess.Popen(
            command(root, vllm_python, tiny_model, tmp_path), cwd=root, env=environment, stdout=subprocess.PIPE,
            stderr=notices, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert demo.stdout is not None
            said = [demo.stdout.readline() for _ in range(2)]
            assert said[0].startswith("listening on http://127.0.0.1:"), (tmp_path / "notices").read_text()
            assert said[1].startswith("ready: "), (tmp_path / "notices").read_text()
            asked(said[0].split()[-1], tiny_model.name)
            logs = {path.name for path in (tmp_path / "logs").glob("*.log")}
            assert logs == {"prefill-0.log", "decode-0.log"}  # one of each, as the documents say
            assert len(marked(mark)) >= 5  # ourselves, and of each worker the server and its engine at least
            demo.send_signal(signal.SIGINT)
            assert demo.wait(LIMIT_S) == 0
        finally:
            demo.kill()
            demo.wait(LIMIT_S)
            left = marked(mark)
            for pid in left:  # of a run that failed: engines outlive a server that was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert left == []


def asked(url: str, model: str) -> None:
    """By curl with a stream, and by the client of OpenAI."""
    body = json.dumps({"model": model, "messages": QUESTION, "max_tokens": 8, "stream": True})
    line = ["curl", "-sN", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    streamed = subprocess.run(line, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    assert streamed.count("data: ") > 2, streamed
    assert streamed.rstrip().endswith("data: [DONE]")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1
