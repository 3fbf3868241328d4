"""What a shadow costs: on the path of a request of the live world, and in the process that simulates.

Requests have prompts of `--tokens` tokens in blocks of 16, of which half begin alike, and answers of 1 to 200 tokens;
they come at 40 a second, to 4 workers (llama-3.1-8b on H100, kv router).

    python benchmarks/shadow.py
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import show

from executors.backend import Ask, End
from executors.requests import Content, OpenRequest, Stream
from executors.shadow.watch import MOST_FACTS, Shadow, Wanted
from policies.cluster.blocks import ContentTree
from policies.cluster.ids import RequestId, WorkerId
from twin.config_read import load
from twin.engine.ticks import instant
from twin.shadow.ahead import Ahead
from twin.shadow.facts import Arrived, Batch, Ended, Fact, Joined
from twin.shadow.kept import LetGo
from twin.shadow.pipe import pack

CONFIG = """
[[workers]]
name = "pool"
count = 4
model = "llama-3.1-8b"
gpu = "h100_sxm"
[router]
mode = "kv"
"""
BLOCK, RATE_RPS, BATCH_S = 16, 40.0, 0.2


class Noted:
    """Instead of the process, and of the clock: keeps nothing."""

    async def answer(self, batch: Batch) -> None:
        await asyncio.Event().wait()

    def now(self) -> float:
        return 1.0


async def noted(requests: int, tokens: int) -> tuple[list[Fact], float]:
    """The notes of so many requests, and CPU seconds that each takes of the loop that serves."""
    shadow = Shadow(Noted(), Noted(), Wanted())  # type: ignore[arg-type]
    tree, opened = ContentTree(BLOCK, BLOCK), []
    for number in range(requests):
        own = number % 2
        ids = [number + 1 if own else 0, *range(tokens - 1)]
        ask = Ask(request_id=RequestId(f"r{number}"), token_ids=ids, max_tokens=200, model="m")
        opened.append(OpenRequest(ask, 0.0, Stream(lambda _: None), Content(tree, ask, hashes=True)))
    end = End(outcome="length", output_tokens=10)
    began = time.process_time()
    for request in opened:
        shadow.arrived(request)
        shadow.ended(request, end)
    spent = time.process_time() - began
    facts: list[Fact] = list(shadow._facts)
    shadow._talking.cancel()
    return facts, spent / requests


def packed(facts: list[Fact]) -> float:
    """CPU seconds of writing down one full batch."""
    began = time.process_time()
    pack(Batch(1.0, tuple(facts[:MOST_FACTS])))
    return time.process_time() - began


def simulated(arrivals: list[Arrived], seed: int) -> float:
    """CPU seconds of simulating them, in batches."""
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "c.toml"
        file.write_text(CONFIG, encoding="utf-8")
        ahead = Ahead(load(file, {}, ("allow_no_effect=true",)), LetGo(), 60.0)
    ahead.take([Joined(0.0, WorkerId(number), "pool", None, None) for number in range(4)], 0.0)
    facts: list[Fact] = []
    at_s = 0.0
    for one in arrivals:
        at_s = instant(at_s + rng.expovariate(RATE_RPS))
        took_s = rng.uniform(0.1, 2.0)
        facts.append(one._replace(at_s=at_s))
        facts.append(
            Ended(at_s + took_s, one.request_id, "completed", rng.randrange(1, 201), at_s + 0.05, at_s + took_s)
        )
    facts.sort(key=lambda fact: fact.at_s)
    began, first, now_s = time.process_time(), 0, 0.0
    while first < len(facts):
        now_s, after = now_s + BATCH_S, first
        while after < len(facts) and facts[after].at_s < now_s:
            after += 1
        ahead.take(facts[first:after], now_s)
        first = after
    ahead.finish(now_s)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    facts, note_s = asyncio.run(noted(min(args.requests, 5_000), args.tokens))
    known = [fact for fact in facts if isinstance(fact, Arrived)]
    arrivals = [known[n % len(known)]._replace(request_id=RequestId(f"r{n}")) for n in range(args.requests)]
    cpu_s = simulated(arrivals, args.seed)
    show(
        "shadow",
        {
            "note_us_per_request": round(1e6 * note_s, 1),
            "pack_ms_per_batch": round(1e3 * packed(facts), 2),
            "simulated_requests": args.requests,
            "simulated_requests_per_cpu_s": round(args.requests / cpu_s),
        },
    )


if __name__ == "__main__":
    main()
