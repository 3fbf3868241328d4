"""A fake vLLM as a process: a starter is given `interpreter(folder)` for the Python of its environment.

What would start vLLM's server starts `FakeVllm` on the host and port of the same line. It ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from tokenizers import Tokenizer, models

BLOCK = 32
MODEL = "tiny"


def interpreter(folder: Path) -> Path:
    """A program that takes the line of vLLM's server."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def checkpoint(folder: Path) -> Path:
    """A model's folder, with a tokenizer and nothing else."""
    made = folder / MODEL
    made.mkdir()
    words = {"a": 0, "b": 1, "c": 2}
    (made / "tokenizer.json").write_text(
        str(Tokenizer(models.WordLevel(words, unk_token="a")).to_str()), encoding="utf-8"
    )
    return made


async def _serve(host: str, port: int) -> None:
    from fake_engines import FakeVllm

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with FakeVllm(host, port):
        await ended.wait()


if __name__ == "__main__":
    line = sys.argv
    asyncio.run(_serve(line[line.index("--host") + 1], int(line[line.index("--port") + 1])))
