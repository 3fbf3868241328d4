"""Jobs in processes: every job has its result, whoever dies on the way."""

from __future__ import annotations

import os
import signal

from twin.sweep_pool import run_jobs


def double_or_die(job: int) -> str:
    """Kills its own process at 3, leaves it at 5."""
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == 5:
        os._exit(7)
    return f"{2 * job} by {os.getpid()}"


def died(job: int, how: str) -> str:
    return f"{job} died: {how}"


def test_a_process_that_dies_costs_its_own_job_alone() -> None:
    results = dict(run_jobs(double_or_die, list(range(8)), 2, died))
    assert sorted(results) == list(range(8))
    assert results[3] == "3 died: its process was ended by SIGKILL (out of memory?)"
    assert results[5] == "5 died: its process ended with exit code 7"
    assert [results[n].split()[0] for n in (0, 1, 2, 4, 6, 7)] == ["0", "2", "4", "8", "12", "14"]


def test_jobs_run_in_other_processes_as_many_as_asked_for() -> None:
    results = [result for _, result in run_jobs(double_or_die, [0, 1, 2], 1, died)]
    (pid,) = {result.split()[-1] for result in results}
    assert pid != str(os.getpid())


def test_no_jobs_need_no_process() -> None:
    assert list(run_jobs(double_or_die, [], 4, died)) == []
