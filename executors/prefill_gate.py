"""Leased prefills are sent to a worker only while it will begin them soon; the others wait here, in order of dispatch.

The lease of a prefill counts from when it was sent, for nobody else's clock says when it was over. Thirty prompts that
are sent at once to a worker that computes three at a time would have their leases run out in its queue, and be computed
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from policies.cluster.ids import WorkerId

STEPS: Final = 2
"""How many steps' worth of prompt tokens are open at a worker: one that it computes, and one that it does next."""
UNTOLD_TOKENS: Final = 8192
"""Prompt tokens of a step where an engine does not say."""


class Pass:
    """One prefill's place at its worker, or in front of it."""

    __slots__ = ("_over", "_send", "tokens", "worker_id")

    def __init__(
        self, worker_id: WorkerId, tokens: int, send: Callable[[], None], over: Callable[[Pass], None]
    ) -> None:
        self.worker_id = worker_id
        self.tokens = tokens
        self._send = send
        self._over: Callable[[Pass], None] | None = over

    def send(self) -> None:
        """It is its turn."""
        self._send()

    def over(self) -> None:
        """It has ended, or nobody wants it any more: the next ones may go."""
        over, self._over = self._over, None
        if over is not None:
            over(self)


class PrefillGate:
    """Of all prefill workers of one world."""

    def __init__(self) -> None:
        self._open: dict[WorkerId, dict[Pass, None]] = {}
        self._waiting: dict[WorkerId, deque[Pass]] = {}
        self._room: dict[WorkerId, int] = {}

    def waiting(self, worker_id: WorkerId) -> int:
        """How many wait here for a worker."""
        return len(self._waiting.get(worker_id, ()))

    def enter(self, worker_id: WorkerId, tokens: int, step_tokens: int | None, send: Callable[[], None]) -> Pass:
        """`send` is called now, or when those before it have ended. `step_tokens`: what the worker computes in a step.
        One prefill is always sent, however long it is."""
        self._room[worker_id] = STEPS * (step_tokens or UNTOLD_TOKENS)
        made = Pass(worker_id, tokens, send, self._over)
        self._waiting.setdefault(worker_id, deque()).append(made)
        self._let_in(worker_id)
        return made

    def _let_in(self, worker_id: WorkerId) -> None:
        waiting, inside = self._waiting[worker_id], self._open.setdefault(worker_id, {})
        while waiting and (
            not inside or sum(one.tokens for one in inside) + waiting[0].tokens <= self._room[worker_id]
        ):
            first = waiting.popleft()
            inside[first] = None
            first.send()

    def _over(self, ended: Pass) -> None:
        worker_id = ended.worker_id
        inside, waiting = self._open[worker_id], self._waiting[worker_id]
        if ended in inside:
            del inside[ended]
            self._let_in(worker_id)
        else:
            waiting.remove(ended)
        if not inside and not waiting:
            del self._open[worker_id], self._waiting[worker_id], self._room[worker_id]
