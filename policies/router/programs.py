"""Programs: agents whose requests come one after another, each going on with what the one before left in a KV pool.

A program reasons while a request of it is open and acts between two of them, while its tools run and its KV is only
kept. It is active, or paused: then no room is kept for it, and its next request must find some. Nothing here chooses a
worker, and nothing is forgotten of a program that is reasoning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.state import WorkerView
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.router.checks import within


@frozen
class ProgramSettings:
    """Shares are of a worker's KV blocks, in use by programs and by requests that are open.

    Every `tick_s`, programs of a worker at `pause_at` or more are paused until it is down to `pause_down_to`; a paused
    one goes on where it leaves the worker `hysteresis` below `pause_at`, or after `force_resume_s` anywhere. A request
    that has to wait while its worker is at `demote_at` or more counts as come `demote_s` later.
    """

    pause_at: float
    pause_down_to: float
    demote_at: float
    demote_s: float
    hysteresis: float
    tick_s: float
    force_resume_s: float

    def __post_init__(self) -> None:
        for key in ("pause_at", "pause_down_to", "demote_at", "hysteresis"):
            within(f"thunder.{key}", getattr(self, key), 0, 1)
        within("thunder.demote_s", self.demote_s, 0)
        within("thunder.tick_s", self.tick_s, 1e-3)
        within("thunder.force_resume_s", self.force_resume_s, 0)
        if self.pause_down_to > self.pause_at:
            raise ConfigError(
                f"router.thunder.pause_down_to is {self.pause_down_to:g}, more than pause_at ({self.pause_at:g}): "
                "pausing would never reach it; give at most pause_at"
            )
        if self.hysteresis > self.pause_at:
            raise ConfigError(
                f"router.thunder.hysteresis is {self.hysteresis:g}, more than pause_at ({self.pause_at:g}): "
                "nothing paused would ever fit again; give at most pause_at"
            )


class Phase(Enum):
    """Whether a request of a program is open, or its tools run."""

    REASONING = "reasoning"
    ACTING = "acting"


class Program:
    """One program: the worker that has its KV, its size there, its open requests, and since when it is in its phase.

    A single request without a session is a program that ends with it.
    """

    __slots__ = ("blocks", "open", "paused", "session_id", "since_s", "worker_id")

    def __init__(self, session_id: str | None) -> None:
        self.session_id = session_id
        self.worker_id: WorkerId | None = None
        self.blocks = 0
        self.open = 0
        self.paused = False
        self.since_s = 0.0

    @property
    def phase(self) -> Phase:
        return Phase.REASONING if self.open else Phase.ACTING

    @property
    def held_blocks(self) -> int:
        """Blocks that it takes up: a paused one only until its answer ends."""
        return self.blocks if self.worker_id is not None and (self.open or not self.paused) else 0


class Programs:
    """All programs of a cluster, and how much of each worker's pool they take up. `moves`: to another worker."""

    __slots__ = ("_block_size", "_held", "_known", "_open", "moves", "settings")

    def __init__(self, settings: ProgramSettings, block_size: int) -> None:
        self.settings = settings
        self.moves = 0
        self._block_size = block_size
        self._known: OrderedDict[str, Program] = OrderedDict()  # by session, the one not used for longest first
        self._open: dict[RequestId, tuple[Program, int]] = {}  # with the tokens of the prompt
        self._held: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, session_id: str | None) -> Program | None:
        """The program of a session that has sent something before."""
        return self._known.get(session_id) if session_id is not None else None

    def blocks_of(self, isl: int) -> int:
        """Blocks that so many tokens take up."""
        return -(-isl // self._block_size)

    def held_blocks(self, worker_id: WorkerId) -> int:
        """Blocks of a worker that programs take up."""
        return self._held.get(worker_id, 0)

    def use(self, worker: WorkerView, more_blocks: int = 0) -> float:
        """Share of a worker's blocks that is taken up, with some more; 0 where nobody knows how many it has."""
        total = worker.up.total_blocks
        return (self.held_blocks(worker.worker_id) + more_blocks) / total if total else 0.0

    # ------------------------------------------------------------ what happens to them

    def sent(self, request_id: RequestId, session_id: str | None, worker_id: WorkerId, isl: int, at_s: float) -> None:
        """A request goes to a worker; its program reasons there from now on, and is active."""
        program = self.of(session_id)
        if program is None:
            program = Program(session_id)
            if session_id is not None:
                self._known[session_id] = program
        self._open[request_id] = (program, isl)
        self._count(program, -1)
        blocks = self.blocks_of(isl)
        self.moves += program.worker_id not in (None, worker_id)
        program.blocks = max(program.blocks, blocks) if program.open else blocks
        program.worker_id, program.paused, program.since_s = worker_id, False, at_s
        program.open += 1
        self._count(program, 1)
        self._used(program)

    def over(self, request_id: RequestId, at_s: float, output_tokens: int = 0) -> WorkerId | None:
        """A request has ended, or left its worker: what it made belongs to its program. The worker of that."""
        found = self._open.pop(request_id, None)
        if found is None:
            return None
        program, isl = found
        self._count(program, -1)
        program.open -= 1
        program.blocks = max(program.blocks, self.blocks_of(isl + output_tokens))
        program.since_s = at_s
        self._used(program)
        if program.open or (program.session_id is not None and program.worker_id is not None):
            self._count(program, 1)
        else:
            self._forget(program)
        return program.worker_id

    def lose(self, worker_id: WorkerId) -> None:
        """A worker is gone, with all KV that it kept."""
        for program in [*self._known.values(), *(program for program, _ in self._open.values())]:
            if program.worker_id == worker_id:
                program.worker_id = None
                if not program.open:
                    self._forget(program)
        self._held.pop(worker_id, None)

    def expire(self, now_s: float) -> int:
        """Forget programs that have acted for as long as one may be paused: they have probably ended. How many."""
        before = len(self._known)
        while self._known:
            program = next(iter(self._known.values()))
            if program.open or now_s < program.since_s + self.settings.force_resume_s:
                break
            self._count(program, -1)
            self._forget(program)
        return before - len(self._known)

    def pause(self, workers: Iterable[WorkerView]) -> int:
        """Pause programs of the workers that are too full, those that act first, whoever is in its phase for longest
        first; those that reason keep their blocks until their answers end. How many.
        """
        settings, paused = self.settings, 0
        for worker in workers:
            total = worker.up.total_blocks
            if not total or self.use(worker) < settings.pause_at:
                continue
            mine = [program for program in self._known.values() if program.worker_id == worker.worker_id]
            kept = self.held_blocks(worker.worker_id) - sum(p.held_blocks for p in mine if p.paused)
            if kept < settings.pause_at * total:
                continue
            for program in sorted((p for p in mine if not p.paused), key=lambda p: (p.open > 0, p.since_s)):
                if kept <= settings.pause_down_to * total:
                    break
                kept -= program.blocks
                self._count(program, -1)
                program.paused = True
                self._count(program, 1)
                paused += 1
        return paused

    # ------------------------------------------------------------ keeping count

    def _count(self, program: Program, sign: int) -> None:
        blocks = program.held_blocks
        if blocks and program.worker_id is not None:
            self._held[program.worker_id] = self.held_blocks(program.worker_id) + sign * blocks

    def _used(self, program: Program) -> None:
        if program.session_id is not None and self._known.get(program.session_id) is program:
            self._known.move_to_end(program.session_id)

    def _forget(self, program: Program) -> None:
        if program.session_id is not None and self._known.get(program.session_id) is program:
            del self._known[program.session_id]
