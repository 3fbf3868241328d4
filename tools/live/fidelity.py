#!/usr/bin/env python3
"""Real engines against their twin, from nothing: the figures of docs/results/live-vs-twin.md.

    fidelity.py --engines VENV/bin/python --checkpoint DIR [--work DIR] [--write FILE] [--seed 0] [--repeats 3]

Each repeat starts the engines anew (vLLM on CPU, one process each), warms them with prompts of its own, and serves one
and the same load through `twin serve --live --record`: prompts and answers of mixed lengths, some with a common
beginning, Poisson arrivals. Then `twin record` fits the twin to the first half of the requests, `twin replay` runs all
of them, and `twin compare` sets the other half beside the repeats. Our own commands do all of that; this script starts
them, and copies what they print.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import aiohttp

from executors.assemble import Host, live_config, live_policies
from executors.engines.launch import Place, Ports, launch, port_needs
from executors.ports import LOOPBACK, PortAllocator
from executors.starter import Model
from policies.cluster import journal
from reports.record import RunRecord
from reports.repeats import JUDGED, compare_repeats
from reports.repeats_views import COLUMNS, fidelity_markdown, row
from twin.config_read import load

HERE = Path(__file__).resolve().parent
TWIN = [sys.executable, "-m", "twin"]
CONFIG = HERE / "fidelity.toml"
READY_S = 400
LIMIT_S = 120
TOKENS = (100, 4000)
"""Token ids of prompts, of the tiny model."""
PREFIXES, PREFIX_TOKENS, SHARED = 4, 256, 0.4
"""So many common beginnings of this length; the share of requests that have one of them."""
BLOCK = 20
"""Requests of a block: every other one is fitted to. About ten seconds, so that both halves have the same host."""
WARM_UP = 12
"""Requests that an engine answers before a run, of all lengths, alone and together."""


@dataclass(frozen=True)
class Asked:
    """One request of the load."""

    after_s: float
    prompt: list[int]
    outputs: int


def draw(requests: int, rate_rps: float, seed: int) -> list[Asked]:
    """Poisson arrivals; prompts of 32 to 1,000 tokens and answers of 4 to 160, skewed to the short ones."""
    rng = random.Random(f"{seed} fidelity")
    prefixes = [[rng.randint(*TOKENS) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    asked, at_s = [], 0.0
    for _ in range(requests):
        at_s += rng.expovariate(rate_rps)
        shared = rng.choice(prefixes) if rng.random() < SHARED else []
        own = [rng.randint(*TOKENS) for _ in range(log_uniform(rng, 32, 1000 - len(shared)))]
        asked.append(Asked(at_s, [*shared, *own], log_uniform(rng, 4, 160)))
    return asked


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


# ---------------------------------------------------------------- engines


@contextmanager
def engines(python: Path, checkpoint: Path):
    """The workers of the configuration, each as a server of its own; yields their URLs by group."""
    config = load(CONFIG, {}, ("allow_no_effect=true",))
    with tempfile.TemporaryDirectory(prefix="dt") as top, closing(PortAllocator()) as allocator:
        urls, lines = {}, []
        for group in config.workers:
            for number in range(group.count):
                name = f"{group.name}-{number}"
                folder = Path(top, name)
                folder.mkdir(mode=0o700)
                ports = Ports(host=LOOPBACK, **allocator.take(name, port_needs(group)))
                place = Place(
                    name=name, model=str(checkpoint), served_as="tiny", ports=ports, folder=str(folder), lease_s=30
                )
                started = launch(group, place)
                urls.setdefault(group.name, []).append(f"http://{ports.host}:{ports.http}")
                log = str(folder / "log")
                lines.append(
                    {
                        "name": name, "port": ports.http, "env": dict(started.env), "args": list(started.argv[2:]),
                        "log": log,
                    }
                )  # fmt: skip
        spec = Path(top, "spec.json")
        spec.write_text(json.dumps({"env": {}, "servers": lines}), encoding="utf-8")
        command = [str(python), str(HERE / "fork_servers.py"), str(spec), "--timeout-s", str(READY_S)]
        zygote = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert zygote.stdout is not None
            if not any(line.startswith("ALL READY") for line in zygote.stdout):
                raise SystemExit("\n".join(Path(line["log"]).read_text()[-3000:] for line in lines))
            yield urls
        finally:
            zygote.send_signal(signal.SIGTERM)
            zygote.wait(READY_S)


@contextmanager
def frontend(urls: dict[str, list[str]], checkpoint: Path, record: Path):
    """`twin serve` in front of them; yields its address once it serves."""
    attached = [f"--attach={group}={url}" for group, those in urls.items() for url in those]
    line = ["serve", "--live", "--config", str(CONFIG), "--tokenizer", str(checkpoint), "--served-as", "tiny"]
    command = [*TWIN, *line, *attached, "--record", str(record), "--port", "0", "--grace", "0", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if "ready" in (told := json.loads(text)):
                yield told["ready"]
                break
        else:
            raise SystemExit("twin serve did not come up")
    finally:
        process.send_signal(signal.SIGINT)
        if process.wait(LIMIT_S) != 0:
            raise SystemExit(f"twin serve ended with {process.returncode}")


# ---------------------------------------------------------------- load


async def ask(http: aiohttp.ClientSession, url: str, prompt: list[int], outputs: int) -> None:
    """One answer, streamed to its end."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": outputs, "temperature": 0, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        reply.raise_for_status()
        async for _ in reply.content:
            pass


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def warm(urls: list[str], seed: int) -> None:
    """Every shape of step once, with prompts that no run has."""
    rng = random.Random(f"{seed} warm")
    sizes = [32 * 2**i for i in range(5)] * 2 + [1000, 1000]
    async with session() as http:
        for together in (1, 4):
            for first in range(0, WARM_UP, together):
                those = sizes[first : first + together]
                prompts = [[rng.randint(*TOKENS) for _ in range(size)] for size in those]
                await asyncio.gather(*(ask(http, url, prompt, 40) for url in urls for prompt in prompts))


