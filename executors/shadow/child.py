"""The process that simulates: started, asked, ended. Nothing that becomes of it raises once it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any, Final

from policies.errors import ConfigError, EngineError
from twin.shadow.facts import Batch, Progress, Ready, Refused, Setup
from twin.shadow.pipe import LENGTH, pack, unpack

START_S: Final = 60.0
TAIL_BYTES: Final = 8 << 10


class Gone(Exception):
    """The process has ended; its text says what it said last."""


class Child:
    """One process, made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last = b""
        self._listening = asyncio.ensure_future(self._listen())

    @staticmethod
    async def start(setup: Setup) -> Child:
        """Returns when it has found that the configuration can be simulated. Raises ConfigError where it cannot."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twin.shadow", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        child = Child(process)
        try:
            async with asyncio.timeout(START_S):
                told = await child._ask(setup)
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError | Gone):
                raise EngineError(f"--shadow: its process did not come up ({error or 'no answer'})") from None
            raise
        if isinstance(told, Refused):
            await child.kill()
            raise ConfigError(f"--shadow: the configuration cannot be simulated: {told.text}")
        assert isinstance(told, Ready)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def answer(self, batch: Batch) -> Progress:
        """What came of a batch. Raises Gone."""
        told = await self._ask(batch)
        assert isinstance(told, Progress)
        return told

    async def end(self, within_s: float) -> None:
        """It has been told that all is over, and may take this long to write what it keeps."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """It is gone when this returns."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        await self._listening

    async def _ask(self, message: tuple[Any, ...]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(pack(message))
            await stdin.drain()
            (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
            return unpack(await stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Gone(await self._why()) from None

    async def _why(self) -> str:
        await self.kill()
        code = self._process.returncode
        lines = self._last.decode(errors="replace").strip().splitlines()
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{ended}: {lines[-1]}" if lines else ended

    async def _listen(self) -> None:
        """Keep the end of what it prints, and never let it wait for us."""
        stderr = self._process.stderr
        assert stderr is not None
        while some := await stderr.read(1 << 16):
            self._last = (self._last + some)[-TAIL_BYTES:]
