"""What happened: facts, past tense, stamped with the cluster's clock.

Both worlds post these, policies only read them. No event carries what a real router could not know: the true output
length of an open request is nowhere in here.
"""

from __future__ import annotations

from policies.cluster.blocks import BlockPath, BlockRun
from policies.cluster.bookings import BookingOp, SyncKind
from policies.cluster.draws import attempt_key
from policies.cluster.ids import BlockHash, FenceCause, LossCause, ProbeResult, RequestId, Role, Tier, Trait, WorkerId
from policies.frozen import frozen


@frozen
class Event:
    """A fact. `at_s` is when the cluster learned of it, in seconds since the start of the run."""

    at_s: float


@frozen
class RequestEvent(Event):
    """A fact about one request."""

    request_id: RequestId


@frozen
class WorkerEvent(Event):
    """A fact about one worker."""

    worker_id: WorkerId


# ---------------------------------------------------------------- requests


@frozen
class TaintWeight:
    """How much a request would like a worker with this taint: above 0 to have it, below 0 not to."""

    taint: str
    weight: float


@frozen
class Hints:
    """What a client may ask of a router beside the work itself. Most requests ask nothing and carry none.

    `model`: only workers that serve it. `allowed`: only these workers (None: any); `required_taints`: only workers that
    have all of them. `preferred` is taken if it may be, `preferred_taints` weigh on the cost. `policy_class` names a
    class of the router's queue, `family` a family of them; `strict_priority` goes first within a class. `osl_tokens` is
    how long the client expects the answer to be, not how long it will be.
    """

    model: str | None = None
    allowed: tuple[WorkerId, ...] | None = None
    preferred: WorkerId | None = None
    required_taints: tuple[str, ...] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    policy_class: str | None = None
    family: str | None = None
    strict_priority: int = 0
    osl_tokens: int | None = None


@frozen
class RequestArrived(RequestEvent):
    """A request reached the frontend.

    `isl` is the prompt length in tokens. `blocks` is the content of its complete prompt blocks in the router's block
    size, None when nothing is known of the content (it then shares nothing). `max_tokens` is the client's budget.
    `priority` is how many seconds it jumps ahead in a queue. `worker_hint` is a worker that the client asked for by id.
    `tenant` is whose it is. `traits` are what its answer must keep. `local_hashes` name the content of those blocks as
    engines' events do, one each, where somebody listens to these (`kv_events`).
    """

    isl: int
    blocks: BlockPath | None = None
    max_tokens: int | None = None
    priority: int = 0
    session_id: str | None = None
    lora: str | None = None
    worker_hint: WorkerId | None = None
    tenant: str | None = None
    hints: Hints | None = None
    traits: tuple[Trait, ...] = ()
    local_hashes: tuple[BlockHash, ...] | None = None

    @property
    def draw_id(self) -> str:
        """The name under which draws are made for this request; another one for each attempt."""
        return self.request_id


@frozen
class RequestMigrated(RequestArrived):
    """An interrupted request is to be sent again, for the `attempt`-th time: an arrival to every router.

    `isl` counts the `emitted_tokens` that the client has already, `blocks` names their content too; `max_tokens` is
    what is left of the budget. `excluded` are workers that must not get it. `kept_on` is the prefill worker that holds
    its KV, None where the prompt is to be computed again.
    """

    attempt: int
    emitted_tokens: int = 0
    excluded: tuple[WorkerId, ...] = ()
    kept_on: WorkerId | None = None

    @property
    def draw_id(self) -> str:
        return attempt_key(self.request_id, self.attempt)


@frozen
class RequestInterrupted(RequestEvent):
    """The stream of an open request broke on `worker_id` after `emitted_tokens`: it waits for an order.

    `kept_on` is the prefill worker that holds its KV for whoever decodes, as before (None: what it had is gone).
    """

    worker_id: WorkerId
    emitted_tokens: int
    reason: str
    cause: LossCause = LossCause.DISCONNECTED
    kept_on: WorkerId | None = None


@frozen
class PrefillDone(RequestEvent):
    """The prompt is computed on `worker_id` (the prefill leg, when legs are split)."""

    worker_id: WorkerId


@frozen
class RoomReserved(RequestEvent):
    """The decode worker has taken room for the whole prompt: its KV may be computed and sent."""

    worker_id: WorkerId


@frozen
class FirstToken(RequestEvent):
    """The client received its first token, made on `worker_id`."""

    worker_id: WorkerId


@frozen
class TokensEmitted(RequestEvent):
    """`n` further tokens were made on `worker_id`; posted only while a policy subscribes."""

    worker_id: WorkerId
    n: int


@frozen
class RequestFinished(RequestEvent):
    """The request completed on `worker_id` with `output_tokens` tokens."""

    worker_id: WorkerId
    output_tokens: int


@frozen
class RequestRejected(RequestEvent):
    """The request was refused before it made a token: by the router (`worker_id` None) or by an engine."""

    reason: str
    worker_id: WorkerId | None = None


@frozen
class RequestFailed(RequestEvent):
    """The request ended without completing; `output_tokens` were delivered."""

    reason: str
    worker_id: WorkerId | None = None
    output_tokens: int = 0


