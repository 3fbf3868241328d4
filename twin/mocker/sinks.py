"""Where a run's rows go: anything with these three buffers, for example `reports.record.RunWriter`."""

from __future__ import annotations

from typing import Protocol

Cells = tuple[object, ...]


class Sinks(Protocol):
    """Row buffers in the column order of `reports.record`; `spill` may empty them. `retry_after_s` has the few rows
    that were told when to come again, put there before their request."""

    requests: dict[int, Cells]
    retry_after_s: dict[int, float]
    steps: list[Cells]
    decisions: list[Cells]

    def spill(self) -> None: ...


class MemorySinks:
    """Keeps every row, for tests and short runs."""

    def __init__(self) -> None:
        self.requests: dict[int, Cells] = {}
        self.retry_after_s: dict[int, float] = {}
        self.steps: list[Cells] = []
        self.decisions: list[Cells] = []

    def spill(self) -> None:
        """Nothing to do: everything stays."""
