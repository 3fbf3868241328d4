"""The process of a shadow: batches of facts from its standard input, an answer to each on its standard output.

It ends when its input does, takes no signals of a terminal, and leaves the processor to whoever serves.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import IO

from policies.errors import TwinError
from traces.errors import TraceError
from twin.config import Config
from twin.config_read import load
from twin.shadow.ahead import Ahead
from twin.shadow.facts import Batch, Progress, Ready, Refused, Setup
from twin.shadow.kept import Kept, LetGo
from twin.shadow.pipe import pack, receive

NICER = 10
"""Steps of politeness below the processes that serve (nice)."""


def serve(told: IO[bytes], out: IO[bytes]) -> None:
    """One setup, then batches until there are no more."""
    setup = receive(told)
    if setup is None:
        return
    try:
        config = _config(setup)
        Ahead(config, LetGo(), setup.wait_s)
    except (TwinError, TraceError) as error:
        _say(out, Refused(" ".join(str(error).split())))
        return
    _say(out, Ready())
    batch = receive(told)
    if batch is None:
        return
    kept = Kept(Path(setup.record), config) if setup.record is not None else None  # live folder is there by now
    ahead = Ahead(config, LetGo() if kept is None else kept.sinks, setup.wait_s)  # type: ignore[arg-type]
    complete = False
    try:
        while batch is not None:
            _say(out, _answer(ahead, batch))
            complete = batch.over
            batch = None if batch.over else receive(told)
    finally:
        if kept is not None:
            if not complete:
                ahead.world.abandon()
            kept.close(ahead, complete=complete)


def _answer(ahead: Ahead, batch: Batch) -> Progress:
    told = ahead.take(batch.facts, batch.now_s)
    if not batch.over:
        return told
    last = ahead.finish(batch.now_s)
    left_out = {
        name: told.left_out.get(name, 0) + last.left_out.get(name, 0) for name in (*told.left_out, *last.left_out)
    }
    return last._replace(pairs=(*told.pairs, *last.pairs), left_out=left_out, notices=(*told.notices, *last.notices))


def _config(setup: Setup) -> Config:
    """As it is served; what has no effect in a simulation may have one there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "served.toml"
        file.write_text(setup.config, encoding="utf-8")
        return load(file, {}, ("allow_no_effect=true",))


def _say(out: IO[bytes], message: Ready | Refused | Progress) -> None:
    out.write(pack(message))
    out.flush()


def main() -> None:
    """Its pipes are its own: whatever else is printed goes to stderr."""
    os.nice(NICER)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, out)
    except BrokenPipeError:
        return  # whoever asked is gone
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
