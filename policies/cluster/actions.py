"""What to do: orders, imperative, each with its reason.

The world carries an action out and owes exactly one terminal event for it; `invariants.py` checks that.
"""

from __future__ import annotations

from policies.cluster.bookings import BookingOp, SyncKind
from policies.cluster.ids import FenceCause, Leg, RequestId, Role, WorkerId
from policies.frozen import frozen


@frozen
class Candidate:
    """One worker as a decision saw it, or one rank of it where the router chooses among ranks; blocks and tokens as the
    names say, `why_not` None when eligible. `peer_blocks` are those that it would read in host memory of other workers,
    where these count. `index_mode`: how far what it has cached is known (live, recovering,
    degraded), where its engine tells that itself.
    """

    worker_id: WorkerId
    in_flight: int
    cost: float | None = None
    overlap_blocks: int = 0
    prefill_blocks: float = 0.0
    credit_blocks: float = 0.0
    decode_blocks: float = 0.0
    active_prefill_tokens: float = 0
    active_requests: int = 0
    why_not: str | None = None
    dp_rank: int | None = None
    index_mode: str | None = None
    peer_blocks: int = 0


@frozen
class Action:
    """An order. `reason` is short enough for a log line."""

    reason: str


@frozen
class Dispatch(Action):
    """Send a request, or one leg of it, to a worker. Ends with the end of the request on that worker, or with
    `WorkerLost`; a prefill leg ends with `PrefillDone`.

    `rule` names what decided (min, tie, softmax, rr, hint, ...). `candidates` is filled only when explanations are
    asked for. `dp_rank` is the rank that it must run on (None: the worker chooses).
    """

    request_id: RequestId
    worker_id: WorkerId
    rule: str
    leg: Leg = Leg.AGG
    overlap_blocks: int = 0
    candidates: tuple[Candidate, ...] = ()
    dp_rank: int | None = None


@frozen
class Reject(Action):
    """Refuse a request. Ends with `RequestRejected`. `code` is a word of router.md's shedding table.

    `retry_after_s`: when the client may come again, where load is the reason and there is telling.
    """

    request_id: RequestId
    code: str
    retry_after_s: float | None = None


@frozen
class Enqueue(Action):
    """Keep a request, or its next leg, in the router's queue: nobody gets it yet. Ends with a `Dispatch` or `Reject`
    of the request, or with its end.

    Within `policy_class` the highest `strict_priority` goes first, then the highest `score`, then who came first;
    `uncached_tokens` of its prompt are charged to the class.
    """

    request_id: RequestId
    policy_class: str
    strict_priority: int
    score: float
    uncached_tokens: int


@frozen
class Cancel(Action):
    """Stop a request wherever it is. Ends with `RequestCancelled`."""

    request_id: RequestId


@frozen
class Migrate(Action):
    """Send an interrupted request again, to none of the `excluded` workers. Ends with `RequestMigrated`.

    `attempt` counts from 1; the tokens that the client has already become part of the prompt.
    """

    request_id: RequestId
    attempt: int
    excluded: tuple[WorkerId, ...] = ()


@frozen
class Fail(Action):
    """Give an interrupted request up. Ends with `RequestFailed`. `code` is one word, for counting."""

    request_id: RequestId
    code: str


@frozen
class AddWorker(Action):
    """Start a worker of a group. Ends with `WorkerUp` once it is ready.

    Where it is part of a decision (`decision_id`), the world says at once who starts (`WorkerStarting`), and that start
    ends with `WorkerUp`, `WorkerStartFailed` or `WorkerStartCancelled`. `role` is what the worker will be.
    """

    group: str
    role: Role | None = None
    decision_id: int | None = None


@frozen
class DrainWorker(Action):
    """Let a worker finish what it has and leave. Ends with `WorkerLost`, or with `WorkerRecalled`.

    After `deadline_s` seconds what is left is sent elsewhere (None: as the world has it).
    """

    worker_id: WorkerId
    decision_id: int | None = None
    deadline_s: float | None = None


@frozen
class CancelStart(Action):
    """Do not start a worker after all. Ends with `WorkerStartCancelled`; with `WorkerUp` where it is too late, or
    `WorkerStartFailed`."""

    worker_id: WorkerId
    decision_id: int | None = None


@frozen
class RecallWorker(Action):
    """Let a worker that drains stay. Ends with `WorkerRecalled`, or with `WorkerLost` where it is too late."""

    worker_id: WorkerId
    decision_id: int | None = None


@frozen
class SetTimer(Action):
    """Post `TimerFired(name)` at `due_s`; a later `SetTimer` of the same name replaces it.

    One in the `background` only watches: it does not fire any more once nothing else can happen.
    """

    name: str
    due_s: float
    background: bool = False


@frozen
class Fence(Action):
    """Give a worker no new work for this cause. Ends with `WorkerFenced`."""

    worker_id: WorkerId
    cause: FenceCause


@frozen
class Unfence(Action):
    """This cause is over. Ends with `WorkerUnfenced`."""

    worker_id: WorkerId
    cause: FenceCause


@frozen
class Probe(Action):
    """Send a canary, one token past all queues and counted nowhere, to a worker that has said nothing for `idle_s`.

    The prompt is one block at most, and its KV is given back at once. Ends with `ProbeEnded` within `timeout_s`; with
    `WorkerHeard` where it has said something meanwhile, then no canary is sent, or its answer does not matter; or with
    `WorkerLost`.
    """

    worker_id: WorkerId
    epoch: int
    idle_s: float
    timeout_s: float


@frozen
class RequestIndexReplay(Action):
    """Have a rank's events `from_id` to `to_id` told again. Ends with `IndexReplay`, `IndexDump` (those events are
    gone, here is everything) or `IndexRecoveryFailed` of the same `ask`, or with the loss of the worker. `origin` is
    the router that asks, among several.
    """

    worker_id: WorkerId
    dp_rank: int
    epoch: int
    ask: int
    from_id: int
    to_id: int
    origin: int = 0


@frozen
class RequestIndexDump(Action):
    """Have all told that a rank holds. Ends with `IndexDump`, `IndexReplay` (of every event since number 0) or
    `IndexRecoveryFailed` of the same `ask`, or with the loss of the worker. `origin` is the router that asks.
    """

    worker_id: WorkerId
    dp_rank: int
    epoch: int
    ask: int
    origin: int = 0


@frozen
class PublishBooking(Action):
    """Tell other routers (`dest`; None: all of them) what became of this one's bookings. Ends with `PeerBooking` at
    each, in the order in which one router publishes, or is lost on the way: nobody waits for it.
    """

    origin: int
    seq: int
    kind: SyncKind
    ops: tuple[BookingOp, ...] = ()
    dest: int | None = None
