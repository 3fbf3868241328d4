"""What a planner hears of demand and of engines: windows of traffic, and forward passes.

Posted only while a policy subscribes. Nothing here is decided: a window says how it was seen, and whoever reads it
judges what that means. It must never carry what a scrape could not know.
"""

from __future__ import annotations

from enum import Enum

from policies.cluster.events import Event
from policies.cluster.ids import WorkerId
from policies.frozen import frozen


class WindowKind(Enum):
    """How far a window of traffic was seen. Zero traffic is not no data."""

    OBSERVED = "observed"
    """The source answered; there may have been no request."""
    NO_DATA = "no_data"
    """The scrape failed, the series was empty, the counter absent: the figures mean nothing."""
    PARTIAL = "partial"
    """The source answered for less than 80 % of the window: `coverage` says how much."""


@frozen
class Lengths:
    """Prompt and answer of one request that has ended, in tokens."""

    isl: int
    osl: int


@frozen
class TrafficWindow(Event):
    """What came in from `t0_s` to `t1_s`.

    `num_req` requests arrived within the part that was seen (`coverage`, 0 to 1, of the window). `isl` and `osl` are
    mean tokens (None: no request, or not known). `kv_hit_rate` is the share of prompt tokens found in a cache,
    `accept_length` tokens made per decode step and sequence. `ttft_s` and `itl_s` are means, the `p95` ones their 95th
    percentiles over `completed` requests. `lengths` is a sample of requests that ended. `counter_reset`: a counter
    began anew within the window, and counts from 0.
    """

    t0_s: float
    t1_s: float
    kind: WindowKind
    num_req: float = 0.0
    coverage: float = 1.0
    isl: float | None = None
    osl: float | None = None
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    completed: int = 0
    lengths: tuple[Lengths, ...] = ()
    counter_reset: bool = False


@frozen
class PassLoad:
    """What one forward pass runs, or what waits behind it; tokens as the names say.

    `sum_prefill_tokens`: of a pass, those that it computes; of a queue, whole prompts (what is cached is not known).
    `sum_prefill_kv_tokens`: read by its prefills. Decodes that wait were preempted. `var_*` are variances of lengths.
    """

    num_prefill_requests: float = 0
    sum_prefill_tokens: float = 0
    var_prefill_length: float = 0
    sum_prefill_kv_tokens: float = 0
    num_decode_requests: float = 0
    sum_decode_kv_tokens: float = 0
    var_decode_kv_tokens: float = 0


IDLE = PassLoad()


@frozen
class ForwardPass(Event):
    """One step of one rank of an engine; with `wall_time_s` 0 an idle heart-beat, which says only what waits.

    `worker_id` None: the record named nobody that is known. `unreadable` names the first field that has no plain form
    (NaN, infinite, absent), whose value is then 0: a journal holds finite numbers only. `counter` rises by one a pass.
    """

    worker_id: WorkerId | None
    counter: int
    wall_time_s: float
    dp_rank: int = 0
    scheduled: PassLoad = IDLE
    queued: PassLoad = IDLE
    unreadable: str | None = None
