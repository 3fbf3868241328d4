"""The host tier of an engine, as our policies keep it: what vLLM's scheduler asks of an offloading manager.

Blocks go down when they are complete, as far as the filter passes them; the eviction order says who goes for them.
Written for vLLM 0.32.0, whose interface for managers of others is official and marked experimental.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from executors.engines.in_vllm.books import Key
from executors.engines.in_vllm.side import Side

WHOLE_REQUESTS = RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
"""We are offered every block of a prompt, also those that the device had: policies count uses."""


class HostManager(OffloadingManager):
    """`blocks` places in host memory. With a `region`, tiers below read and write them there."""

    def __init__(self, side: Side, blocks: int, *, events: bool, region: Any = None) -> None:
        self.side = side
        self.books = side.books["host"]
        self.events: list[OffloadingEvent] | None = [] if events else None
        self._num_chunks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._slots: dict[Key, int] = {}
        self._region = region
        self._view = region.create_kv_memoryview() if region is not None else None
        self._sizes: list[int] = []

    # ------------------------------------------------------------ asked by the scheduler

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return WHOLE_REQUESTS

    def lookup(self, key: Key, req_context: ReqContext) -> LookupResult:
        self.side.prompt(req_context, key).looked_up(key)
        if self.books.has(key):
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if self.books.knows(key) else LookupResult.MISS

    def get_load_source(self, key: Key, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Key], req_context: ReqContext) -> CPULoadStoreSpec:
        for prompt, own in self.side.by_prompt(req_context, keys):
            prompt.loaded(own)
        return self.prepare_read(keys, req_context)

    def complete_load(self, keys: Collection[Key], req_context: ReqContext) -> None:
        self.books.unpin(keys)

    def prepare_store(self, keys: Collection[Key], req_context: ReqContext) -> PrepareStoreOutput:
        """What of these complete blocks goes down. What there is no room for is dropped."""
        stored: list[Key] = []
        evicted: list[Key] = []
        now_s = self.side.now_s()
        for prompt, own in self.side.by_prompt(req_context, keys):
            self.side.used(prompt, max(prompt.at[key] for key in own) + 1)
            computed = [key for key in own if prompt.at[key] >= prompt.begin_computed()]
            wanted = self.books.wanted(prompt, computed, now_s)
            taken, gone = self.books.take(prompt, wanted, now_s, self.side.when_full)
            self._leave(gone)
            self._arrive(wanted[:taken])
            stored += wanted[:taken]
            evicted += gone
        return PrepareStoreOutput(keys_to_store=stored, store_spec=self._spec(stored), evicted_keys=evicted)

    def complete_store(self, keys: Collection[Key], req_context: ReqContext, success: bool = True) -> None:
        if not success:
            for key in self.books.failed(keys):
                self._free.append(self._slots.pop(key))
            return
        landed = self.books.landed(keys, self.side.now_s())
        if landed and self.events is not None:
            self.events.append(OffloadingEvent(keys=landed, medium=Medium.CPU, removed=False))

    def has_pending_work(self) -> bool:
        """An engine that has nothing else to do goes on stepping until what was copied has landed."""
        return self.books.coming > 0

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self.events:
            yield from self.events
            self.events.clear()

    def reset_cache(self) -> None:
        self.books.clear()
        self._slots.clear()
        self._free = list(range(self._num_chunks - 1, -1, -1))

    def get_stats(self) -> OffloadingConnectorStats:
        """vLLM's own figures of a host tier."""
        stats = OffloadingConnectorStats()
        reading, writing = (n / self._num_chunks for n in (self.books.reading, self.books.coming))
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, reading + writing)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        return stats

    def shutdown(self) -> None:
        if self._view is not None:
            self._view.release()
            self._region.cleanup()

    # ------------------------------------------------------------ asked for the tiers below

    def prepare_read(self, keys: Collection[Key], req_context: ReqContext) -> CPULoadStoreSpec:
        """These blocks are copied on, or up: they stay meanwhile."""
        self.books.pin(keys)
        return self._spec(keys)

    complete_read = complete_load

    def prepare_write(self, keys: Collection[Key], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Blocks of a tier below come up for a request; None where there is no room for them."""
        stored: list[Key] = []
        evicted: list[Key] = []
        for prompt, own in self.side.by_prompt(req_context, keys):
            taken, gone = self.books.take(prompt, own, self.side.now_s())
            self._leave(gone)
            self._arrive(own[:taken])
            stored += own[:taken]
            evicted += gone
        if not stored:
            return None
        return PrepareStoreOutput(keys_to_store=stored, store_spec=self._spec(stored), evicted_keys=evicted)

    complete_write = complete_store

    def get_kv_memoryview(self) -> memoryview:
        """All of host memory, a row for each place."""
        assert self._view is not None
        return self._view

    # ------------------------------------------------------------ places

    def _spec(self, keys: Iterable[Key]) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([self._slots[key] for key in keys])

    def _arrive(self, keys: list[Key]) -> None:
        for key in keys:
            self._slots[key] = self._free.pop()
        if keys:
            self._sizes.append(len(keys))

    def _leave(self, keys: list[Key]) -> None:
        for key in keys:
            self._free.append(self._slots.pop(key))
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True))
