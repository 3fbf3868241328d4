"""Out-of-tree offloading specs that run vLLM's real OffloadingConnector where the device is the CPU itself.

vLLM's own spec refuses to build its worker unless the platform is CUDA-like or XPU. All the rest does not depend on
the device: the scheduler side, the manager with its LRU or ARC policy, the KV events, the metrics, and the disk and
object tiers below. So only the byte copy is replaced here. On a GPU host use the stock specs.

    PYTHONPATH=<this folder>, --kv-transfer-config
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "HostCopySpec", "spec_module_path": "cpu_offload_spec",
       "cpu_bytes_to_use": 33554432, "self_describing_kv_events": true}}

HostCopyTieringSpec takes "secondary_tiers" too, such as [{"type": "fs", "root_dir": DIR, "enable_kv_events": true}].
The two hooks, spec_name and spec_module_path, are official and marked experimental. Written for vLLM 0.32.0.
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):
    """Copies blocks between the device tensors and host chunks, at once and in the calling thread.

    A chunk holds blocks_per_chunk consecutive blocks of a sequence. For every KV group a transfer gives the device
    block ids, how many blocks the group has, and the index of its first block in the sequence.
    """

    def __init__(self, kv_caches, blocks_per_chunk, host_tensor):
        self.blocks_per_chunk = blocks_per_chunk
        self.refs = kv_caches.group_data_refs
        self.device = [t.tensor.view(torch.int8).reshape(t.tensor.shape[0], -1) for t in kv_caches.tensors]
        for view, cache in zip(self.device, kv_caches.tensors, strict=True):
            if view.data_ptr() != cache.tensor.data_ptr():
                raise RuntimeError("the KV layout has to be contiguous: reshape made a copy")
        self.host = [host_tensor(view.shape[1] * blocks_per_chunk) for view in self.device]
        self.finished = []

    def _copy(self, job_id, device_spec, host_spec, to_host):
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

    def _copy_block(self, group, block, chunk, slot, to_host):
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

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        return


class HostCopySpec(CPUOffloadingSpec):
    """Device and host tier."""

    def get_worker(self, kv_caches):
        if not self._worker:
            self._worker = HostCopyWorker(
                kv_caches,
                self.blocks_per_chunk,
                lambda page: torch.zeros((self.num_chunks, page), dtype=torch.int8),
            )
        return self._worker


class HostCopyTieringSpec(TieringOffloadingSpec):
    """Device, host, and the secondary tiers. Those read the host tier through a shared memory map."""

    def get_worker(self, kv_caches):
        if not self._worker:
            self._region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, self._region.create_next_worker_view)
        return self._worker