async def play(url: str, asked: list[Asked]) -> None:
    """The whole load, by the clock."""
    loop = asyncio.get_running_loop()
    async with session() as http:
        began_s = loop.time()

        async def one(each: Asked) -> None:
            await asyncio.sleep(max(0.0, began_s + each.after_s - loop.time()))
            await ask(http, url, each.prompt, each.outputs)

        await asyncio.gather(*map(one, asked))


def repeat(args: argparse.Namespace, asked: list[Asked], record: Path) -> float:
    """One live run of the load, recorded; the load average of the host at its end."""
    with engines(args.engines, args.checkpoint) as urls:
        asyncio.run(warm([url for those in urls.values() for url in those], args.seed))
        with frontend(urls, args.checkpoint, record) as address:
            began_s = time.monotonic()
            asyncio.run(play(address, asked))
            wall_s = time.monotonic() - began_s
            busy = os.getloadavg()[1]
    print(f"{record}: {len(asked)} requests in {wall_s:.0f} s, load average {busy:.1f}", file=sys.stderr)
    return busy


def orders_held(record: Path) -> int:
    """How many events of a run's journal fresh policies answer with the same orders; ends where one differs."""
    config = load(record / "config.toml", {}, ("allow_no_effect=true",))
    host = Host(model=Model(checkpoint="", served_as="tiny"), pythons={}, attached={})
    served, _ = live_config(config, host)
    policies = live_policies(served, served.workers[0].engine.block_size)
    with (record / "journal.jsonl").open(encoding="utf-8") as lines:
        differs = journal.replay(lines, policies)
    if differs is not None:
        raise SystemExit(f"{record}: the journal does not replay: {differs}")
    with (record / "journal.jsonl").open(encoding="utf-8") as lines:
        return sum(1 for _ in lines) - 1


# ---------------------------------------------------------------- the twin