@frozen
class RequestCancelled(RequestEvent):
    """The client left; `output_tokens` were made."""

    worker_id: WorkerId | None = None
    output_tokens: int = 0


# ---------------------------------------------------------------- workers


@frozen
class WorkerUp(WorkerEvent):
    """A worker is ready for work.

    `total_blocks` of `block_size` tokens each; `max_batched_tokens` is the token budget of one step (None: it does not
    say). `epoch` rises when the same id registers again. `loras` are the adapters that it serves beside the plain model
    (None: whichever is asked for). `dp_ranks` are the data-parallel ranks that tell of their blocks each for itself.
    `taints` say where and what it is, `models` which models it serves (None: any); `on_cpu`: it runs without GPUs.
    `peers`: the layout of its KV, where it reads host memory of workers that say the same, and they its own (None: it
    reads nobody's).
    """

    name: str
    role: Role
    block_size: int
    total_blocks: int | None
    max_batched_tokens: int | None
    max_num_seqs: int
    gpus: int = 1
    epoch: int = 0
    loras: tuple[str, ...] | None = None
    dp_ranks: int = 1
    taints: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    on_cpu: bool = False
    peers: str | None = None

    def serves(self, lora: str | None) -> bool:
        """Whether it can run requests of an adapter; everybody runs those of none (None or "")."""
        return not lora or self.loras is None or lora in self.loras


@frozen
class WorkerStarting(WorkerEvent):
    """A worker that a decision asked for is being started: this is who it will be. Billed from here on."""

    name: str
    role: Role
    group: str
    decision_id: int
    gpus: int = 1


@frozen
class WorkerStartFailed(WorkerEvent):
    """A worker that was starting will not come up."""

    reason: str


@frozen
class WorkerStartCancelled(WorkerEvent):
    """A worker that was starting was called off before it was ready."""


@frozen
class WorkerReported(WorkerEvent):
    """A worker's own account of its load, as of `measured_s` (not later than `at_s`)."""

    measured_s: float
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int


@frozen
class WorkerDraining(WorkerEvent):
    """The worker takes no new work and will leave when its open requests have ended."""


@frozen
class WorkerRecalled(WorkerEvent):
    """A worker that was draining stays, as what it was: it takes new work again."""


@frozen
class WorkerLost(WorkerEvent):
    """The worker is gone, with everything that it held."""

    reason: str = "lost"


@frozen
class WorkerFenced(WorkerEvent):
    """A worker that is up gets no new work until the cause is over; what runs there goes on."""

    cause: FenceCause


@frozen
class WorkerUnfenced(WorkerEvent):
    """That cause is over."""

    cause: FenceCause


@frozen
class WorkerHeard(WorkerEvent):
    """A worker that was to be probed has said something good, last at `last_s`."""

    epoch: int
    last_s: float


@frozen
class ProbeEnded(WorkerEvent):
    """What a canary to a worker of that epoch brought."""

    epoch: int
    result: ProbeResult


# ---------------------------------------------------------------- other routers


@frozen
class PeerBooking(Event):
    """Router `origin` tells router `dest` what became of its bookings; `seq` counts the messages of `origin`.

    A `RESYNC` holds all that `origin` has open; an `ASK` wants one from `dest`. A `LOST` wants it too, and a `RETURN`:
    what `origin` knows of the bookings of `dest`.
    """

    origin: int
    dest: int
    seq: int
    kind: SyncKind
    ops: tuple[BookingOp, ...] = ()


@frozen
class RouterRestarted(Event):
    """The process of router number `router` (the only one is 0) was restarted: what it kept is gone, and what it had
    sent out goes on. Whoever waited in it asks again."""

    router: int = 0


@frozen
class IndexLost(Event):
    """Router number `router` has lost what it knew of caches, and nothing else."""

    router: int = 0


# ---------------------------------------------------------------- KV blocks, time


@frozen
class BlocksStored(WorkerEvent):
    """Blocks became findable on a worker. Blocks that only one request can ever use are left out."""

    runs: tuple[BlockRun, ...]
    tier: Tier = Tier.G1_DEVICE


@frozen
class BlocksRemoved(WorkerEvent):
    """The last copy of these blocks left the worker's tier."""

    runs: tuple[BlockRun, ...]
    tier: Tier = Tier.G1_DEVICE


@frozen
class BlocksCleared(WorkerEvent):
    """The worker dropped its whole cache (of one tier, or of all when `tier` is None)."""

    tier: Tier | None = None


@frozen
class Threshold:
    """A limit of `router.busy` by its name, and what it is from now on (None: there is none)."""

    name: str
    limit: float | None


@frozen
class BusyThresholdsChanged(Event):
    """Somebody who runs the cluster set limits of when a worker is overloaded; those not named stay as they are."""

    changes: tuple[Threshold, ...]


@frozen
class TimerFired(Event):
    """A timer that was asked for with `SetTimer` is due."""

    name: str


ENDS: frozenset[type[Event]] = frozenset({RequestFinished, RequestRejected, RequestFailed, RequestCancelled})
"""The events that end a request; every request gets exactly one."""
