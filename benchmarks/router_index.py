"""The prefix index: how fast it takes in block events and answers prompts, and how many bytes a block costs.

Workload (seeded, the same as that of the peer's runner in the shared reference data): groups of prompts with a common
prefix, stored sequence by sequence on the workers in turn, then prompts that go on from a stored one, share a prefix
only, or are new. Beside it the worst that we know for a match: all workers hold one long prompt, each to another depth.
With the peer's interpreter (DYNATWIN_PEER_PYTHON) both run in turn and ratios are printed.

    python benchmarks/router_index.py --workers 512 --blocks 1000000 [--runs 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence

from measure import alternate, median, shared, show

from policies.cluster.events import WorkerUp
from policies.cluster.ids import BlockHash, RankId, Role, WorkerId
from policies.cluster.kv_events import IndexDump, KvRemoved, KvStored
from policies.router.chains.index import ChainIndex
from policies.router.chains.live import LiveIndex

BLOCK_SIZE = 64
PREFIX_BLOCKS = 64
QUERIES = 2000
_CHAIN_FACTOR = 1099511628211
_CHAIN_START = 1469598103934665603 & (1 << 63) - 1

Pair = tuple[str, str]


class Workload:
    """Sequences of local hashes, drawn one by one, so that nothing but the index keeps what was drawn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._rng = random.Random(args.seed)
        self._groups = [[self._hash() for _ in range(PREFIX_BLOCKS)] for _ in range(args.groups)]
        self._blocks = args.blocks
        self._workers = args.workers
        self._event_blocks = args.event_blocks

    def sequences(self) -> Iterator[list[int]]:
        stored = 0
        while stored < self._blocks:
            length = min(self._length(), max(PREFIX_BLOCKS + 1, self._blocks - stored))
            group = self._groups[self._rng.randrange(len(self._groups))]
            yield group[:length] + [self._hash() for _ in range(length - len(group))]
            stored += length

    def events(self, sequences: Iterator[list[int]]) -> Iterator[KvStored]:
        """Every sequence as events of some blocks each, as chunked prefill publishes them."""
        numbers = [0] * self._workers
        for i, local in enumerate(sequences):
            worker = i % self._workers
            exts, last = [], _CHAIN_START
            for key in local:
                last = (last * _CHAIN_FACTOR ^ key) & (1 << 63) - 1
                exts.append(BlockHash(last))
            for lo in range(0, len(local), self._event_blocks):
                hi = lo + self._event_blocks
                yield KvStored(
                    at_s=0.0,
                    worker_id=WorkerId(worker),
                    event_id=numbers[worker],
                    parent_ext=exts[lo - 1] if lo else None,
                    exts=tuple(exts[lo:hi]),
                    local_hashes=tuple(map(BlockHash, local[lo:hi])),
                )
                numbers[worker] += 1

    def queries(self, stored: Sequence[list[int]]) -> list[list[int]]:
        """Half go on from a stored sequence, three in ten share a prefix only, the rest is new."""
        asked = []
        for _ in range(QUERIES):
            kind, length = self._rng.random(), self._length()
            if kind < 0.5:
                head = stored[self._rng.randrange(len(stored))][:length]
            elif kind < 0.8:
                head = self._groups[self._rng.randrange(len(self._groups))][:length]
            else:
                head = []
            asked.append(head + [self._hash() for _ in range(length - len(head))])
        return asked

    def _hash(self) -> int:
        return self._rng.getrandbits(63)

    def _length(self) -> int:
        return int(math.exp(self._rng.uniform(math.log(128), math.log(2000))))


