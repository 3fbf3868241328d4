"""Finalists simulated in several processes, here or on a Ray cluster, with the answer that a single process gives.

A turn is a job: it is sent whole, and what comes back are plain values. Ray (the extra `distributed`) is imported when
a cluster is asked for, and never otherwise.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from types import ModuleType
from typing import Any, Final

from aiconfig.evaluate import Simulation, setting_of
from aiconfig.finalists import Outcome, Spread, Turn, take_turn
from aiconfig.patience import Patience, unplayed
from aiconfig.reasons import Rejection
from policies.errors import CapabilityError, ConfigError
from twin.sweep_pool import run_jobs

WANTED: Final = "ray is not installed: --ray needs it here and on every node; pip install 'dynatwin[distributed]'"

REACHED_S: Final = 5.0
"""How long a cluster may take to answer at all."""
Told = Callable[[int, int], None]
"""Called with (turns over, all turns)."""


def simulated_turn(turn: Turn) -> Outcome:
    """One turn, wherever this runs. A bug of ours is an outcome too: it says so, and costs this candidate alone."""
    try:
        return take_turn(turn, Simulation(setting_of(turn.request)))
    except Exception as error:
        return _died(turn, f"a bug of ours: {type(error).__name__}: {error}")


def _died(turn: Turn, why: str) -> Rejection:
    return Rejection(name=turn.candidate.name, reason="failed", detail=why)


def in_processes(processes: int, told: Told | None = None, patience: Patience | None = None) -> Spread:
    """Turns in so many processes of this machine. Raises ConfigError for fewer than one.

    With `patience` Ctrl-C ends them, and those that are not over are `not_simulated`.
    """
    if processes < 1:
        raise ConfigError(f"--jobs {processes}: at least 1 process")

    def spread(turns: Sequence[Turn]) -> Sequence[Outcome]:
        if not turns:
            return []
        return _in_order(run_jobs(simulated_turn, turns, processes, _died), turns, told, patience)

    return spread


def on_ray(address: str, told: Told | None = None, patience: Patience | None = None) -> Spread:
    """Turns on a Ray cluster: `address` as ray.init takes it ("auto", "HOST:PORT", ray://HOST:PORT).

    Every node needs dynatwin of this version, and the files that the request names (a trace, a table of GPUs) at the
    same place. A node that is lost has its turns run elsewhere. Raises CapabilityError without Ray, ConfigError for a
    cluster that cannot be reached.
    """
    ray = _ray()

    def spread(turns: Sequence[Turn]) -> Sequence[Outcome]:
        started = not ray.is_initialized()
        if started:
            _join(ray, address)
        try:
            return _in_order(_on_cluster(ray, turns), turns, told, patience)
        finally:
            if started:
                ray.shutdown()

    return spread


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise CapabilityError(WANTED) from None


def _join(ray: ModuleType, address: str) -> None:
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--ray {address}: no cluster there ({why}); start one with: ray start --head, and give its HOST:PORT"
        ) from None


def _check_reachable(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would try for minutes, and then end the process."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()


def _on_cluster(ray: ModuleType, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
    """(place, outcome) in the order of their ends; Ctrl-C cancels what is under way."""
    task = ray.remote(num_cpus=1, max_retries=3)(simulated_turn)
    places: dict[Any, int] = {task.remote(turn): place for place, turn in enumerate(turns)}
    try:
        while places:
            ready, _ = ray.wait(list(places), num_returns=1)
            place = places.pop(ready[0])
            try:
                yield place, ray.get(ready[0])
            except ray.exceptions.RayError as error:
                yield place, _died(turns[place], f"ray: {str(error).splitlines()[0]}")
    finally:
        for reference in places:
            ray.cancel(reference, force=True)


def _in_order(
    outcomes: Iterator[tuple[int, Outcome]], turns: Sequence[Turn], told: Told | None, patience: Patience | None
) -> list[Outcome]:
    """Outcomes in the order of the turns, as far as patience goes."""
    found: dict[int, Outcome] = {}
    try:
        for place, outcome in outcomes:
            found[place] = outcome
            if told is not None:
                told(len(found), len(turns))
            if patience is not None and patience.over:
                break
    except KeyboardInterrupt:
        if patience is None:
            raise
        patience.interrupted = True
    finally:
        if isinstance(outcomes, Generator):
            outcomes.close()
    return [found.get(place) or unplayed(turn.candidate.name) for place, turn in enumerate(turns)]