def twin(*line: object) -> str:
    """A command of ours; what it printed."""
    done = subprocess.run([*TWIN, *map(str, line)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"twin {' '.join(map(str, line))}: {done.stderr}")
    return done.stdout


def halves(record: Path, rows: int) -> tuple[str, ...]:
    """Mean TTFT and mean time per token of the first `rows` requests, and of the others, in ms."""
    columns = RunRecord(record).requests
    first, last, ttft = (columns.floats(name) for name in ("first_token_s", "last_token_s", "ttft_s"))
    gaps = columns.floats("output_tokens") - 1
    told = []
    for part in (slice(0, rows), slice(rows, None)):
        told.append(f"{1e3 * ttft[part].mean():.1f}")
        told.append(f"{1e3 * (last - first)[part].sum() / gaps[part].sum():.2f}")
    return tuple(told)


def modelled(records: list[Path], folder: Path, *split: object) -> tuple[str, Path]:
    """A fit with that split, and its replay: what `twin record` told, and the folder of the run."""
    told = twin("record", *records, *split, "--out", folder, "--quiet")
    replayed = folder / "replay"
    twin("replay", "--config", folder / "twin.toml", "--out", replayed, "--no-html", "--no-leap", "--quiet")
    return told, replayed


def page(args: argparse.Namespace, records: list[Path], busy: list[float], held: int) -> str:
    """docs/results/live-vs-twin.md."""
    told, replayed = modelled(records, args.work / "blocks", "--fit-blocks", BLOCK)
    found = compare_repeats(records, replayed, block=BLOCK)
    half = args.requests // 2
    _, of_halves = modelled(records, args.work / "halves", "--fit-rows", half)
    later = compare_repeats(records, of_halves)
    shown = "\n".join(line for line in told.splitlines() if not line.startswith(("wrote", "use", "      twin"))).strip()
    drift = "\n".join(
        f"| {record.name} | {' | '.join(halves(record, half))} | {average:.1f} |"
        for record, average in zip(records, busy, strict=True)
    )
    drift += f"\n| twin | {' | '.join(halves(replayed, half))} | |"
    verdicts = "\n".join(f"| {' | '.join(row(later.figure(name)))} |" for name in JUDGED)
    return f"""# Live against twin

{
        PREFACE.format(
            requests=args.requests,
            rate=args.rate_rps,
            prefixes=PREFIXES,
            tokens=PREFIX_TOKENS,
            shared=SHARED,
            repeats=len(records),
            block=BLOCK,
            cores=os.cpu_count(),
        )
    }
```bash
tools/live/install_engines.sh VENV && VENV/bin/python tools/live/make_tiny_model.py MODEL
python tools/live/fidelity.py --engines VENV/bin/python --checkpoint MODEL --requests {args.requests} \\
    --rate-rps {args.rate_rps:g} --repeats {len(records)} --seed {args.seed} --write docs/results/live-vs-twin.md
```

Measured {args.measured}, seed {args.seed}.

{fidelity_markdown(found)}

{held:,} events of the {len(records)} journals, decided once more by fresh policies, gave the same orders.

## What was fitted

```
{shown}
```

## How steady the host was

Means by half of the requests. The twin has the same step times throughout, so the load explains as much as its own
halves differ; the rest is the host, which no model of the engines knows.

| run | TTFT of the first {half}, ms | per token | TTFT of the others, ms | per token | load average |
| --- | ---: | ---: | ---: | ---: | ---: |
{drift}

That is why the halves alternate. Fitted to the first {
        half
    } requests of each repeat, and compared by the others, the twin
keeps the pace of the first half:

| {" | ".join(COLUMNS)} |
| {" | ".join(["---"] * len(COLUMNS))} |
{verdicts}
"""


PREFACE = """\
Real engines on a CPU, recorded, and the simulated replay of the same requests beside them: how far off the twin is, and
how far the live system is off itself. Made by `tools/live/fidelity.py`, which anybody can run:

* **Live**: 2 workers of vLLM on CPU with a model of 3.2 M random parameters (`tools/live/fidelity.toml`), each a
  process of its own, behind `twin serve --live` with the `kv` router; on a shared machine with {cores} cores, on which
  other work ran.
* **Load**: {requests} requests, Poisson arrivals at {rate:g}/s, prompts of 32 to 1,000 tokens and answers of 4 to 160,
  log-uniform; {shared:.0%} of the prompts begin with one of {prefixes} prefixes of {tokens} tokens. The same in each of
  {repeats} repeats; engines start anew for each, and are warm before it.
* **Calibration**: `twin record` fits a `linear` step model and a constant outside the engines to one half of the
  requests of each repeat: every other block of {block}.
* **Comparison**: `twin replay` plays all requests of the first repeat's trace, `twin compare` looks at the other half,
  which no fit has seen. Simulated figures are those of the twin, everything else is measured.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, default=os.environ.get("DYNATWIN_VLLM_PYTHON"))
    parser.add_argument("--checkpoint", type=Path, default=os.environ.get("DYNATWIN_TINY_MODEL"))
    parser.add_argument("--work", type=Path, default=Path("runs/fidelity"), help="folder of the runs")
    parser.add_argument("--write", type=Path, help="page to write; otherwise it is printed")
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--rate-rps", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="no new runs: fit and compare those of --work again")
    args = parser.parse_args()
    if args.engines is None or args.checkpoint is None:
        parser.error("--engines and --checkpoint, or DYNATWIN_VLLM_PYTHON and DYNATWIN_TINY_MODEL")
    asked = draw(args.requests, args.rate_rps, args.seed)
    records = [args.work / f"live-{number}" for number in range(1, args.repeats + 1)]
    averages = args.work / "load-averages.json"
    if not args.again:
        averages.parent.mkdir(parents=True, exist_ok=True)
        averages.write_text(json.dumps([repeat(args, asked, record) for record in records]), encoding="utf-8")
    busy = json.loads(averages.read_text(encoding="utf-8"))
    held = sum(map(orders_held, records))
    args.measured = date.fromtimestamp((records[0] / "requests.parquet").stat().st_mtime).isoformat()
    made = page(args, records, busy, held)
    if args.write is None:
        print(made)
    else:
        args.write.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
