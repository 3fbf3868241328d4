"""What one routing decision costs, per mode, side by side: microseconds of CPU per request, index and books included.

A stream of requests with shared prefixes (synthetic, seeded, shaped after the Mooncake conversation trace; or a real
trace with `--trace`) is first played through each mode in a small world with one LRU cache per worker. The events of
that run are then played again, in one loop, through a fresh controller with a fresh policy: once with the policy
itself, once with one that only hands back the recorded orders. The difference is what the policy costs.

    python benchmarks/router_kv.py --requests 10000 --workers 16 --seed 0
    python benchmarks/router_kv.py --trace ../shared/traces/mooncake/conversation_trace.0-45min.jsonl
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from policies.cluster.actions import Action, Dispatch
from policies.cluster.blocks import BlockPath, BlockRun, Branch, ContentTree
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    RequestArrived,
    RequestFinished,
    WorkerUp,
)
from policies.cluster.ids import RequestId, Role, WorkerId
from policies.cluster.state import ClusterView
from policies.router.build import build
from policies.router.settings import RouterSettings

KEY_TOKENS = 512
MODES = ("round-robin", "random", "least-loaded", "power-of-two", "kv")


class Row(NamedTuple):
    arrival_s: float
    isl: int
    osl: int
    keys: list[int]


def synthetic(requests: int, seed: int) -> Iterator[Row]:
    """Sessions that grow turn by turn; the first key is shared by all (a system prompt)."""
    rng = np.random.default_rng(seed)
    fresh = count(1)
    sessions: list[list[int]] = []
    now_s = 0.0
    for _ in range(requests):
        now_s += float(rng.exponential(1 / 3.3))
        old = len(sessions) > 0 and rng.random() < 0.45
        keys = sessions[int(rng.integers(max(0, len(sessions) - 400), len(sessions)))] if old else [0]
        grown = max(1, int(rng.lognormal(1.0 if old else 2.6, 0.9)))
        keys = [*keys, *(next(fresh) for _ in range(grown))][:240]
        sessions.append(keys)
        yield Row(now_s, len(keys) * KEY_TOKENS - int(rng.integers(0, KEY_TOKENS)), int(rng.lognormal(5.5, 0.8)), keys)


def recorded(path: Path, requests: int) -> Iterator[Row]:
    """The rows of a Mooncake trace."""
    with path.open() as lines:
        for line, _ in zip(lines, range(requests), strict=False):
            row = json.loads(line)
            yield Row(row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"])


class Cache:
    """Blocks of one worker: per branch how far it is held, the least recently used cut from its end."""

    def __init__(self, blocks: int) -> None:
        self._free = blocks
        self._ends: OrderedDict[Branch, int] = OrderedDict()

    def take(self, path: BlockPath) -> tuple[list[BlockRun], list[BlockRun]]:
        """Hold a path; what is stored and what must go for it."""
        stored, removed = [], []
        for branch, end in path.pieces:
            held = self._ends.get(branch, branch.start)
            if end > held:
                stored.append(BlockRun(branch, held, end))
                self._ends[branch] = end
                self._free -= end - held
        for branch, _ in reversed(path.pieces):
            self._ends.move_to_end(branch)
        while self._free < 0:
            branch, end = next(iter(self._ends.items()))
            lo = max(branch.start, end + self._free)
            removed.append(BlockRun(branch, lo, end))
            self._free += end - lo
            if lo == branch.start:
                del self._ends[branch]
            else:
                self._ends[branch] = lo
        return stored, removed


class World:
    """Plays rows: prefill and decode take fixed times per token, block events come with the first token."""

    def __init__(self, policy: Policy, workers: int, block_size: int, blocks: int) -> None:
        self.controller = Controller([policy])
        self.events: list[Event] = []
        self.orders: dict[RequestId, Dispatch] = {}
        self._tree = ContentTree(KEY_TOKENS, block_size)
        self._caches = [Cache(blocks) for _ in range(workers)]
        for n in range(workers):
            self._post(
                WorkerUp(
                    at_s=0.0,
                    worker_id=WorkerId(n),
                    name=f"w{n}",
                    role=Role.MIXED,
                    block_size=block_size,
                    total_blocks=blocks,
                    max_batched_tokens=8192,
                    max_num_seqs=256,
                )
            )

    def run(self, rows: Iterable[Row]) -> None:
        due: list[tuple[float, int, Event, BlockPath | None]] = []
        order = count()
        for n, row in enumerate(rows):
            while due and due[0][0] <= row.arrival_s:
                self._land(*heapq.heappop(due))
            request_id = RequestId(f"r{n}")
            path = self._tree.path(row.keys, row.isl)
            arrived = RequestArrived(at_s=row.arrival_s, request_id=request_id, isl=row.isl, blocks=path)
            (action,) = self._post(arrived)
            assert isinstance(action, Dispatch)
            self.orders[request_id] = action
            first_s = row.arrival_s + row.isl * 40e-6
            end_s = first_s + row.osl * 0.02
            worker_id = action.worker_id
            first = FirstToken(at_s=first_s, request_id=request_id, worker_id=worker_id)
            end = RequestFinished(at_s=end_s, request_id=request_id, worker_id=worker_id, output_tokens=row.osl)
            heapq.heappush(due, (first_s, next(order), first, path))
            heapq.heappush(due, (end_s, next(order), end, None))
        while due:
            self._land(*heapq.heappop(due))

    def _land(self, at_s: float, _: int, event: Event, path: BlockPath | None) -> None:
        if path is not None and isinstance(event, FirstToken):
            stored, removed = self._caches[event.worker_id].take(path)
            if removed:
                self._post(BlocksRemoved(at_s=at_s, worker_id=event.worker_id, runs=tuple(removed)))
            if stored:
                self._post(BlocksStored(at_s=at_s, worker_id=event.worker_id, runs=tuple(stored)))
        self._post(event)

    def _post(self, event: Event) -> Sequence[Action]:
        if self.controller.wants(type(event)) or not isinstance(event, BlocksStored | BlocksRemoved):
            self.events.append(event)
        return self.controller.step(event)


class Recorded:
    """Hands back the orders of an earlier run; what a controller costs without a policy."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived})

    def __init__(self, orders: dict[RequestId, Dispatch]) -> None:
        self._orders = orders

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        assert isinstance(event, RequestArrived)
        return (self._orders[event.request_id],)


