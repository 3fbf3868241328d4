"""The virtual connector: decisions are written down, and whoever scales by them says when each is so.

A decision that nobody has completed stands in the way of the next one: until then nothing is written, and the planner
only observes. One that takes too long is passed over with an alarm, and the next starts from the workers there are.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from executors.clock import Clock
from executors.connectors.protocol import ConnectorError, Seen, pause
from executors.connectors.virtual_store import (
    DECISION,
    DecisionStore,
    VirtualDecision,
    decision_text,
    read_completed,
    read_decision,
)
from executors.discovery.protocol import StoreError
from policies.cluster.ids import Role
from policies.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)

_PREFILL: Final = "num_prefill"
_DECODE: Final = "num_decode"
FIELDS: Final = {Role.PREFILL: _PREFILL, Role.DECODE: _DECODE, Role.MIXED: _DECODE}
"""Which number is whose; a cluster of mixed workers has decode workers alone."""


class VirtualConnector:
    """`roles`: of the groups that it scales, at most one for each number."""

    name = "virtual connector"
    watches = False

    def __init__(
        self, store: DecisionStore, roles: Mapping[str, Role], clock: Clock, poll_s: float, timeout_s: float
    ) -> None:
        self.roles = roles
        self.poll_s, self.timeout_s = poll_s, timeout_s
        self._store = store
        self._clock = clock
        self._groups: dict[str, str] = {}
        for group, role in roles.items():
            other = self._groups.setdefault(FIELDS[role], group)
            if other != group:
                raise ConfigError(
                    f"the virtual connector has one {FIELDS[role]}, and groups {other} and {group} would both be it; "
                    "plan one group of each role"
                )
        self._last: VirtualDecision | None = None
        self._text: bytes | None = None
        self._passed_over: int | None = None
        """A decision that took too long: its numbers are not believed."""

    async def open(self) -> None:
        try:
            await self._read()
        except StoreError as error:
            raise ConfigError(f"planner.virtual.store: {error}; make it reachable before the planner starts") from error

    async def settled(self) -> None:
        """Wait for a decision of whoever planned before."""
        await self._answered(self._read())
        until_s = self._clock.now() + self.timeout_s
        while not await self._answered(self._completed()):
            if self._clock.now() >= until_s:
                assert self._last is not None
                log.error("%s: decision %d is not completed: passed over", self._store.name, self._last.decision_id)
                self._passed_over = self._last.decision_id
                return
            await pause(self._clock, self.poll_s)

    async def asked(self) -> Mapping[str, int | None]:
        last = self._last
        if last is None or last.decision_id == self._passed_over:
            return dict.fromkeys(self.roles)
        counts = {_PREFILL: last.num_prefill, _DECODE: last.num_decode}
        return {group: counts[field] for field, group in self._groups.items()}

    async def write(self, change: Mapping[str, int], base: Mapping[str, int]) -> Mapping[str, int]:
        targets = {group: max(0, base[group] + by) for group, by in change.items()}
        decision = self._next(targets, base)
        text = decision_text(decision)
        try:
            written = await self._store.swap(DECISION, self._text, text)
        except StoreError as error:
            raise ConnectorError(str(error)) from error
        if not written:
            raise ConnectorError(f"{self._store.name}: another planner has just written a decision; run one planner")
        self._last, self._text = decision, text
        return targets

    async def rehearse(self, change: Mapping[str, int], base: Mapping[str, int]) -> str:
        targets = {group: max(0, base[group] + by) for group, by in change.items()}
        return f"would write {decision_text(self._next(targets, base)).decode()}"

    async def look(self) -> Seen:
        if await self._answered(self._completed()):
            return Seen(confirmed=True)
        assert self._last is not None
        return Seen(confirmed=False, waits_for=f"its client has not completed decision {self._last.decision_id}")

    async def give_up(self, undo: Mapping[str, int]) -> None:
        """Nothing is written: the next decision says from the workers that there are how many are wanted."""
        if self._last is not None:
            self._passed_over = self._last.decision_id

    async def close(self) -> None:
        await self._store.close()

    def _next(self, targets: Mapping[str, int], base: Mapping[str, int]) -> VirtualDecision:
        """The decision after the last one; who does not change is to be as before."""
        counts = {field: targets.get(group, base[group]) for field, group in self._groups.items()}
        number = 1 if self._last is None else self._last.decision_id + 1
        return VirtualDecision(decision_id=number, num_prefill=counts.get(_PREFILL), num_decode=counts.get(_DECODE))

    async def _read(self) -> None:
        self._last, self._text = await read_decision(self._store)

    async def _completed(self) -> bool:
        if self._last is None or self._last.decision_id == self._passed_over:
            return True
        completed = await read_completed(self._store)
        if completed is not None and completed > self._last.decision_id:
            raise ConnectorError(
                f"{self._store.name}: decision {completed} is said to be completed, and the last one was "
                f"{self._last.decision_id}; remove what another planner has left there"
            )
        return completed == self._last.decision_id

    async def _answered(self, asked: Coroutine[Any, Any, T]) -> T:
        try:
            return await asked
        except (StoreError, ConfigError) as error:
            raise ConnectorError(str(error)) from error
