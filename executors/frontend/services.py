"""What a frontend is made of, for whoever handles a request; what is known of a request before its body is read."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from executors.backend import Backend
from executors.frontend.access import Keys, Principal, RateLimit, Role
from executors.frontend.errors import NOT_FOUND, UNAVAILABLE, ApiError, Family
from executors.frontend.glance import Glance
from executors.frontend.live import Live
from executors.frontend.metrics import UNKNOWN_MODEL, Metrics
from executors.frontend.settings import Settings
from executors.frontend.shadow import ShadowGauges
from executors.frontend.stopping import Stopping
from executors.frontend.tokens import ServedTokenizer

if TYPE_CHECKING:
    from executors.frontend.run import Run

CALL: Final = "dynatwin.call"
"""Where a scope keeps its `Call`."""
ABORT: Final = "dynatwin.abort"
"""Where the state of a connection keeps what cuts it off."""
STREAMING: Final = "dynatwin.streaming"
"""Where it keeps that a stream of events is under way."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Call:
    """One HTTP request (or RPC): who, when (by the clock of the services), under which name."""

    request_id: str
    received_s: float
    family: Family
    principal: Principal
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """A model under the name that the client used, with the adapter that it named."""

    name: str
    tokenizer: ServedTokenizer
    lora: str | None = None


class Open:
    """How many requests are being handled; each is a `with` of this."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.count += 1
        self._none.clear()

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()

    async def idle(self) -> None:
        """Returns when there are none."""
        await self._none.wait()


@dataclass(slots=True)
class Services:
    backend: Backend
    tokenizers: Mapping[str, ServedTokenizer]
    settings: Settings
    metrics: Metrics
    live: Live
    keys: Keys
    rate: RateLimit
    stopping: Stopping
    pool: Executor
    now: Callable[[], float]
    open: Open = field(default_factory=Open)
    runs: set[Run] = field(default_factory=set)

    @classmethod
    def build(
        cls,
        backend: Backend,
        tokenizers: Mapping[str, ServedTokenizer],
        settings: Settings,
        stopping: Stopping,
        now: Callable[[], float],
    ) -> Services:
        """Raises ConfigError for key files that cannot be read."""
        collectors = (Glance(backend, settings.metrics_prefix, tuple(tokenizers)), ShadowGauges(backend))
        access = settings.access
        return cls(
            backend=backend,
            tokenizers=dict(tokenizers),
            settings=settings,
            metrics=Metrics(settings.metrics_prefix, fine=settings.bucket_profile == "superset", collectors=collectors),
            live=Live(),
            keys=Keys.read(access.keys_file, Role.ADMIN if settings.on_loopback else Role.USER),
            rate=RateLimit(access, now),
            stopping=stopping,
            pool=ThreadPoolExecutor(settings.limits.tokenizer_threads, thread_name_prefix="tokenize"),
            now=now,
        )

    def model(self, name: str) -> Model:
        """The model that a client means. Raises ApiError where there is none, or none that is ready."""
        base, lora = self._base(name)
        if base is None:
            message = f"the model {name[:128]!r} does not exist here"
            raise ApiError(NOT_FOUND, message, param="model", code="model_not_found")
        serving = self.backend.serving()
        if base not in serving.models:
            missing = "; ".join(serving.missing) or "it has no workers"
            raise ApiError(UNAVAILABLE, f"the model is not ready: {missing}", code="no_endpoints")
        return Model(name=name, tokenizer=self.tokenizers[base], lora=lora)

    def base(self, name: str) -> str | None:
        """The model behind a name, an alias or an adapter; None where nobody knows it."""
        return self._base(name)[0]

    def _base(self, name: str) -> tuple[str | None, str | None]:
        name = self.settings.aliases.get(name, name)
        if name in self.tokenizers:
            return name, None
        if name in self.settings.loras:
            return self.settings.loras[name], name
        base, colon, adapter = name.rpartition(":")
        base = self.settings.aliases.get(base, base)
        if colon and self.settings.loras.get(adapter) == base:
            return base, adapter
        return None, None

    def label(self, name: str) -> str:
        """The name of a model in metrics, whatever a client calls it."""
        return self.base(name) or UNKNOWN_MODEL

    def names(self) -> list[str]:
        """What may be asked for now: ready models, then their aliases and adapters."""
        ready = [name for name in self.tokenizers if name in self.backend.serving().ready]
        others = [*self.settings.aliases, *self.settings.loras]
        return [*ready, *(name for name in others if self.base(name) in ready)]

    @property
    def ready(self) -> bool:
        serving = self.backend.serving()
        known = any(name in serving.ready for name in self.tokenizers)
        return known and not serving.missing and not serving.draining and not self.stopping.leaving


def new_request_id(given: str | None) -> str:
    """The client's own, if it is a plain word."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
