"""The copy between device and host memory where the device is the CPU itself; on GPUs vLLM has its own.

vLLM refuses to build its worker for tiers unless the platform is CUDA-like or XPU. All the rest does not depend on the
device, so that only the byte copy is replaced. Written for vLLM 0.32.0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult


class HostCopyWorker(OffloadingWorker):
    """Copies blocks between the device tensors and host chunks, at once and in the calling thread.

    A chunk holds blocks_per_chunk consecutive blocks of a sequence. For every KV group a transfer gives the device
    block ids, how many blocks the group has, and the index of its first block in the sequence.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, host_tensor: Callable[[int], Any]) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.refs = kv_caches.group_data_refs
        self.device = [t.tensor.view(torch.int8).reshape(t.tensor.shape[0], -1) for t in kv_caches.tensors]
        for view, cache in zip(self.device, kv_caches.tensors, strict=True):
            if view.data_ptr() != cache.tensor.data_ptr():
                raise RuntimeError("the KV layout has to be contiguous: reshape made a copy")
        self.host = [host_tensor(view.shape[1] * blocks_per_chunk) for view in self.device]
        self.finished: list[TransferResult] = []

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, to_host: bool) -> bool:
        start, nbytes, block_at, chunk_at = time.perf_counter(), 0, 0, 0
        groups = zip(device_spec.group_sizes, device_spec.block_indices, strict=True)
        for group, (count, first) in enumerate(groups):
            base = first // self.blocks_per_chunk
            for index in range(first, first + count):
                block = int(device_spec.block_ids[block_at + index - first])
                chunk = int(host_spec.block_ids[chunk_at + index // self.blocks_per_chunk - base])
                nbytes += self._copy_block(group, block, chunk, index % self.blocks_per_chunk, to_host)
            block_at += count
            if count:
                chunk_at += (first + count - 1) // self.blocks_per_chunk - base + 1
        seconds = time.perf_counter() - start
        self.finished.append(TransferResult(job_id=job_id, success=True, transfer_size=nbytes, transfer_time=seconds))
        return True

    def _copy_block(self, group: int, block: int, chunk: int, slot: int, to_host: bool) -> int:
        nbytes = 0
        for ref in self.refs[group]:
            device = self.device[ref.tensor_idx]
            page = device.shape[1]
            host = self.host[ref.tensor_idx][chunk, slot * page : (slot + 1) * page]
            if to_host:
                host.copy_(device[block])
            else:
                device[block].copy_(host)
            nbytes += page
        return nbytes

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return