def cpu_s(policy: Policy, events: list[Event]) -> float:
    """CPU seconds to play the events through a fresh controller."""
    step = Controller([policy]).step
    gc.collect()
    before = time.process_time()
    for event in events:
        step(event)
    return time.process_time() - before


def settings(mode: str, block_size: int, seed: int) -> RouterSettings:
    return RouterSettings(
        mode=mode,
        seed=seed,
        block_size=block_size,
        explain=False,
        tie_break="seeded",
        overlap_score_credit=1.0,
        overlap_score_credit_decay=0.0,
        prefill_load_scale=1.0,
        overlap_score_weight=None,
        host_cache_hit_weight=0.75,
        disk_cache_hit_weight=0.25,
        shared_cache_multiplier=None,
        decode_active_request_weight=0.0,
        router_temperature=0.0,
        decode_basis="potential",
        track_active_blocks=True,
        track_prefill_tokens=True,
        track_output_blocks=False,
        assume_kv_reuse=True,
        use_kv_events=True,
        index_policy="ttl",
        approximate_ttl_s=120.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=16_384, help="KV blocks per worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, help="the median is printed")
    parser.add_argument("--trace", type=Path, help="a Mooncake JSONL trace instead of the synthetic stream")
    args = parser.parse_args()
    rows = list(recorded(args.trace, args.requests) if args.trace else synthetic(args.requests, args.seed))
    source = args.trace.name if args.trace else f"synthetic, seed {args.seed}"
    tokens = sum(row.isl for row in rows)
    print(f"{len(rows)} requests ({source}), {tokens / len(rows):.0f} prompt tokens on average")
    print(f"{args.workers} workers, blocks of {args.block_size} tokens, {args.blocks} per worker")
    print(f"{'mode':<14} {'policy us':>10} {'controller us':>14} {'events/request':>15} {'reuse':>6}   (per request)")
    for mode in MODES:
        knobs = settings(mode, args.block_size, args.seed)
        world = World(build(knobs), args.workers, args.block_size, args.blocks)
        world.run(rows)
        bare_s = statistics.median(cpu_s(Recorded(world.orders), world.events) for _ in range(args.runs))
        full_s = statistics.median(cpu_s(build(knobs), world.events) for _ in range(args.runs))
        per = 1e6 / len(rows)
        hits = sum(order.overlap_blocks for order in world.orders.values()) * args.block_size / tokens
        reuse = f"{hits:6.3f}" if mode == "kv" else "   n/a"
        print(
            f"{mode:<14} {(full_s - bare_s) * per:10.2f} {bare_s * per:14.2f} "
            f"{len(world.events) / len(rows):15.2f} {reuse}"
        )


if __name__ == "__main__":
    main()
