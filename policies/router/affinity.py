"""Which worker a session is bound to: the one that took its first request, as long as that one is there.

A binding lasts until `ttl_s` after the end of the last request that went there, or until its worker is fenced; at most
`sessions` are kept, the one not used for longest goes first. A binding never passes a filter: it only prefers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

from policies.cluster.ids import RequestId, WorkerId
from policies.frozen import frozen
from policies.router.checks import one_of, within

Bond = Literal["hard", "soft"]

LONGEST_ID = 256
"""Characters of a session id; a longer one, or one that cannot be printed, binds nothing."""


@frozen
class AffinitySettings:
    """`bond` hard: that worker or, while it is overloaded, none; soft: that worker if it may be. `sessions` at most."""

    bond: Bond
    ttl_s: float
    sessions: int

    def __post_init__(self) -> None:
        one_of("affinity.mode", self.bond, get_args(Bond))
        within("affinity.ttl_s", self.ttl_s, 1, 31_536_000)
        within("affinity.sessions", self.sessions, 1)


class _Binding:
    __slots__ = ("founder", "idle_since_s", "open", "worker_id")

    def __init__(self, worker_id: WorkerId, founder: RequestId) -> None:
        self.worker_id = worker_id
        self.founder: RequestId | None = founder  # who bound it, until somebody is known to have been served there
        self.open = 0
        self.idle_since_s = 0.0


class Affinity:
    """The bindings of one router. `rebound`: sessions that lost their worker; `dropped`: those that were too many."""

    __slots__ = ("_bound", "_requests", "dropped", "rebound", "settings")

    def __init__(self, settings: AffinitySettings) -> None:
        self.settings = settings
        self._bound: OrderedDict[str, _Binding] = OrderedDict()
        self._requests: dict[RequestId, tuple[str, _Binding]] = {}
        self.dropped = 0
        self.rebound = 0

    def __len__(self) -> int:
        return len(self._bound)

    def worker_of(self, session_id: str | None, now_s: float) -> WorkerId | None:
        """The worker that a session is bound to now."""
        if not session_id or (binding := self._bound.get(session_id)) is None:
            return None
        if not binding.open and now_s >= binding.idle_since_s + self.settings.ttl_s:
            del self._bound[session_id]
            return None
        return binding.worker_id

    def unbind(self, session_id: str) -> None:
        """The worker of a session cannot have it any more."""
        if self._bound.pop(session_id, None) is not None:
            self.rebound += 1

    def sent(self, request_id: RequestId, session_id: str | None, worker_id: WorkerId) -> None:
        """A request of a session goes to a worker; the first one binds it."""
        if not session_id or len(session_id) > LONGEST_ID or not session_id.isprintable():
            return
        binding = self._bound.get(session_id)
        if binding is None:
            binding = self._bound[session_id] = _Binding(worker_id, request_id)
            if len(self._bound) > self.settings.sessions:
                self._bound.popitem(last=False)
                self.dropped += 1
        self._bound.move_to_end(session_id)
        if binding.worker_id == worker_id:
            binding.open += 1
            self._requests[request_id] = (session_id, binding)

    def over(self, request_id: RequestId, now_s: float, *, refused: bool = False) -> None:
        """A request has ended, or left its worker. A refusal by the worker undoes the binding that it made."""
        found = self._requests.pop(request_id, None)
        if found is None:
            return
        session_id, binding = found
        binding.open -= 1
        binding.idle_since_s = now_s
        if refused and binding.founder == request_id and not binding.open:
            if self._bound.get(session_id) is binding:
                del self._bound[session_id]
        elif not refused:
            binding.founder = None

    def lose(self, worker_id: WorkerId) -> None:
        """A worker is gone, and with it what its sessions had there."""
        for session_id in [name for name, binding in self._bound.items() if binding.worker_id == worker_id]:
            self.unbind(session_id)
