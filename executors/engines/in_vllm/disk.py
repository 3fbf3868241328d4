"""The disk tier of an engine: vLLM's files, and our books of them. They are kept to their size, which vLLM does not do.

What cannot be read back is forgotten, and computed again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from executors.engines.in_vllm.books import Key, Prompt


class DiskTier(FileSystemTierManager):
    """Files in a folder that is this engine's alone. `offloading_spec` has the `side` that keeps the books."""

    def __init__(self, offloading_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(offloading_spec, *args, **kwargs)
        self.side = offloading_spec.side
        self.books = self.side.books["disk"]
        self._jobs: dict[int, TransferJob] = {}

    def admitted(self, prompt: Prompt, keys: list[Key]) -> list[Key]:
        """Those of these blocks that come here now. Files of others go for them."""
        now_s = self.side.now_s()
        wanted = self.books.wanted(prompt, keys, now_s)
        taken, gone = self.books.take(prompt, wanted, now_s, self.side.when_full)
        self._remove(gone)
        return wanted[:taken]

    def lookup(self, key: Key, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if self.books.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs[job_metadata.job_id] = job_metadata
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs[job_metadata.job_id] = job_metadata
        self.books.pin(job_metadata.keys)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            job = self._jobs.pop(result.job_id)
            if job.is_promotion:
                self.books.unpin(job.keys)
                if not result.success:
                    came = set(result.successful_keys or ())
                    self._remove(self.books.drop([key for key in job.keys if key not in came], self.side.now_s()))
            elif result.success:
                self.books.landed(job.keys, self.side.now_s())
            else:
                self.books.failed(job.keys)
        return results

    def _remove(self, keys: list[Key]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.file_mapper.get_file_name(key))
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=True, locality=self.locality))
