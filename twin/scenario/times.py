"""When faults happen and whom they hit, by draws; and when rows arrive that a surge brings forward.

What is drawn (recurring faults, `any`, mean times between failures) is a function of the seed, the fault and how often
it came before: another fault in the file changes none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from policies.cluster.draws import draw, pick
from policies.errors import ConfigError
from twin.scenario.model import Fault, Occurrence, Scenario


def occurrences(fault: Fault, seed: int) -> Iterator[Occurrence]:
    """When a fault happens, in order; endless for one that recurs without a count."""
    end_s = 0.0
    n = 0
    while fault.count is None or n < fault.count:
        at_s = _nth(fault, n, end_s, seed)
        until_s = fault.until_s
        if fault.for_s is not None:
            until_s = at_s + fault.for_s
        elif fault.mttr_s is not None:
            until_s = at_s + _exponential(fault.mttr_s, _u(fault, n, 2, seed))
        yield Occurrence(n, at_s, until_s, _u(fault, n, 1, seed))
        end_s = until_s if until_s is not None else at_s
        n += 1
        if not fault.recurs:
            return


class Surges:
    """When rows arrive that surges bring forward: the demand goes faster while one lasts, and on as usual behind it."""

    def __init__(self, windows: Iterable[tuple[float, float, float]]) -> None:
        """`windows` are (start, end, factor), in seconds of the run; they must not overlap."""
        self._windows = sorted(windows)

    def __call__(self, recorded_s: float) -> float:
        """The time at which a row arrives that was recorded then; monotonic."""
        ahead_s = 0.0  # how much earlier than recorded a row arrives
        for start_s, end_s, factor in self._windows:
            into_s = recorded_s - ahead_s - start_s
            if into_s <= 0.0:
                break
            whole_s = factor * (end_s - start_s)
            if into_s < whole_s:
                return start_s + into_s / factor
            ahead_s += whole_s - (end_s - start_s)
        return recorded_s - ahead_s


def surges(scenario: Scenario) -> Surges | None:
    """The surges of a scenario; None where it has none. Raises ConfigError where they overlap."""
    found = sorted((f for f in scenario.faults if f.kind == "load_surge"), key=lambda f: f.at_s or 0.0)
    windows: list[tuple[float, float, float]] = []
    for fault in found:
        assert fault.at_s is not None
        end_s = fault.until_s if fault.until_s is not None else fault.at_s + (fault.for_s or math.inf)
        if windows and fault.at_s < windows[-1][1]:
            raise ConfigError(f"{fault.where}: begins before the surge before it is over, at {windows[-1][1]:g} s")
        windows.append((fault.at_s, end_s, fault.factor))
    return Surges(windows) if windows else None


def chosen(occurrence: Occurrence, names: list[str]) -> str:
    """One of several workers, each equally likely."""
    return names[pick(occurrence.u, len(names))]


def _nth(fault: Fault, n: int, end_s: float, seed: int) -> float:
    u = _u(fault, n, 0, seed)
    if fault.mtbf_s is not None:
        return end_s + _exponential(fault.mtbf_s, u)
    if fault.every_s is not None:
        first_s = fault.every_s if fault.at_s is None else fault.at_s
        return max(first_s + n * fault.every_s + fault.jitter_s * (2.0 * u - 1.0), 0.0)
    assert fault.at_s is not None
    return fault.at_s


def _u(fault: Fault, n: int, use: int, seed: int) -> float:
    return draw(seed, "fault", str(fault.index), 4 * n + use)


def _exponential(mean_s: float, u: float) -> float:
    return -mean_s * math.log(1.0 - u)
