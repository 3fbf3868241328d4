"""When a worker is overloaded: it then gets nothing, whoever asks for it, until its load has fallen.

Limits look at what the router itself has sent and what has not ended (`books`), never at a worker's own report. A limit
that cannot be told, because a worker does not say how large it is, does not count, and is counted.
"""

from __future__ import annotations

from dataclasses import fields, replace

from policies.cluster.events import BusyThresholdsChanged
from policies.cluster.state import WorkerView
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.router.checks import within
from policies.router.select import BUSY, ENGINE, Bar


@frozen
class BusySettings:
    """A worker is overloaded with more than `decode_blocks_share` of its blocks active, with more prompt tokens not
    computed than `prefill_tokens`, or than `prefill_share` of what a step takes; and with `engine_queue` requests there
    beside the `engine_running` that run (None: as many as it says that it runs). None elsewhere: no such limit.
    """

    decode_blocks_share: float | None = None
    prefill_tokens: float | None = None
    prefill_share: float | None = None
    engine_running: float | None = None
    engine_queue: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            within(f"busy.{field.name}", getattr(self, field.name), _LEAST.get(field.name, 0))

    def changed(self, event: BusyThresholdsChanged) -> BusySettings:
        """With the limits that the event names; None clears one. Raises ConfigError for a name that is none."""
        known = {field.name for field in fields(self)}
        for change in event.changes:
            if change.name not in known:
                raise ConfigError(f"router.busy has no limit {change.name!r}; it has {', '.join(sorted(known))}")
        return replace(self, **{change.name: change.limit for change in event.changes})


_LEAST = {"engine_running": 1, "engine_queue": 2}


class Overload:
    """Says which workers are overloaded. `unknown_totals`: checks that were left out for want of a worker's size."""

    __slots__ = ("limits", "unknown_totals")

    def __init__(self, limits: BusySettings) -> None:
        self.limits = limits
        self.unknown_totals = 0

    def of(self, worker: WorkerView, blocks: float, prefill_tokens: float, ranks: int = 1) -> Bar | None:
        """Why a worker is overloaded, or one of its `ranks`, which have equal parts of it; None when it is not. Limits
        are strict."""
        limits, up = self.limits, worker.up
        if limits.decode_blocks_share is not None:
            total = (up.total_blocks or 0) // ranks
            if not total:
                self.unknown_totals += 1
            elif blocks > limits.decode_blocks_share * total:
                return Bar(BUSY, f"overloaded: {blocks:g} of {total} blocks active")
        if limits.prefill_tokens is not None and prefill_tokens > limits.prefill_tokens:
            return Bar(BUSY, f"overloaded: {prefill_tokens:g} prompt tokens to compute", by_prompts=True)
        if limits.prefill_share is not None:
            budget = (up.max_batched_tokens or 0) // ranks
            if not budget:
                self.unknown_totals += 1
            elif prefill_tokens > limits.prefill_share * budget:
                text = f"overloaded: {prefill_tokens:g} prompt tokens to compute, {budget} in a step"
                return Bar(BUSY, text, by_prompts=True)
        if limits.engine_queue is not None:
            running = up.max_num_seqs if limits.engine_running is None else limits.engine_running
            if worker.in_flight >= running + limits.engine_queue:
                return Bar(ENGINE, f"full: {worker.in_flight} requests there")
        return None

    def prefill_limits(self, worker: WorkerView, ranks: int = 1) -> tuple[float, ...]:
        """The limits on prompt tokens that hold for a worker, or for one of its `ranks`."""
        limits, budget = self.limits, (worker.up.max_batched_tokens or 0) // ranks
        share = limits.prefill_share * budget if limits.prefill_share is not None and budget else None
        return tuple(limit for limit in (limits.prefill_tokens, share) if limit is not None)
