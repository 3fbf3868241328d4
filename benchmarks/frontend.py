"""What the frontend costs: latency that it adds, requests and streamed tokens for each second of its CPU time.

Behind it is a backend that answers at once, so everything measured is the frontend (and the loopback, and this client,
which is a process of its own):

    python benchmarks/frontend.py

Beside it, under the same load, the server of vLLM in front of its own engine, and the frontend in front of that very
server (`twin serve --live --attach`), which shows what it adds. An engine of a tiny model on the CPU is started for it;
only the processes of HTTP servers count as CPU time, its engine's does not:

    python benchmarks/frontend.py --vllm PYTHON --checkpoint DIR
    python benchmarks/frontend.py --engine http://127.0.0.1:8001 --model tiny --pid 4242     # a server that runs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from measure import show

from executors.backend import Ask, Delta, End, Serving, WorkerGlance
from executors.mock_model import NAME, READABLE

WORD = "apple "
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTENING = "listening on "
CONFIG = Path(__file__).resolve().parent.parent / "tools" / "live" / "one.toml"


class AtOnce:
    """An answer that is there when it is asked for, one token to a delta."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.end: End | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for at in range(self._ask.max_tokens):
            yield Delta(token_ids=(READABLE + at % 500,), at_s=time.monotonic())
            await asyncio.sleep(0)  # as between steps of an engine
        self.end = End(outcome="length", output_tokens=self._ask.max_tokens, worker="w0")

    def cancel(self, reason: str) -> None:
        self.end = self.end or End(outcome="cancelled", output_tokens=0, reason=reason)


class Instant:
    """A backend without an engine."""

    def submit(self, ask: Ask) -> AtOnce:
        return AtOnce(ask)

    def serving(self) -> Serving:
        return Serving(models=(NAME,), missing=(), ready=(NAME,), context_tokens=131_072)

    def workers(self) -> Sequence[WorkerGlance]:
        return []

    def decisions(self, count: int) -> Sequence[Mapping[str, object]]:
        return []

    def busy_thresholds(self) -> Mapping[str, float | None]:
        return {}

    def set_busy_thresholds(self, changes: Mapping[str, float | None]) -> None: ...


async def serve() -> None:
    from executors.frontend.server import Frontend
    from executors.frontend.settings import Settings
    from executors.mock_model import tokenizer

    frontend = Frontend(Instant(), {NAME: tokenizer()}, Settings(port=0))
    await frontend.start()
    print(f"{LISTENING}http://127.0.0.1:{frontend.port}", flush=True)
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. `pids`: whose CPU time is its."""

    url: str
    model: str
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """User and system, of the processes and of nothing else (proc(5): fields 14 and 15)."""
        ticks = 0
        for pid in self.pids:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
        return ticks / TICKS_PER_S


class Client:
    """One connection; an HTTP client that costs little."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def connect(self) -> Client:
        address = urlsplit(self._target.url)
        self._reader, self._writer = await asyncio.open_connection(address.hostname, address.port)
        return self

    async def ask(self, prompt: str, max_tokens: int, *, stream: bool) -> tuple[float, int]:
        """Seconds to the first byte of the body, and events of the stream before its end."""
        asked = {"model": self._target.model, "prompt": prompt, "max_tokens": max_tokens, "stream": stream,
                 "ignore_eos": True}  # fmt: skip
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        begun_s = time.perf_counter()
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            sys.exit(f"{self._target.url}: {answer.decode()}")
        if not stream:
            length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await self._reader.readexactly(length)
            return time.perf_counter() - begun_s, 0
        told = await self._reader.read(65_536)
        first_s = time.perf_counter() - begun_s
        while not told.endswith(b"\r\n0\r\n\r\n"):
            told += await self._reader.read(65_536)
        return first_s, told.count(b"data: {")


async def latency(target: Target, requests: int, prompt: str, *, stream: bool) -> dict[str, float]:
    """One request at a time, milliseconds."""
    client = await Client(target).connect()
    took = []
    for _ in range(requests):
        first_s, _ = await client.ask(prompt, 8 if stream else 1, stream=stream)
        took.append(1e3 * first_s)
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


