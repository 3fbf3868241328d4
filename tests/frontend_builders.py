"""A frontend on a loopback port before a backend that answers by script: stalls, fails, refuses or dies as told.

The backend is a real one as far as the frontend can see: answers are iterators of deltas, an end follows each, and
`cancel` stops the work. Nothing waits for time to pass: a script that waits does so for an event.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from executors.backend import Ask, Delta, End, Outcome, Serving, WorkerGlance
from executors.engines.protocol import Logprob
from executors.frontend.server import Frontend
from executors.frontend.settings import Deadlines, Limits, Settings
from executors.frontend.stopping import Stopping
from executors.frontend.template import ChatTemplate
from executors.frontend.tokens import ServedTokenizer
from executors.shadow.figures import Compared, Glance, Spread
from policies.cluster.ids import WorkerId
from policies.errors import ConfigError

MODEL = "tiny"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>")
ANSWER = "one two three four five six seven eight nine ten"
FAST = Deadlines(grace_s=0.0, drain_s=5.0)
PATIENCE_S = 20.0
"""After which a test that hangs has failed."""


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE in which every word of `ANSWER` is one token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    made.train_from_iterator([ANSWER, " " + ANSWER] * 20, trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made.to_str()


@functools.cache
def tokenizer() -> ServedTokenizer:
    return ServedTokenizer(tokenizer_json(), ChatTemplate(TEMPLATE, {"bos_token": "<s>"}))


def chat_ids(messages: Sequence[Mapping[str, object]], by: ServedTokenizer | None = None) -> tuple[str, list[int]]:
    """The prompt of a chat, and its token ids."""
    by = by or tokenizer()
    parts = by.fill(messages)
    return "".join(part.text for part in parts), by.encode_parts(parts)


def ids_of(text: str) -> list[int]:
    """Token ids of an answer: no begin token."""
    return list(Tokenizer.from_str(tokenizer_json()).encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Script:
    """What an answer does: `says` its tokens one by one (`steps` of several at once), then ends as `outcome` says.

    `before` is waited for before the token of that number (0: before the first). `times`: seconds after submission at
    which tokens come, without any waiting.
    """

    says: Sequence[int] = ()
    outcome: Outcome | None = None
    code: str = ""
    reason: str = ""
    retry_after_s: float | None = None
    before: Mapping[int, asyncio.Event] = field(default_factory=dict)
    after_all: asyncio.Event | None = None
    steps: Sequence[int] | None = None
    times: Sequence[float] | None = None
    cached_tokens: int | None = None
    migrations: int = 0
    worker: str | None = "w0"
    breaks: Exception | None = None


class ScriptedAnswer:
    """One answer. `steps` counts what was made, so that a test sees whether work went on."""

    def __init__(self, ask: Ask, script: Script, now: Callable[[], float]) -> None:
        self.ask = ask
        self.made = 0
        self.cancelled: list[str] = []
        self.told = asyncio.Event()
        """Set when cancelled."""
        self._script = script
        self._end: End | None = None
        self._now = now
        self._from_s = now()

    @property
    def end(self) -> End | None:
        return self._end

    def cancel(self, reason: str) -> None:
        self.cancelled.append(reason)
        self.told.set()
        if self._end is None:
            self._end = End(outcome="cancelled", output_tokens=self.made, reason=reason, worker=self._script.worker)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        script, most = self._script, min(len(self._script.says), self.ask.max_tokens)
        for size in script.steps or [1] * most:
            if self.made in script.before:
                await self._either(script.before[self.made])
            if self.told.is_set():
                return
            ids = tuple(script.says[self.made : min(self.made + size, most)])
            if not ids:
                break
            self.made += len(ids)
            yield Delta(token_ids=ids, at_s=self._at_s(), logprobs=self._logprobs(ids))
            await asyncio.sleep(0)
        if script.after_all is not None:
            await self._either(script.after_all)
        if script.breaks is not None:
            raise script.breaks
        if self._end is None:
            self._end = self._last()

    async def _either(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(one.wait()) for one in (event, self.told)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    def _at_s(self) -> float:
        times = self._script.times
        return self._now() if times is None else self._from_s + times[self.made - 1]

    def _logprobs(self, ids: Sequence[int]) -> tuple[Logprob, ...]:
        if self.ask.sampling.logprobs is None:
            return ()
        top = self.ask.sampling.logprobs
        return tuple(Logprob(token_id=one, logprob=-0.5, top=((one, -0.5), (65, -2.0))[:top]) for one in ids)

    def _last(self) -> End:
        script = self._script
        full = len(script.says) >= self.ask.max_tokens
        return End(
            outcome=script.outcome or ("length" if full else "stop"),
            output_tokens=self.made,
            code=script.code,
            reason=script.reason,
            retry_after_s=script.retry_after_s,
            cached_tokens=script.cached_tokens,
            migrations=script.migrations,
            worker=script.worker,
            timing={"queue_s": 0.0},
        )


class ScriptedBackend:
    """Answers every request by `script`, or by what it makes of the request."""

    def __init__(
        self, script: Script | Callable[[Ask], Script] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.script = script if script is not None else Script(says=ids_of(ANSWER))
        self.state = Serving(models=(MODEL,), ready=(MODEL,), missing=(), context_tokens=4096)
        self.now = now
        self.answers: list[ScriptedAnswer] = []
        self.arrived = asyncio.Event()
        self.limits: dict[str, float | None] = {"active_decode_blocks": None}

    @property
    def asks(self) -> list[Ask]:
        return [answer.ask for answer in self.answers]

    def submit(self, ask: Ask) -> ScriptedAnswer:
        script = self.script if isinstance(self.script, Script) else self.script(ask)
        answer = ScriptedAnswer(ask, script, self.now)
        self.answers.append(answer)
        self.arrived.set()
        return answer

    def serving(self) -> Serving:
        return self.state

    def gone(self, *missing: str) -> None:
        self.state = replace(self.state, models=(), ready=(), missing=missing)

    def workers(self) -> Sequence[WorkerGlance]:
        one = WorkerGlance(
            worker_id=WorkerId(7), name="w0", role="mixed", state="ready", in_flight=0, running=0, waiting=0,
            kv_share=0.25, cached_blocks=12,
        )  # fmt: skip
        return [one] if self.state.models else []

    def decisions(self, count: int) -> Sequence[Mapping[str, object]]:
        newest = reversed(self.asks)
        return [{"request_id": ask.request_id, "worker": "w0", "reason": "only one"} for ask in newest][:count]

    def busy_thresholds(self) -> Mapping[str, float | None]:
        return self.limits

    def set_busy_thresholds(self, changes: Mapping[str, float | None]) -> None:
        for name in changes:
            if name not in self.limits:
                raise ConfigError(f"there is no limit {name!r}; there is {', '.join(self.limits)}")
        self.limits.update(changes)


def shadow(**changed: Any) -> Glance:
    """What a backend with a twin beside it says of it."""
    times = Spread(mean=0.2, p50=0.1, p95=0.4)
    told = Glance(
        up=True, why="", lag_s=0.25, delay_s=4.0, compared_total=7, left_out={"cancelled": 2}, dropped_total=0, open=1,
        window_requests=5, window_s=300.0,
        metrics={
            "ttft": Compared(predicted=times, measured=Spread(mean=0.25, p50=0.2, p95=0.5), drift=0.8, error=0.25),
            "itl": Compared(predicted=Spread(mean=0.02), measured=Spread(mean=0.01), drift=2.0),
        },
    )  # fmt: skip
    return replace(told, **changed)


class Shadowed(ScriptedBackend):
    """A backend with a twin beside it, as `seen` has it."""

    def __init__(self, seen: Glance) -> None:
        super().__init__(Script(says=ids_of(ANSWER)))
        self.seen = seen

    def shadow(self) -> Glance:
        return self.seen

    def predicted(self) -> Mapping[str, object]:
        return {"ttft_ms": [(-3.0, 120.0), (-2.0, 140.0), (-1.0, 130.0)], "itl_ms": [(-1.0, 20.0)]}


@dataclass
class Served:
    """A frontend that listens, its backend, and a client of it."""

    frontend: Frontend
    backend: ScriptedBackend
    http: httpx.AsyncClient
    url: str

    async def post(self, path: str, body: Mapping[str, object], **given: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **given)

    async def metrics(self) -> dict[str, float]:
        """Samples by name with their labels, as they are written."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def raw(self, data: bytes, window: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of our own, with `data` written to it; the kernel keeps `window` bytes for a slow reader."""
        sock = socket.socket()
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.frontend.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=window or 2**16)
        writer.write(data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def served(
    backend: ScriptedBackend | None = None,
    settings: Settings | None = None,
    *,
    stopping: Stopping | None = None,
    stop: bool = True,
) -> AsyncIterator[Served]:
    backend = backend or ScriptedBackend()
    settings = settings or Settings()
    if settings.deadlines == Deadlines():
        settings = replace(settings, deadlines=FAST)
    frontend = Frontend(backend, {MODEL: tokenizer()}, replace(settings, port=0), stopping, backend.now)
    await frontend.start()
    url = f"http://127.0.0.1:{frontend.port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            yield Served(frontend, backend, http, url)
    finally:
        if stop:
            frontend.stopping.hurry()  # a test that failed leaves nothing behind
            await frontend.stop()


@contextmanager
def beside(backend: ScriptedBackend | None = None, settings: Settings | None = None) -> Iterator[str]:
    """A frontend on a thread of its own, for tests that are no coroutines; its address."""
    up: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        async with served(backend, settings) as it:
            up.set_result((it.url, asyncio.get_running_loop(), over))
            await over.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    url, loop, over = up.result(PATIENCE_S)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)


def block_encoding(it: Served) -> threading.Event:
    """Prompts wait to be encoded, all threads being taken, until the event is set."""
    free = threading.Event()
    for _ in range(it.frontend.settings.limits.tokenizer_threads):
        it.frontend.services.pool.submit(free.wait, PATIENCE_S)
    return free


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine; one that hangs fails."""

    @functools.wraps(test)
    def within() -> None:
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))

    within.__signature__ = None  # type: ignore[attr-defined]
    del within.__wrapped__  # type: ignore[attr-defined]
    return within


def chat(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Count the apples, please."}], **more}


def frames(text: str) -> list[str]:
    """What SSE events carry, comments left out."""
    datas = []
    for block in text.split("\n\n"):
        lines = [line[6:] for line in block.splitlines() if line.startswith("data: ")]
        if lines:
            datas.append("\n".join(lines))
    return datas


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream; its last frame must be [DONE]."""
    told = frames(text)
    assert told[-1] == "[DONE]", told
    return [json.loads(one) for one in told[:-1]]


def limits(**given: int) -> Settings:
    return Settings(limits=Limits(**given))


def keys(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
