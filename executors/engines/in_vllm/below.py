"""Tiers below host memory: what goes on to each of them is what its filter passes, and not everything.

vLLM's own manager of tiers does the rest: what comes up comes through host memory, in which it stays.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadPolicy, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from executors.engines.in_vllm.books import Key, as_runs
from executors.engines.in_vllm.disk import DiskTier
from executors.engines.in_vllm.host import WHOLE_REQUESTS, HostManager
from executors.engines.in_vllm.side import Side
from policies.cluster.blocks import Branch
from policies.kvbm.offload import Candidate
from policies.kvbm.spans import Span


class _Store:
    """A store that is never full, as a filter sees it: what it had would have come up, and not been computed."""

    def absent(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        return [(lo, hi)]

    def blocks_of(self, tenant: str) -> int:
        return 0


_STORE = _Store()


class TierManager(TieringOffloadingManager):
    """Host memory, then a disk, a remote store, or both side by side."""

    primary_tier: HostManager

    def __init__(self, side: Side, host: HostManager, tiers: list[Any]) -> None:
        super().__init__(primary_tier=host, secondary_tiers=tiers)
        self.side = side

    def on_new_request(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        asked = super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)
        return asked if asked.policy is OffloadPolicy.REQUEST_LEVEL else WHOLE_REQUESTS

    def has_pending_work(self) -> bool:
        return self.primary_tier.has_pending_work() or super().has_pending_work()

    def complete_store(self, keys: Collection[Key], req_context: ReqContext, success: bool = True) -> None:
        """As vLLM has it, but for what goes on to whom."""
        self.primary_tier.complete_store(keys, req_context, success)
        for at, tier in enumerate(self.secondary_tiers) if success else ():
            passed = self._passed(tier, [key for key in keys if self.primary_tier.books.has(key)], req_context)
            if passed and self._should_store_to_tier(tier, len(passed)):
                tier.submit_store(self.create_store_job(passed, req_context, at))
        state = self._req_state[req_context.req_id]
        state.pending_primary_stores -= 1
        self._maybe_finalize_request(req_context.req_id)

    def _passed(self, tier: Any, keys: list[Key], req_context: ReqContext) -> list[Key]:
        now_s = self.side.now_s()
        passed: list[Key] = []
        for prompt, own in self.side.by_prompt(req_context, keys):
            if isinstance(tier, DiskTier):
                passed += tier.admitted(prompt, own)
                continue
            for run in as_runs(prompt, own):
                for lo, hi in self.side.filters["remote"].passes(Candidate(run), _STORE, now_s):
                    passed += prompt.keys[lo:hi]
        return passed
