"""How vLLM is told of our tiers: a spec for device and host memory, and one with tiers below.

On GPUs the copy between device and host is vLLM's own, on CPUs it is ours. Written for vLLM 0.32.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from executors.engines.in_vllm.below import TierManager
from executors.engines.in_vllm.host import HostManager
from executors.engines.in_vllm.host_copy import HostCopyWorker
from executors.engines.in_vllm.side import Side


class HostSpec(CPUOffloadingSpec):
    """Device and host memory."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(sized(config))
        self.side = _side(self)
        self._manager: Any = None
        self._worker: Any = None

    def get_manager(self) -> OffloadingManager:
        if not self._manager:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = HostManager(self.side, self.num_chunks, events=events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            self._worker = HostCopyWorker(
                kv_caches,
                self.blocks_per_chunk,
                lambda page: torch.zeros((self.num_chunks, page), dtype=torch.int8),
            )
        return self._worker


class TierSpec(TieringOffloadingSpec):
    """Device, host memory, and tiers below, which read host memory through a shared memory map."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(sized(config))
        self.side = _side(self)
        self._manager: Any = None
        self._worker: Any = None

    def get_manager(self) -> OffloadingManager:
        if not self._manager:
            self._scheduler_mmap = region = self._region(None)
            events = self.kv_events_config.enable_kv_cache_events
            host = HostManager(self.side, self.num_chunks, events=events, region=region)
            view, tiers = host.get_kv_memoryview(), []
            try:
                for told in self.secondary_tier_configs:
                    tiers.append(SecondaryTierFactory.create_secondary_tier(told, view, self))
            except Exception:
                for tier in tiers:
                    tier.shutdown()
                host.shutdown()
                raise
            self._manager = TierManager(self.side, host, tiers)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            self._mapped = self._region(self.config.parallel.rank)
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, self._mapped.create_next_worker_view)
        return self._worker

    def _region(self, rank: int | None) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )


def sized(config: OffloadingConfig) -> OffloadingConfig:
    """With the size of the host tier as vLLM wants it, in bytes; ours may be in tokens."""
    told = config.extra_config["dynatwin"]["tiers"]["host"]
    nbytes = told["bytes"] if "bytes" in told else told["tokens"] // _chunk_tokens(config) * _chunk_bytes(config)
    if nbytes < _chunk_bytes(config):
        raise ValueError(
            f"dynatwin: the host tier has {nbytes} bytes, a block of this engine takes {_chunk_bytes(config)}; give "
            "more with workers.kvbm.cpu_cache_gb or cpu_cache_tokens"
        )
    return replace(config, extra_config={**config.extra_config, "cpu_bytes_to_use": nbytes})


def _side(spec: Any) -> Side:
    told = spec.extra_config["dynatwin"]
    blocks = {"host": spec.num_chunks}
    if (disk := told["tiers"].get("disk")) is not None:
        in_tokens = "bytes" not in disk
        one = _chunk_tokens(spec.config) if in_tokens else spec.kv_bytes_per_chunk
        blocks["disk"] = disk["tokens" if in_tokens else "bytes"] // one
    return Side(told, blocks)


def _chunk_tokens(config: OffloadingConfig) -> int:
    return config.groups[0].tokens_per_block * config.cache.blocks_per_chunk


def _chunk_bytes(config: OffloadingConfig) -> int:
    """Of all workers of the engine, in whole pages."""
    copies = 1 if config.replicated_layout else config.parallel.world_size
    nbytes = config.worker_kv_bytes_per_block * copies * config.cache.blocks_per_chunk
    page = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    return -(-nbytes // page) * page
