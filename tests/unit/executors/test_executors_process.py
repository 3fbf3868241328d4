"""Real small processes: they are found ready, are seen to end, and never outlive their stop."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from executors.process import Birth, Ended, EngineProcess, group_members, still_runs
from policies.errors import EngineError

LIMIT_S = 60.0
WAITS = "import signal; open('ready', 'w').close(); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
{then}
"""


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await play()

    asyncio.run(limited())


async def start(code: str, folder: Path, name: str = "engine") -> EngineProcess:
    return await EngineProcess.start(name, [sys.executable, "-c", code], folder / "logs" / "e.log", folder=folder)


async def ready(process: EngineProcess, folder: Path) -> None:
    async def there() -> bool:
        return (folder / "ready").exists()

    await process.wait_ready(there, LIMIT_S)


def test_a_process_leads_a_group_of_its_own_and_goes_on_sigterm(tmp_path: Path) -> None:
    async def play() -> None:
        process = await start(WAITS, tmp_path)
        await ready(process, tmp_path)
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        assert list(group_members(process.pid)) == [process.pid]
        assert still_runs(process.birth)
        assert process.log.stat().st_mode & 0o777 == 0o600
        assert await process.stop(LIMIT_S) == Ended(code=-signal.SIGTERM, killed=False, left_behind=0)
        assert process.ended == await process.stop(0.0), "a second stop is no second end"
        assert not still_runs(process.birth)

    run(play)


def test_a_process_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    async def play() -> None:
        process = await start(STUBBORN, tmp_path)
        await ready(process, tmp_path)
        assert await process.stop(0.05) == Ended(code=-signal.SIGKILL, killed=True, left_behind=0)

    run(play)


def test_a_whole_group_is_killed_at_the_deadline(tmp_path: Path) -> None:
    async def play() -> None:
        then = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        process = await start(PARENT.format(child=STUBBORN, then=then), tmp_path)
        await ready(process, tmp_path)
        assert len(list(group_members(process.pid))) == 2
        assert (await process.stop(0.05)).killed
        assert list(group_members(process.pid)) == []

    run(play)


def test_what_outlives_its_leader_is_killed_and_counted(tmp_path: Path) -> None:
    async def play() -> None:
        process = await start(PARENT.format(child=STUBBORN, then="signal.pause()"), tmp_path)
        await ready(process, tmp_path)
        ended = asyncio.get_running_loop().create_future()
        process.when_ended(ended.set_result)
        os.kill(process.pid, signal.SIGKILL)
        assert await ended == Ended(code=-signal.SIGKILL, killed=False, left_behind=1)
        assert list(group_members(process.pid)) == []

    run(play)


def test_a_process_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    async def never() -> bool:
        raise ConnectionRefusedError

    async def play() -> None:
        code = "import sys; print(*range(100), sep=chr(10), flush=True); sys.exit('no such model')"
        process = await start(code, tmp_path, name="vllm p0")
        with pytest.raises(EngineError) as caught:
            await process.wait_ready(never, LIMIT_S)
        text = str(caught.value)
        assert text.startswith(f"vllm p0 ended with status 1 before it was ready; its log {process.log} ends:\n")
        assert text.endswith("\n99\nno such model")
        assert len(text.splitlines()) == 31, "the first line, and 30 of the log"

    run(play)


def test_a_process_that_is_not_ready_in_time_runs_on_until_it_is_stopped(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async def play() -> None:
        process = await start(WAITS, tmp_path)
        with pytest.raises(EngineError, match=r"engine is not ready after 0\.05 s; its log .* is empty"):
            await process.wait_ready(never, 0.05)
        assert process.ended is None
        await process.stop(LIMIT_S)

    run(play)


def test_a_failure_of_the_check_itself_is_told(tmp_path: Path) -> None:
    async def broken() -> bool:
        raise ValueError("block size 16, expected 32")

    async def play() -> None:
        process = await start(WAITS, tmp_path)
        with pytest.raises(ValueError, match="block size 16"):
            await process.wait_ready(broken, LIMIT_S)
        await process.stop(LIMIT_S)

    run(play)


def test_a_program_that_is_not_there_fails_by_name(tmp_path: Path) -> None:
    async def play() -> None:
        with pytest.raises(EngineError, match="p0: cannot start /nowhere/vllm: No such file"):
            await EngineProcess.start("p0", ["/nowhere/vllm"], tmp_path / "log")

    run(play)


def test_only_its_own_group_is_touched(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)

    async def play() -> None:
        process = await start(WAITS, tmp_path)
        await ready(process, tmp_path)
        await process.stop(0.0)
        process.kill()

    run(play)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait(LIMIT_S)


def test_a_number_that_another_process_got_is_not_the_process() -> None:
    mine = Birth(pid=os.getpid(), start_ticks=1, started_s=0.0, started_at=0.0)
    assert not still_runs(mine)


def test_a_log_is_closed_to_others_also_when_it_was_there(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "e.log"
    log.parent.mkdir()
    log.write_text("before\n", encoding="utf-8")
    log.chmod(0o644)

    async def play() -> None:
        process = await start("print('now')", tmp_path)
        assert (await process.wait()).code == 0

    run(play)
    assert log.read_text(encoding="utf-8") == "before\nnow\n"
    assert log.stat().st_mode & 0o777 == 0o600


KILLED = """
import asyncio, sys
from pathlib import Path
from executors.process import EngineProcess

async def main():
    folder = Path(sys.argv[1])
    started = await EngineProcess.start("engine", [sys.executable, "-c", sys.argv[2]], folder / "e.log", folder=folder)
    print(started.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_engine_goes_when_who_started_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), WAITS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    gone, _, _ = select.select([engine], [], [], LIMIT_S)
    os.close(engine)
    assert gone