def live_index(workers: int) -> LiveIndex:
    """An index of that many workers, all up, empty and known to be so."""
    live = LiveIndex(BLOCK_SIZE)
    for n in range(workers):
        live.on(
            WorkerUp(
                at_s=0.0,
                worker_id=WorkerId(n),
                name=f"w{n}",
                role=Role.MIXED,
                block_size=BLOCK_SIZE,
                total_blocks=16_384,
                max_batched_tokens=8192,
                max_num_seqs=256,
            )
        )
        live.on(IndexDump(at_s=0.0, worker_id=WorkerId(n), ask=1, last_id=None, entries=()))
    return live


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_per_block(args: argparse.Namespace) -> float:
    """Growth of the process while it takes in events that nobody else keeps."""
    work, live = Workload(args), live_index(args.workers)
    gc.collect()
    before = resident_bytes()
    for event in work.events(work.sequences()):
        live.on(event)
    gc.collect()
    return (resident_bytes() - before) / live.sizes.resident


def spread(name: str, times_ns: list[int]) -> dict[str, float]:
    """Percentiles in microseconds."""
    times_ns.sort()
    picks = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    return {f"{name}_{p}_us": times_ns[min(len(times_ns) - 1, int(q * len(times_ns)))] / 1e3 for p, q in picks.items()}


def timed_matches(index: ChainIndex, queries: Sequence[Sequence[int]], clock: str) -> list[int]:
    """Nanoseconds of each question: local hashes in, blocks by rank out."""
    now = getattr(time, clock)
    times = []
    for keys in queries:
        start = now()
        index.depths(index.match(index.path(keys)))
        times.append(now() - start)
    return times


def worst_matches(args: argparse.Namespace) -> list[int]:
    """CPU nanoseconds of matches of one 2,000-block prompt that every worker holds to a depth of its own."""
    rng, index = random.Random(args.seed), ChainIndex()
    keys = [BlockHash(rng.getrandbits(63)) for _ in range(2000)]
    for n in range(args.workers):
        depth = rng.randrange(1, len(keys) + 1)
        held = tuple(keys[:depth])
        index.up(RankId(WorkerId(n), 0))
        index.apply(KvStored(at_s=0.0, worker_id=WorkerId(n), event_id=0, exts=held, local_hashes=held))
    prompt = array("Q", keys)
    timed_matches(index, [prompt] * 200, "process_time_ns")
    return timed_matches(index, [prompt] * QUERIES, "process_time_ns")


def removals(work: Workload, stored: Sequence[list[int]], live: LiveIndex) -> tuple[int, float]:
    """The blocks of the last sequences leave, deepest first, 16 to an event; blocks and CPU seconds."""
    last = list(work.events(iter(stored)))[-1000:]
    next_ids = {rank: feed.cursor + 1 for rank, feed in live._feeds.items() if feed.cursor is not None}
    events = []
    for event in reversed(last):
        exts = event.exts[::-1]
        for lo in range(0, len(exts), 16):
            number = next_ids[event.rank]
            next_ids[event.rank] += 1
            events.append(KvRemoved(at_s=0.0, worker_id=event.worker_id, event_id=number, exts=exts[lo : lo + 16]))
    before = time.process_time()
    for removed in events:
        live.on(removed)
    return sum(len(event.exts) for event in events), time.process_time() - before


def replica(index: ChainIndex) -> float:
    """CPU seconds to tell all of an index and to load it into another router's."""
    other = ChainIndex()
    before = time.process_time()
    for rank in index.ranks:
        other.up(rank)
        other.load(rank, index.dump(rank))
    taken_s = time.process_time() - before
    if other.sizes != index.sizes:
        sys.exit(f"the copy has {other.sizes}, the original {index.sizes}")
    return taken_s


