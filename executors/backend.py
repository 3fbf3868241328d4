"""What the frontend asks of whatever serves: one request in, deltas of token ids out.

`executors.world.LiveWorld` is one, and tests have others. The frontend never chooses a worker and never sees one's
address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field
from typing import Literal, Protocol

from executors.engines.protocol import GREEDY, Logprob, Sampling
from policies.cluster.blocks import BlockPath
from policies.cluster.events import Hints
from policies.cluster.ids import RequestId, Trait, WorkerId
from policies.frozen import frozen

STOP_STRING = "stop string"
"""Why an answer is cancelled that has all that its client wants of it."""

Outcome = Literal["stop", "length", "cancelled", "rejected", "failed"]


@frozen
class Ask:
    """One request for one answer. `request_id` is ours and unique.

    `token_ids` is the prompt, `max_tokens` the budget. `path` is the content of the prompt and `out_tokens` the length
    of its answer where a recorded trace is played, which has no tokens. `first_token_s` and `total_s` are deadlines
    from arrival (None: those of the server). `cache_salt` separates caches of tenants.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    max_tokens: int
    model: str
    sampling: Sampling = GREEDY
    priority: int = 0
    session_id: str | None = None
    lora: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    worker_hint: WorkerId | None = None
    hints: Hints | None = None
    traits: tuple[Trait, ...] = ()
    first_token_s: float | None = None
    total_s: float | None = None
    keys: Sequence[int] | None = None
    path: BlockPath | None = None
    out_tokens: int | None = None


@frozen
class Delta:
    """Tokens that came, at `at_s` of the loop's clock."""

    token_ids: tuple[int, ...]
    at_s: float
    logprobs: tuple[Logprob, ...] = ()


@frozen
class End:
    """How a request ended; exactly one, behind all deltas.

    `reason` is short and safe to show: no addresses, no prompts. `code` is the word that is counted (`all_busy`,
    `no_endpoints`, ...). `retry_after_s`: when to come again. `cached_tokens` of the prompt were found in a cache.
    """

    outcome: Outcome
    output_tokens: int
    reason: str = ""
    code: str = ""
    retry_after_s: float | None = None
    cached_tokens: int | None = None
    migrations: int = 0
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts: queue_s, prefill_s, ttft_s, total_s, where known."""
    worker: str | None = None
    prefill_worker: str | None = None


class Answer(Protocol):
    """A request under way."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas as they come; ends when `end` is known. A reader that is late gets several deltas' tokens at once."""
        ...

    @property
    def end(self) -> End | None:
        """How it ended; None while it goes on."""
        ...

    def cancel(self, reason: str) -> None:
        """The client left: every leg is stopped. May be called at any time, any number of times."""
        ...


@frozen
class Serving:
    """What is served now, for `/v1/models`, `/ready` and `/health`."""

    models: tuple[str, ...]
    """Models that may be asked for: every role that they need has a worker, though it may be fenced."""
    ready: tuple[str, ...]
    """Those of them that are ready: every role that they need has a worker that takes new work."""
    missing: tuple[str, ...]
    """What is not there, in words ("prefill workers of tiny: 0 of 1")."""
    context_tokens: int
    draining: bool = False


@frozen
class WorkerGlance:
    """One worker for the dashboard and the gauges."""

    worker_id: WorkerId
    name: str
    role: str
    state: str
    """starting, ready, fenced, draining."""
    in_flight: int
    running: int | None
    waiting: int | None
    kv_share: float | None
    cached_blocks: int | None


class Backend(Protocol):
    """What serves requests."""

    def submit(self, ask: Ask) -> Answer:
        """Take a request; it may end `rejected` at once. Raises nothing for load: that is an `End`."""
        ...

    def serving(self) -> Serving: ...

    def workers(self) -> Sequence[WorkerGlance]: ...

    def decisions(self, count: int) -> Sequence[Mapping[str, object]]:
        """The last routing decisions, newest first, as plain values: what /debug/decisions tells."""
        ...

    def busy_thresholds(self) -> Mapping[str, float | None]: ...

    def set_busy_thresholds(self, changes: Mapping[str, float | None]) -> None:
        """Raises ConfigError for a limit that there is none of."""
        ...