async def load(target: Target, requests: int, clients: int, max_tokens: int, *, stream: bool) -> dict[str, float]:
    """`clients` connections that ask again and again; rates for a second of the server's CPU time, and of the wall."""
    left = iter(range(requests))
    events = 0

    async def work() -> None:
        nonlocal events
        client = await Client(target).connect()
        for _ in left:
            _, came = await client.ask(WORD * 128, max_tokens, stream=stream)
            events += came

    cpu_s, wall_s = target.cpu_s(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    cpu_s, wall_s = target.cpu_s() - cpu_s, time.perf_counter() - wall_s
    done = requests * max_tokens if stream else requests
    made = {"per_cpu_s": round(done / max(cpu_s, 1 / TICKS_PER_S)), "per_s": round(done / wall_s)}
    return {**made, "events": events} if stream else made


async def figures(target: Target, requests: int, clients: int, words: int = 4096) -> dict[str, object]:
    """`words`: of the long prompt."""
    await load(target, max(requests // 10, 2), clients, 2, stream=False)  # warm
    return {
        "whole answer, prompt of 128 words": await latency(target, requests, WORD * 128, stream=False),
        f"whole answer, prompt of {words} words": await latency(target, requests, WORD * words, stream=False),
        "first token of a stream, 128 words": await latency(target, requests, WORD * 128, stream=True),
        "requests": await load(target, 4 * requests, clients, 1, stream=False),
        "streamed tokens": await load(target, max(requests // 10, 2), clients, 500, stream=True),
    }


@contextmanager
def own() -> Iterator[Target]:
    """Our frontend, in a process of its own."""
    child = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith(LISTENING):
            sys.exit("the frontend did not start")
        yield Target(line.removeprefix(LISTENING).strip(), NAME, (child.pid,))
    finally:
        child.kill()
        child.wait()


@contextmanager
def engine(python: Path, checkpoint: Path) -> Iterator[Target]:
    """A server of vLLM on the CPU, as `twin serve` starts it; its HTTP server is the process that was started, the
    engine a child of it."""
    from executors.starter import HostStarter, Model
    from twin.config_read import load

    pool = load(CONFIG, {}, ["allow_no_effect=true"]).workers[0]
    model = Model(checkpoint=str(checkpoint), served_as=checkpoint.name)
    with tempfile.TemporaryDirectory(prefix="frontend-") as folder:
        starter = HostStarter({"pool": pool}, model, {"vllm": python}, lambda: 0.0, Path(folder))
        planned = starter.plan()[0]
        log = Path(folder) / "engine.log"
        env = {**os.environ, **planned.env}
        with log.open("wb") as out:
            child = subprocess.Popen(planned.command, stdout=out, stderr=out, env=env, start_new_session=True)
        url = f"http://127.0.0.1:{planned.command[planned.command.index('--port') + 1]}"
        try:
            _until_healthy(url, child, log)
            yield Target(url, checkpoint.name, (child.pid,))
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()


def _until_healthy(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    while child.poll() is None:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    sys.exit(f"the engine ended with {child.returncode}: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def before(other: Target, checkpoint: Path) -> Iterator[Target]:
    """Our frontend, live, in front of a server that runs."""
    line = [sys.executable, "-m", "twin.cli", "serve", "--live", "--config", str(CONFIG), "--tokenizer",
            str(checkpoint), "--attach", f"pool={other.url}", "--port", "0"]  # fmt: skip
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = ""
        for told in child.stdout:
            if told.startswith(LISTENING):
                url = told.removeprefix(LISTENING).strip()
            if told.startswith("ready"):
                break
        else:
            sys.exit("the frontend did not become ready")
        yield Target(url, checkpoint.name, (child.pid,))
    finally:
        child.send_signal(signal.SIGINT)
        child.wait()


def beside(python: Path, checkpoint: Path, requests: int, clients: int) -> dict[str, object]:
    """The same load on vLLM's own server, and on ours in front of it."""
    words = 512  # the tiny model takes 4,096 tokens
    with engine(python, checkpoint) as theirs:
        found: dict[str, object] = {"vLLM alone": asyncio.run(figures(theirs, requests, clients, words))}
        with before(theirs, checkpoint) as ours:
            found["dynatwin in front of it"] = asyncio.run(figures(ours, requests, clients, words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="one after another; other loads have a share of it")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--engine", help="URL of another server to measure instead")
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--pid", type=int, action="append", default=[])
    parser.add_argument("--vllm", type=Path, help="interpreter of the environment that vLLM for the CPU is in")
    parser.add_argument("--checkpoint", type=Path, help="folder of the tiny model (tools/live/make_tiny_model.py)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    if (options.vllm is None) != (options.checkpoint is None):
        parser.error("--vllm and --checkpoint go together")
    if options.vllm:
        found = beside(options.vllm, options.checkpoint, options.requests, options.clients)
    elif options.engine:
        found = asyncio.run(
            figures(Target(options.engine, options.model, tuple(options.pid)), options.requests, options.clients)
        )
    else:
        with own() as target:
            found = asyncio.run(figures(target, options.requests, options.clients))
    server = "vLLM and dynatwin" if options.vllm else options.engine or "dynatwin"
    show("frontend", {"server": server, "clients": options.clients, **found})


if __name__ == "__main__":
    main()
