"""One whole selection: hash the prompt's tokens, match them, score every worker, book the best. Milliseconds by stage.

64 workers whose caches are told by block events, open requests in the books, prompts of 2k, 8k and 32k tokens of which
half go on from a cached one. Everything is what mode kv runs on; nothing is precomputed. The block size counts: 16
tokens make four times the blocks of 64. With the peer's interpreter (DYNATWIN_PEER_PYTHON) its selection service gets
the same prompts, in turn; without it, figures that were stated for it elsewhere stand beside ours, and the output says
so.

    python benchmarks/router_selection.py [--workers 64] [--requests 300] [--runs 1] [--seed 0]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import alternate, show
from prompts import BLOCK_SIZES, OPEN_REQUESTS, SIZES_TOKENS, Prompts, percentiles
from router_kv import settings

from policies.cluster.events import WorkerUp
from policies.cluster.hashing import chain_hashes, local_hashes
from policies.cluster.ids import BlockHash, RankId, RequestId, Role, WorkerId
from policies.cluster.kv_events import IndexDump, KvStored
from policies.router import cost
from policies.router.books import Books
from policies.router.chains.live import LiveIndex
from policies.router.select import Ties

GOAL_MS = {"2k": 0.2, "8k": 0.5, "32k": 1.5}
STATED_MS = {"2k": "0.23", "8k": "0.6", "32k": "1.8 to 3.0"}
"""What is stated for the compiled peer's selection service (p50, elsewhere): stands beside ours where it cannot run."""

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

    def select(self, request_id: RequestId, tokens: Sequence[int]) -> tuple[WorkerId, int, list[int]]:
        """The worker with the lowest cost, booked; blocks cached there; the clock (ns) before and after each stage."""
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
            [load.blocks + path.blocks - shared(load.place, 0) for load in self._loads],
            [load.requests for load in self._loads],
            cached,
        )
        at, _ = self._ties.lowest(request_id, costs, self._ids)
        times.append(time.process_time_ns())
        self.books.book(request_id, self._ids[at], path, 0, isl - cached[at] * self.block_size)
        times.append(time.process_time_ns())
        self.open.append(request_id)
        return self._ids[at], cached[at], times

    def computed(self, request_id: RequestId, worker_id: WorkerId, tokens: Sequence[int]) -> None:
        """The worker says that it holds a prompt now; the oldest request ends."""
        self.books.prefill_done(request_id)
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


def measured(args: argparse.Namespace, block_size: int, tokens: int, ready: bool) -> dict[str, float]:
    """One size of prompt; `ready`: tokens come as an array of 32-bit numbers, as a tokenizer can hand them over."""
    selector, source = Selector(args.workers, block_size, args.seed), Prompts(args.seed)
    prompts = [source.of(tokens) for _ in range(args.warm + args.requests)]
    times: list[list[int]] = []
    walls: list[int] = []
    chained: list[int] = []
    cached: list[int] = []
    gc.collect()
    gc.freeze()  # the prompts of this benchmark are no garbage to look through
    for n, drawn in enumerate(prompts):
        prompt: Sequence[int] = array("I", drawn) if ready else drawn
        before = time.perf_counter_ns()
        request_id = RequestId(f"r{n}")
        worker_id, found, stamps = selector.select(request_id, prompt)
        wall = time.perf_counter_ns() - before
        selector.computed(request_id, worker_id, prompt)
        if n >= args.warm:
            times.append(stamps)
            walls.append(wall)
            cached.append(found)
            local = local_hashes(prompt, block_size)
            before = time.process_time_ns()
            chain_hashes(local)
            chained.append(time.process_time_ns() - before)
    gc.unfreeze()
    stages = {
        stage: percentiles(stage, [stamps[i + 1] - stamps[i] for stamps in times])[f"{stage}_p50_ms"]
        for i, stage in enumerate(STAGES)
    }
    return {
        **percentiles("cpu", [stamps[-1] - stamps[0] for stamps in times]),
        **percentiles("wall", walls),
        **{f"{stage}_ms": ms for stage, ms in stages.items()},
        "chain_hashes_ms (not needed)": percentiles("chain", chained)["chain_p50_ms"],
        "mean_cached_tokens": round(statistics.fmean(cached) * block_size),
        "index_blocks": selector.live.sizes.resident,
    }


def ours(args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    return {
        name: {
            f"block {size}{', array of tokens' if ready else ''}": measured(args, size, tokens, ready)
            for size in BLOCK_SIZES
            for ready in (False, True)
        }
        for name, tokens in SIZES_TOKENS.items()
    }


def side_by_side(args: argparse.Namespace, peer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both in turn; of each figure the median of the runs."""
    os.environ["DYN_LOG"] = "error"  # a line in its log for each selection is not what is measured
    same = [f"--{name}={getattr(args, name)}" for name in ("workers", "requests", "warm", "seed")]
    other = str(Path(__file__).with_name("peer_selection.py"))
    runs = alternate({"ours": [sys.executable, __file__, "--one", *same], "peer": [peer, other, *same]}, args.runs)
    mine, theirs = (middle([json.loads(cost.output) for cost in runs[name]]) for name in ("ours", "peer"))
    return mine, theirs


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: middle([run[name] for run in runs])
        if isinstance(value, dict)
        else round(statistics.median(run[name] for run in runs), 3)
        for name, value in runs[0].items()
    }


def table(mine: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, object]:
    """By size of prompt and block: ours, the goal, and the peer, measured or stated."""
    rows: dict[str, object] = {}
    for name, sizes in mine.items():
        for label, figures in sizes.items():
            row = {"ours": figures, "goal p50_ms": GOAL_MS[name]}
            if theirs is None:
                row["peer p50_ms, stated"] = STATED_MS[name]
            elif label in theirs[name]:
                row["peer"] = theirs[name][label]
                row["ratio of wall p50"] = round(figures["wall_p50_ms"] / theirs[name][label]["wall_p50_ms"], 3)
            rows[f"{name} tokens, {label}"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=300, help="measured, of each size")
    parser.add_argument("--warm", type=int, default=600, help="requests before those")
    parser.add_argument("--runs", type=int, default=1, help="pairs of runs beside the peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="ours once, as one line of JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(ours(args)))
        return
    peer = os.environ.get("DYNATWIN_PEER_PYTHON")
    mine, theirs = side_by_side(args, peer) if peer else (ours(args), None)
    beside = (
        "the peer's selection service, measured in turn" if peer else "figures stated for the peer, not measured here"
    )
    knobs = {"workers": args.workers, "seed": args.seed, "requests": args.requests, "beside": beside}
    show("router_selection", {**knobs, "figures": table(mine, theirs)})


if __name__ == "__main__":
    main()
