"""One whole selection: hash the prompt's tokens, match them, score every worker, book the best. Milliseconds by stage.

64 workers whose caches are told by block events, open requests in the books, prompts of 2k, 8k and 32k tokens of which
half go on from a cached one. Everything is what mode kv runs on; nothing is precomputed. The block size counts: 16
tokens make four times the blocks of 64.

    python benchmarks/router_selection.py [--workers 64] [--requests 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from measure import show
from router_kv import settings

from policies.cluster.events import WorkerUp
from policies.cluster.hashing import chain_hashes, local_hashes
from policies.cluster.ids import BlockHash, RequestId, Role, WorkerId
from policies.cluster.kv_events import IndexDump, KvStored, RankId
from policies.router import cost
from policies.router.books import Books
from policies.router.chains.live import LiveIndex
from policies.router.select import Ties

SIZES_TOKENS = {"2k": 2048, "8k": 8192, "32k": 32768}
GOAL_MS = {"2k": 0.2, "8k": 0.5, "32k": 1.5}
PEER_MS = {"2k": "0.23", "8k": "0.6", "32k": "1.8 to 3.0"}
"""What the compiled peer's selection service takes (measured elsewhere, p50): a figure to stand beside, not a ratio."""

OPEN_REQUESTS = 512
VOCABULARY = 128_000
STAGES = ("hash", "match", "score", "book")


class Selector:
    """The parts of mode kv in a row, for one data-parallel rank per worker."""

    def __init__(self, workers: int, block_size: int, seed: int) -> None:
        knobs = settings("kv", block_size, seed)
        self.block_size = block_size
        self.live = LiveIndex(block_size)
        self.books = Books(block_size)
        self.open: deque[RequestId] = deque()
        self._weights = cost.weights(knobs)
        self._ties = Ties(knobs.tie_break, knobs.seed)
        self._ids = [WorkerId(n) for n in range(workers)]
        self._ranks = [RankId(worker_id, 0) for worker_id in self._ids]
        self._next_event = [0] * workers
        for worker_id in self._ids:
            self._up(worker_id)
        self._loads = [self.books.load(worker_id) for worker_id in self._ids]

    def select(self, request_id: RequestId, tokens: Sequence[int]) -> tuple[WorkerId, list[int]]:
        """The worker with the lowest cost, booked; and the clock (ns) before and after each stage."""
        times = [time.process_time_ns()]
        isl = len(tokens)
        hashes = {self.block_size: array("Q", local_hashes(tokens, self.block_size))}
        times.append(time.process_time_ns())
        prompt = self.live.prompt(isl, hashes)
        cached = self.live.columns(prompt, self._ranks).device_blocks
        times.append(time.process_time_ns())
        path = prompt.paths[self.block_size]
        shared = self.books.depths(path).get
        costs = cost.costs(
            self._weights,
            isl,
            self.block_size,
            [load.prefill_tokens for load in self._loads],
            [load.blocks + path.blocks - shared(load.worker_id, 0) for load in self._loads],
            [load.requests for load in self._loads],
            cached,
        )
        at, _ = self._ties.lowest(request_id, costs, self._ids)
        times.append(time.process_time_ns())
        self.books.book(request_id, self._ids[at], path, 0, isl - cached[at] * self.block_size)
        times.append(time.process_time_ns())
        self.open.append(request_id)
        return self._ids[at], times

    def computed(self, worker_id: WorkerId, tokens: Sequence[int]) -> None:
        """The worker says that it holds a prompt now; the oldest request ends."""
        local = local_hashes(tokens, self.block_size)
        exts = chain_hashes(local)
        self.live.on(
            KvStored(
                at_s=0.0,
                worker_id=worker_id,
                event_id=self._next_event[worker_id],
                exts=tuple(exts),
                local_hashes=tuple(map(BlockHash, local)),
            )
        )
        self._next_event[worker_id] += 1
        if len(self.open) > OPEN_REQUESTS:
            self.books.free(self.open.popleft())

    def _up(self, worker_id: WorkerId) -> None:
        self.live.on(
            WorkerUp(
                at_s=0.0,
                worker_id=worker_id,
                name=f"w{worker_id}",
                role=Role.MIXED,
                block_size=self.block_size,
                total_blocks=65_536,
                max_batched_tokens=8192,
                max_num_seqs=256,
            )
        )
        self.live.on(IndexDump(at_s=0.0, worker_id=worker_id, ask=1, last_id=None, entries=()))


class Prompts:
    """Token lists of which half go on from an earlier one, as turns of sessions do."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._system = self._fresh(1024)
        self._earlier: list[list[int]] = []

    def of(self, tokens: int) -> list[int]:
        known = self._rng.random() < 0.5 and self._earlier
        head = self._rng.choice(self._earlier)[: tokens * 3 // 4] if known else self._system
        prompt = head + self._fresh(tokens - len(head))
        self._earlier.append(prompt)
        return prompt

    def _fresh(self, tokens: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(tokens)]


class Figures(NamedTuple):
    p50_ms: float
    p99_ms: float


def middle(times_ns: list[int]) -> Figures:
    times_ns.sort()
    return Figures(times_ns[len(times_ns) // 2] / 1e6, times_ns[int(len(times_ns) * 0.99)] / 1e6)


def measured(args: argparse.Namespace, block_size: int, tokens: int, ready: bool) -> dict[str, object]:
    """One size of prompt; `ready`: tokens come as an array of 32-bit numbers, as a tokenizer can hand them over."""
    selector, source = Selector(args.workers, block_size, args.seed), Prompts(args.seed)
    prompts = [source.of(tokens) for _ in range(args.warm + args.requests)]
    times: list[list[int]] = []
    chained: list[int] = []
    gc.collect()
    gc.freeze()  # the prompts of this benchmark are no garbage to look through
    for n, drawn in enumerate(prompts):
        prompt: Sequence[int] = array("I", drawn) if ready else drawn
        worker_id, stamps = selector.select(RequestId(f"r{n}"), prompt)
        selector.computed(worker_id, prompt)
        if n >= args.warm:
            times.append(stamps)
            local = local_hashes(prompt, block_size)
            before = time.process_time_ns()
            chain_hashes(local)
            chained.append(time.process_time_ns() - before)
    gc.unfreeze()
    whole = middle([stamps[-1] - stamps[0] for stamps in times])
    stages = [middle([stamps[i + 1] - stamps[i] for stamps in times]).p50_ms for i in range(len(STAGES))]
    return {
        "p50_ms": round(whole.p50_ms, 3),
        "p99_ms": round(whole.p99_ms, 3),
        **{f"{stage}_ms": round(ms, 3) for stage, ms in zip(STAGES, stages, strict=True)},
        "chain_hashes_ms (not needed)": round(middle(chained).p50_ms, 3),
        "index_blocks": selector.live.sizes.resident,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=300, help="measured, of each size")
    parser.add_argument("--warm", type=int, default=600, help="requests before those")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, object] = {"workers": args.workers, "seed": args.seed, "requests": args.requests}
    for name, tokens in SIZES_TOKENS.items():
        rows: dict[str, object] = {"goal p50_ms": GOAL_MS[name], "peer's service p50_ms (elsewhere)": PEER_MS[name]}
        for block_size in (16, 64):
            rows[f"block {block_size}, list of tokens"] = measured(args, block_size, tokens, False)
            rows[f"block {block_size}, array of tokens"] = measured(args, block_size, tokens, True)
        figures[name] = rows
    show("router_selection", figures)


if __name__ == "__main__":
    main()
