"""Processes of engines: started in a group of their own, watched, and ended with everything that they started.

Nothing is ever signalled that was not started here. The leader of a group is reaped last, after its group is empty, so
that its number cannot have gone to another process meanwhile. Linux only: `pidfd_open` tells of an end without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from policies.errors import CapabilityError, EngineError
from policies.frozen import frozen

TAIL_LINES: Final = 30
TAIL_BYTES: Final = 64 << 10
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 1.0
"""How long to wait between two looks at readiness, at first and at most."""
_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1
KILL_S: Final = 10.0
"""The kernel ends a killed process when its last system call returns; beyond this it hangs in a device."""


@frozen
class Birth:
    """Which process it is: a number alone may belong to another one later. `start_ticks` is field 22 of /proc/PID/stat,
    `started_s` the loop's clock, `started_at` seconds since 1970."""

    pid: int
    start_ticks: int
    started_s: float
    started_at: float


@frozen
class Ended:
    """How a process ended. `code` is negative for a signal; `killed`: it did not go by itself in time;
    `left_behind`: processes of its group that outlived it and were killed."""

    code: int
    killed: bool
    left_behind: int


class EngineProcess:
    """One process with its group, log and watcher. Made by `start`; all methods belong to the loop that made it."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], pidfd: int, log: Path) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.log = log
        self.birth = Birth(
            pid=popen.pid, start_ticks=_start_ticks(popen.pid), started_s=loop.time(), started_at=time.time()
        )
        self._popen = popen
        self._pidfd = pidfd
        self._killed = False
        self._left_behind = 0
        self._leader_gone = asyncio.Event()
        self._ended: asyncio.Future[Ended] = loop.create_future()
        loop.add_reader(pidfd, self._noticed)
        self._reaper = loop.create_task(self._reap(), name=f"reaper of {name}")

    @staticmethod
    async def start(
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep_open: Sequence[int] = (),
    ) -> EngineProcess:
        """Run `command`, its output appended to `log` (mode 0600). `environment` is all that it gets (None: ours);
        `keep_open` are descriptors it inherits. Raises EngineError if there is no such program."""
        if not hasattr(os, "pidfd_open"):
            raise CapabilityError("engines are started on Linux 5.3 or later only; run this on such a host")
        with _open_log(log) as output:
            try:
                popen = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                    env=environment, start_new_session=True, pass_fds=tuple(keep_open), preexec_fn=_with_parent(),
                )  # fmt: skip
            except OSError as error:
                raise EngineError(f"{name}: cannot start {command[0]}: {error.strerror}") from error
        return EngineProcess(name, popen, os.pidfd_open(popen.pid), log)

    # ------------------------------------------------------------ while it runs

    @property
    def pid(self) -> int:
        return self.birth.pid

    @property
    def ended(self) -> Ended | None:
        """How it ended; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> Ended:
        """Until it has ended, for whatever reason, and its group with it."""
        return await asyncio.shield(self._ended)

    def when_ended(self, tell: Callable[[Ended], None]) -> None:
        """Call `tell` once, when it has ended (also if it has already)."""
        self._ended.add_done_callback(lambda ended: tell(ended.result()))

    async def wait_ready(self, check: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Until `check` says so. An OSError or TimeoutError of it means "not yet"; other errors are raised.

        Raises EngineError, with the end of the log, if the process ends first or `deadline_s` seconds pass.
        """
        looking = asyncio.ensure_future(_look(check))
        try:
            both: set[asyncio.Future[None] | asyncio.Future[Ended]] = {looking, self._ended}
            await asyncio.wait(both, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                how = _status(self._ended.result().code)
                raise EngineError(f"{self.name} ended with {how} before it was ready; {self.tail()}")
            if not looking.done():
                raise EngineError(f"{self.name} is not ready after {deadline_s:g} s; {self.tail()}")
            looking.result()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log, for an error."""
        text = _last_lines(self.log, lines)
        return f"its log {self.log} ends:\n{text}" if text else f"its log {self.log} is empty"

    # ------------------------------------------------------------ its end

    async def stop(self, deadline_s: float) -> Ended:
        """SIGTERM to the process, `deadline_s` seconds to go in, then SIGKILL to its group. May be called again, from
        anywhere: the earliest deadline counts."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                await self._leader_gone.wait()
        except TimeoutError:
            self._killed = True
            self.kill()
        try:
            async with asyncio.timeout(KILL_S):
                return await self.wait()
        except TimeoutError:
            raise EngineError(
                f"{self.name} (pid {self.pid}) is there {KILL_S:g} s after SIGKILL: it hangs in the kernel, as with a "
                "device that does not answer; look at dmesg"
            ) from None

    def kill(self) -> None:
        """SIGKILL to the group, now."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._leader_gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _noticed(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._leader_gone.set()

    async def _reap(self) -> None:
        """The leader is a zombie by now and keeps its number: kill the rest of the group, then let the number go."""
        await self._leader_gone.wait()
        self._left_behind = len(list(group_members(self.pid)))
        wait_s = 0.001
        while list(group_members(self.pid)):
            self.kill()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.1)
        code = self._popen.wait()
        os.close(self._pidfd)
        self._ended.set_result(Ended(code=code, killed=self._killed, left_behind=self._left_behind))


def group_members(group: int) -> Iterator[int]:
    """Processes of a process group that are not zombies, by number."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group and fields[0] not in "ZX":
                yield int(entry.name)


def still_runs(birth: Birth) -> bool:
    """Whether that very process is there, and not another one that got its number."""
    fields = _stat(birth.pid)
    return bool(fields) and int(fields[19]) == birth.start_ticks and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the third field (state) on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _start_ticks(pid: int) -> int:
    return int(_stat(pid)[19])


async def _look(check: Callable[[], Awaitable[bool]]) -> None:
    wait_s = FIRST_LOOK_S
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            if await check():
                return
        await asyncio.sleep(wait_s)
        wait_s = min(1.5 * wait_s, LONGEST_LOOK_S)


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[int]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(log, 0o600)  # also where it was there before
        yield log
    finally:
        os.close(log)


def _last_lines(path: Path, lines: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    return ""


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _with_parent() -> Callable[[], None]:
    """For the child, before its program runs: it is asked to go when we are gone, even if we were killed."""
    parent = os.getpid()

    def before() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # gone before that took effect
            os._exit(1)

    return before