def ours(args: argparse.Namespace) -> dict[str, object]:
    per_block = bytes_per_block(args)
    gc.collect()
    work = Workload(args)
    stored = list(work.sequences())
    events = list(work.events(iter(stored)))
    asked = work.queries(stored)
    queries = [array("Q", keys) for keys in asked]
    live = live_index(args.workers)
    index = live._indexes[BLOCK_SIZE]
    gc.collect()
    before = time.process_time()
    for event in events:
        live.on(event)
    apply_s = time.process_time() - before
    blocks = sum(map(len, stored))
    timed_matches(index, queries[:200], "perf_counter_ns")
    before = time.process_time()
    wall = timed_matches(index, queries, "perf_counter_ns")
    match_s = time.process_time() - before
    cpu = timed_matches(index, queries, "process_time_ns")
    lists = timed_matches(index, asked, "perf_counter_ns")
    small = timed_matches(index, [array("Q", keys[:128]) for keys in stored[:300]], "perf_counter_ns")
    large = timed_matches(index, [array("Q", keys) for keys in stored if len(keys) >= 1500][:300], "perf_counter_ns")
    answers = [index.depths(index.match(index.path(keys))) for keys in queries[:200]]
    replica_s = replica(index)
    removed, remove_s = removals(work, stored, live)
    before = time.process_time()
    index.drop(RankId(WorkerId(0), 0))
    drop_s = time.process_time() - before
    return {
        "workers": args.workers,
        "stored_blocks": blocks,
        "sequences": len(stored),
        "events": len(events),
        "event_blocks": args.event_blocks,
        "apply_cpu_s": apply_s,
        "apply_blocks_per_cpu_s": blocks / apply_s,
        "apply_us_per_event": apply_s / len(events) * 1e6,
        "bytes_per_block": per_block,
        "find_cpu_us": match_s / len(queries) * 1e6,
        **spread("find", wall),
        **spread("find_cpu", cpu),
        **spread("find_from_lists", lists),
        **spread("find128", small),
        **spread("find1500plus", large),
        **spread("find_worst_cpu", worst_matches(args)),
        "mean_workers_scored": statistics.fmean(map(len, answers)),
        "mean_best_overlap": statistics.fmean(max(found.values(), default=0) for found in answers),
        "mean_query_blocks": statistics.fmean(map(len, queries)),
        "dump_and_load_cpu_s": replica_s,
        "remove_blocks_per_cpu_s": removed / remove_s,
        "remove_worker_ms": drop_s * 1e3,
    }


def side_by_side(args: argparse.Namespace, peer: str) -> dict[str, object]:
    """Both in turn, and the ratios of their medians; below 1 ours is faster or smaller."""
    knobs = ["--workers", args.workers, "--blocks", args.blocks, "--event-blocks", args.event_blocks]
    same = [str(knob) for knob in [*knobs, "--groups", args.groups, "--seed", args.seed]]
    runs = alternate(
        {
            "ours": [sys.executable, __file__, "--one", *same],
            "peer": [peer, str(shared() / "bench" / "peer_index.py"), *same],
        },
        args.runs,
    )
    told = {name: [json.loads(cost.output) for cost in costs] for name, costs in runs.items()}
    middle = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0] if key != "peer"}
        for name, found in told.items()
    }
    keys = ("apply_cpu_s", "bytes_per_block", "find_cpu_us", "find_p50_us", "find_p90_us", "find_p99_us")
    equal = ("stored_blocks", "sequences", "events", "mean_workers_scored", "mean_best_overlap")
    return {
        "seed": args.seed,
        "runs": args.runs,
        **{name: {key: round(value, 3) for key, value in found.items()} for name, found in middle.items()},
        "ratio": {key: round(middle["ours"][key] / middle["peer"][key], 3) for key in keys},
        "ratio_range": {
            key: [round(pick(o[key] / p[key] for o, p in zip(*told.values(), strict=True)), 3) for pick in (min, max)]
            for key in keys
        },
        "same_answers": {key: [middle["ours"][key], middle["peer"][key]] for key in equal},
        "cpu_s": {name: round(median(costs), 2) for name, costs in runs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--event-blocks", type=int, default=128, help="blocks of one event")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs beside the peer")
    parser.add_argument("--one", action="store_true", help="ours once, as one line of JSON")
    args = parser.parse_args()
    peer = os.environ.get("DYNATWIN_PEER_PYTHON")
    if args.one:
        print(json.dumps(ours(args)))
    elif peer:
        show("router_index", side_by_side(args, peer))
    else:
        print("DYNATWIN_PEER_PYTHON is not set: ours alone", file=sys.stderr)
        show("router_index", {"seed": args.seed, **ours(args)})


if __name__ == "__main__":
    main()
