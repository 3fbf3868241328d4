"""What a live cluster tells its shadow, and what it hears from it. Plain values that go through a pipe.

Times are seconds of the live world's clock. Facts are told in order of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from policies.cluster.events import BusyThresholdsChanged
from policies.cluster.ids import RequestId, WorkerId

Outcome = Literal["completed", "cancelled", "rejected", "failed"]


class Setup(NamedTuple):
    """First of all. `config` is TOML, as it is served. A request that is open for `wait_s` is simulated before its
    length is known. `record`: folder for the simulated run (None: it is not kept)."""

    config: str
    wait_s: float
    record: str | None


class Arrived(NamedTuple):
    """A request. `hashes` are those of its complete blocks of `block_size` tokens (64-bit numbers, native order; None
    where nobody hashed them)."""

    at_s: float
    request_id: RequestId
    isl: int
    max_tokens: int
    hashes: bytes | None = None
    session_id: str | None = None
    priority: int = 0
    lora: str | None = None
    tenant: str | None = None
    worker_hint: WorkerId | None = None


class Ended(NamedTuple):
    """Its one end. `first_s` and `last_s` are when its client was given its first and last token (None: none)."""

    at_s: float
    request_id: RequestId
    outcome: Outcome
    output_tokens: int
    first_s: float | None
    last_s: float | None


class Joined(NamedTuple):
    """A worker of a group takes work; it says what its engine has room for (None: it does not say)."""

    at_s: float
    worker_id: WorkerId
    group: str
    pool_tokens: int | None
    max_num_seqs: int | None


class Left(NamedTuple):
    """A worker is gone. `drained`: it had nothing left."""

    at_s: float
    worker_id: WorkerId
    reason: str
    drained: bool


class Drains(NamedTuple):
    """A worker takes nothing new; `stays`: it does so again."""

    at_s: float
    worker_id: WorkerId
    stays: bool = False


class Limits(NamedTuple):
    """Limits on load were changed."""

    at_s: float
    event: BusyThresholdsChanged


OfWorkers: TypeAlias = Joined | Left | Drains | Limits
Fact: TypeAlias = Arrived | Ended | OfWorkers


class Batch(NamedTuple):
    """All that happened before `now_s` and was not told yet. `over`: nothing more happens."""

    now_s: float
    facts: tuple[Fact, ...]
    over: bool = False


# --- and back ---------------------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """The configuration can be simulated. `notices`: what of it is not as it is live, in words."""

    notices: tuple[str, ...] = ()


class Refused(NamedTuple):
    """It cannot, for this reason."""

    text: str


class Latency(NamedTuple):
    """Of one request: `gaps` between its tokens take `gaps_s` together. Time to first token and end to end are from
    arrival."""

    ttft_s: float
    e2e_s: float
    gaps: int

    @property
    def gaps_s(self) -> float:
        return self.e2e_s - self.ttft_s

    @property
    def tpot_s(self) -> float | None:
        """The mean gap; None for an answer of one token."""
        return self.gaps_s / self.gaps if self.gaps > 0 else None


class Pair(NamedTuple):
    """A request that completed in both worlds."""

    request_id: RequestId
    arrival_s: float
    predicted: Latency
    measured: Latency


class Progress(NamedTuple):
    """The answer to a batch; more pairs may come with the next. The simulation is at `clock_s`. `left_out`: requests
    that were not compared, by reason, since the last answer; `open` have arrived, and what becomes of them is not known
    yet."""

    clock_s: float
    pairs: tuple[Pair, ...]
    left_out: Mapping[str, int]
    open: int
    notices: tuple[str, ...] = ()
