"""Runs jobs in several processes and hands back results as they come; a process that dies costs its own job alone.

Each process is started anew (no fork of a parent with threads) and takes one job after another. Nothing here knows
what a job is.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

GRACE_S = 5.0
"""How long a process that was told to end may take before it is killed."""


def usable_cores() -> int:
    """The cores that this process may use, where the system tells, else those that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_jobs(
    work: Callable[[Job], Result], jobs: Sequence[Job], processes: int, died: Callable[[Job, str], Result]
) -> Iterator[tuple[int, Result]]:
    """(place of the job, its result) in the order of their ends.

    `work` must be a function of a module, and must not raise; `died` makes the result of a job whose process ended
    under it. When the caller stops asking (Ctrl-C too), the processes are ended with what they are at.
    """
    pool = _Pool(work, jobs, min(processes, len(jobs)), died)
    try:
        yield from pool.results()
    finally:
        pool.stop()


class _Pool(Generic[Job, Result]):
    def __init__(
        self, work: Callable[[Job], Result], jobs: Sequence[Job], processes: int, died: Callable[[Job, str], Result]
    ) -> None:
        self._work, self._jobs, self._died = work, jobs, died
        self._left = deque(range(len(jobs)))
        self._busy: dict[Connection, tuple[SpawnProcess, int]] = {}
        self._processes = processes

    def results(self) -> Iterator[tuple[int, Result]]:
        for _ in range(self._processes):
            self._start()
        while self._busy:
            for pipe in connection.wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                process, place = self._busy.pop(pipe)
                try:
                    result: Result = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    yield place, self._died(self._jobs[place], _how(process.exitcode))
                    self._start()
                else:
                    self._next(pipe, process)
                    yield place, result

    def _start(self) -> None:
        if not self._left:
            return
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        process.start()
        theirs.close()
        self._next(ours, process)

    def _next(self, pipe: Connection, process: SpawnProcess) -> None:
        """Give a process its next job, or let it go."""
        if not self._left:
            pipe.close()
            process.join(GRACE_S)
            return
        place = self._left.popleft()
        self._busy[pipe] = (process, place)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died between two jobs: reading the pipe says so
            pipe.send(self._jobs[place])

    def stop(self) -> None:
        for process, _ in self._busy.values():
            process.terminate()
        for pipe, (process, _) in self._busy.items():
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
            pipe.close()


def _serve(pipe: Connection, work: Callable[[object], object]) -> None:
    """The life of a process: jobs from the pipe until it is closed. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            pipe.send(work(pipe.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody is there to ask, or to be told
            return


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"its process ended with exit code {code}"
