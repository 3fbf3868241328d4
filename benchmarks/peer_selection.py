"""The selection service of NVIDIA Dynamo's Python binding on the prompts of `router_selection.py`; one JSON object.

It runs in this process, without a runtime, and learns of caches from block events over ZMQ sockets in vLLM's format,
which this file speaks itself. A request is one `select_and_reserve` with a list of tokens, timed from the call to the
answer in Python. Run by `router_selection.py` with the peer's interpreter; nothing but that and the standard library is
imported.

    DYN_LOG=error .peer/bin/python benchmarks/peer_selection.py [--workers 64] [--requests 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import struct
import threading
import time
from collections import deque
from typing import Any

from dynamo.llm import SelectionService  # type: ignore[import-not-found]
from prompts import BLOCK_SIZES, OPEN_REQUESTS, SIZES_TOKENS, Prompts, percentiles

MODEL = "m"
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


def packed(value: object) -> bytes:
    """MessagePack, as much of it as block events need."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return struct.pack(">BI", 0xCE, value) if value < 1 << 32 else struct.pack(">BQ", 0xCF, value)
        case float():
            return struct.pack(">Bd", 0xCB, value)
        case str():
            return struct.pack("BB", 0xD9, len(value)) + value.encode()
        case list():
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(packed, value))
    raise TypeError(f"cannot pack {value!r}")


class Publisher:
    """One worker's events: a ZMQ PUB socket (ZMTP 3.0, no security) for the one subscriber that comes."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._batches = 0
        self._subscribed = threading.Event()
        threading.Thread(target=self._greet, daemon=True).start()

    def _greet(self) -> None:
        self._stream = self._server.accept()[0].makefile("rwb")
        self._stream.write(_GREETING + bytes((4, len(_READY))) + _READY)
        self._stream.flush()
        self._stream.read(len(_GREETING))
        for _ in range(2):  # its READY, and what it subscribes to
            _, size = self._stream.read(2)
            self._stream.read(size)
        self._subscribed.set()

    def publish(self, event: list[object]) -> None:
        self._subscribed.wait()
        frames = (b"", struct.pack(">Q", self._batches), packed([0.0, [event], 0]))
        for flags, frame in zip((3, 3, 2), frames, strict=True):
            self._stream.write(struct.pack(">BQ", flags, len(frame)) + frame)
        self._stream.flush()
        self._batches += 1


class Peer:
    """The service with its workers; `computed` tells it what one of them holds now."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._service = SelectionService(indexer_threads=1)
        self._workers: list[Publisher] = []
        self._open: deque[str] = deque()

    async def start(self, workers: int) -> None:
        for n in range(workers):
            publisher = Publisher()
            self._workers.append(publisher)
            await self._service.upsert_worker(
                {
                    "worker_id": n,
                    "model_name": MODEL,
                    "endpoint": f"http://127.0.0.1:{n + 1}",
                    "kv_events_endpoint": publisher.endpoint,
                    "block_size": self._block_size,
                    "total_kv_blocks": 65_536,
                    "max_num_batched_tokens": 8192,
                }
            )

    def stop(self) -> None:
        self._service.shutdown()

    async def select(self, name: str, tokens: list[int]) -> tuple[dict[str, Any], int, int]:
        """The answer, and nanoseconds by the clock on the wall and by that of the process."""
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        request = {"model_name": MODEL, "selection_id": name, "token_ids": tokens}
        answer = await self._service.select_and_reserve(request)
        return answer, time.perf_counter_ns() - wall, time.process_time_ns() - cpu

    async def computed(self, name: str, worker: int, tokens: list[int]) -> None:
        """The worker says that it holds the prompt, and the service has understood; the oldest request ends."""
        size, last = self._block_size, 0
        hashes = []
        for lo in range(0, len(tokens) - size + 1, size):
            last = hash((last, *tokens[lo : lo + size])) & (1 << 63) - 1
            hashes.append(last)
        self._workers[worker].publish(["BlockStored", hashes, None, tokens, size, None, "GPU"])
        await self._service.prefill_complete(name)
        self._open.append(name)
        if len(self._open) > OPEN_REQUESTS:
            await self._service.free_reservation(self._open.popleft())
        while not await self._holds(worker, tokens, len(hashes)):
            await asyncio.sleep(0.001)

    async def _holds(self, worker: int, tokens: list[int], blocks: int) -> bool:
        scores = await self._service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
        return any(one["worker_id"] == worker and one["device_blocks"] == blocks for one in scores["workers"])


async def measured(args: argparse.Namespace, block_size: int, tokens: int) -> dict[str, float]:
    peer, source = Peer(block_size), Prompts(args.seed)
    await peer.start(args.workers)
    prompts = [source.of(tokens) for _ in range(args.warm + args.requests)]
    walls, cpus, cached = [], [], []
    gc.collect()
    gc.freeze()
    for n, prompt in enumerate(prompts):
        answer, wall, cpu = await peer.select(f"r{n}", prompt)
        await peer.computed(f"r{n}", answer["worker_id"], prompt)
        if n >= args.warm:
            walls.append(wall)
            cpus.append(cpu)
            cached.append(answer["overlap"]["gpu"])
    gc.unfreeze()
    peer.stop()
    return {
        **percentiles("wall", walls),
        **percentiles("cpu", cpus),
        "mean_cached_tokens": round(statistics.fmean(cached)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--warm", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = {
        name: {f"block {size}": asyncio.run(measured(args, size, tokens)) for size in BLOCK_SIZES}
        for name, tokens in SIZES_TOKENS.items()
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
