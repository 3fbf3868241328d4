"""What every parser of requests has to know of the server: its limits, what its engines can do, whom it trusts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executors.engines.protocol import Ability
from executors.frontend.errors import FORBIDDEN, ApiError
from executors.frontend.requests.fields import Fields, refuse
from executors.frontend.settings import Limits
from policies.frozen import frozen


@frozen
class Rules:
    """`headers` are the client's, names in lower case. `count` is told what was let pass (a word of the metrics)."""

    limits: Limits
    abilities: frozenset[Ability] = frozenset()
    trusted: bool = False
    ignore_pins: bool = False
    allow_unknown: bool = False
    headers: Mapping[str, str]
    count: Callable[[str], None] = lambda word: None

    def fields(self, document: Mapping[str, object]) -> Fields:
        return Fields(document, on_unknown=self._unknown)

    def _unknown(self, path: str) -> None:
        if not self.allow_unknown:
            refuse(path)
        self.count("unknown_parameter")

    def may(self, what: str) -> bool:
        """Whether the client may do what only trusted keys may; if not, it is refused or, if so configured, ignored."""
        if self.trusted:
            return True
        if self.ignore_pins:
            self.count("ignored_pin")
            return False
        raise ApiError(FORBIDDEN, f"{what}: only for trusted API keys", param=what, code="permission_denied")
