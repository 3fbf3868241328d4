"""All answers to one request: submitted together, followed side by side, told as one sequence of events.

A run ends with every answer done, or with one error. Whatever happens to it, its answers are cancelled and its tasks
are over when `close` returns.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from executors.backend import STOP_STRING, Answer, Ask, Delta, End
from executors.engines.protocol import Logprob
from executors.frontend.account import Account
from executors.frontend.asks import ask_of, seeded
from executors.frontend.encode import Encoded
from executors.frontend.errors import ENGINE_TIMEOUT, INTERNAL, LATE, ApiError, of_end
from executors.frontend.reader import Reader
from executors.frontend.requests.wanted import Wanted
from executors.frontend.services import Call, Model, Services
from policies.cluster.ids import RequestId
from policies.frozen import frozen

_STOPPED_WAIT_S: Final = 1.0
"""How long the end of an answer is waited for that was cancelled at a stop string."""


@frozen
class Text:
    """More text of an answer, which has `tokens` tokens by now."""

    choice: int
    text: str
    logprobs: tuple[Logprob, ...]
    tokens: int


@frozen
class Done:
    """An answer is complete. `stop` is the stop string that ended it."""

    choice: int
    finish: Literal["stop", "length"]
    stop: str | None
    tokens: int


@frozen
class Usage:
    """Of all answers together; each prompt counts once, whatever was sent again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Choice:
    def __init__(self, index: int, prompt: int, ask: Ask, answer: Answer, reader: Reader) -> None:
        self.index = index
        self.prompt = prompt
        self.ask = ask
        self.answer = answer
        self.reader = reader
        self.last_s: float | None = None
        self.end: End | None = None


class Run:
    """Starts with `start`. Events come from `next_event` until `open` is 0."""

    def __init__(
        self, services: Services, call: Call, model: Model, wanted: Wanted, prompts: Sequence[Encoded], account: Account
    ) -> None:
        self.id = secrets.token_hex(14)
        self.created_s = int(time.time())
        self.call = call
        self.model = model
        self.wanted = wanted
        self.prompts = prompts
        self.account = account
        self._services = services
        self._choices: list[_Choice] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._box: deque[Text | Done | ApiError] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._cut = False
        self.open = len(prompts) * wanted.n

    # --- life ------------------------------------------------------------

    def start(self, total_s: float | None, *, client_deadline: bool) -> None:
        """Submit every answer. `total_s` counts from arrival; `client_deadline`: the client set it."""
        self._services.runs.add(self)
        first_s = self._services.settings.deadlines.first_token_s
        for index in range(self.open):
            prompt = index // self.wanted.n
            ask = ask_of(self._services, self.call, self.model, self.wanted, self.prompts[prompt], self._name(index))
            sampling = seeded(ask.sampling, index % self.wanted.n)
            ask = replace(ask, sampling=sampling, first_token_s=first_s, total_s=total_s)
            answer = self._services.backend.submit(ask)
            self.account.submitted([len(one.token_ids) for one in self.prompts])
            reader = Reader(self.model.tokenizer, self.wanted.stops, self.wanted.sampling.min_tokens)
            self._choices.append(_Choice(index, prompt, ask, answer, reader))
        self._tasks = [asyncio.create_task(self._follow(choice)) for choice in self._choices]
        if total_s is not None:
            late = (LATE, "deadline") if client_deadline else (ENGINE_TIMEOUT, "engine_timeout")
            self._at(total_s, ApiError(late[0], f"no complete answer within {total_s:g} s", code=late[1]))
        if first_s is not None:
            none = ApiError(ENGINE_TIMEOUT, f"no token within {first_s:g} s", code="first_token_timeout")
            self._at(first_s, none, only_before_first=True)

    async def next_event(self, silence_s: float | None = None) -> Text | Done | None:
        """The next event; None after `silence_s` without one. Raises ApiError where the run failed or was cut."""
        if not self._box:
            try:
                async with asyncio.timeout(silence_s):
                    while not self._box:
                        self._filled.clear()
                        await self._filled.wait()
            except TimeoutError:
                return None
        event = self._box.popleft()
        self._room.set()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Done):
            self.open -= 1
        return event

    def cut(self, error: ApiError) -> bool:
        """End it with `error` behind what has come; False where it has ended already."""
        if self._cut or self.open == 0:
            return False
        self._cut = True
        self._stop(error.code or error.kind.type)
        self._box.append(error)
        self._filled.set()
        return True

    async def close(self) -> None:
        """Nothing of it goes on."""
        self._services.runs.discard(self)
        self._stop("client left" if self.open and not self._cut else "closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self, reason: str) -> None:
        for timer in self._timers:
            timer.cancel()
        for choice in self._choices:
            if choice.answer.end is None:
                choice.answer.cancel(reason)
        for task in self._tasks:
            task.cancel()

    def _at(self, after_s: float, error: ApiError, *, only_before_first: bool = False) -> None:
        def expire() -> None:
            if not only_before_first or self.account.ttft_s is None:
                self.cut(error)

        left_s = after_s - (self._services.now() - self.call.received_s)
        self._timers.append(asyncio.get_running_loop().call_later(max(0.0, left_s), expire))

    # --- one answer ------------------------------------------------------------

    def _name(self, index: int) -> RequestId:
        return RequestId(f"{self.id}-{index}" if self.wanted.n * len(self.prompts) > 1 else self.id)

    async def _follow(self, choice: _Choice) -> None:
        reader = choice.reader
        try:
            async for delta in choice.answer:
                self._book(choice, delta)
                piece = reader.push(delta)
                await self._tell(choice, piece.text, piece.logprobs)
                if reader.stop is not None:
                    await self._stopped(choice)
                    return
            await self._ended(choice, choice.answer.end)
        except ApiError as error:
            self.cut(error)
        except Exception:
            self.cut(ApiError(INTERNAL, "the request failed inside the server"))
            raise

    async def _ended(self, choice: _Choice, end: End | None) -> None:
        reader = choice.reader
        await self._tell(choice, reader.flush(), ())
        if end is None:
            raise ApiError(INTERNAL, "the answer broke off without an end", code="incomplete_stream")
        choice.end = end
        self.account.answered(end)
        if end.outcome not in ("stop", "length"):
            raise of_end(end)
        finish: Literal["stop", "length"] = "stop" if reader.stop is not None or end.outcome == "stop" else "length"
        await self._put(Done(choice=choice.index, finish=finish, stop=reader.stop, tokens=reader.tokens))

    async def _stopped(self, choice: _Choice) -> None:
        """A stop string: the engine is told, and what it says of the request is waited for a little."""
        choice.answer.cancel(STOP_STRING)
        try:
            async with asyncio.timeout(_STOPPED_WAIT_S):
                async for _ in choice.answer:
                    pass
            choice.end = choice.answer.end
        except TimeoutError:
            pass
        if choice.end is not None:
            self.account.answered(choice.end)
        reader = choice.reader
        await self._put(Done(choice=choice.index, finish="stop", stop=reader.stop, tokens=reader.tokens))

    def _book(self, choice: _Choice, delta: Delta) -> None:
        gap_s = None if choice.last_s is None else delta.at_s - choice.last_s
        choice.last_s = delta.at_s
        self.account.tokens(delta.at_s, len(delta.token_ids), gap_s)

    async def _tell(self, choice: _Choice, text: str, logprobs: tuple[Logprob, ...]) -> None:
        if text or logprobs:
            await self._put(Text(choice=choice.index, text=text, logprobs=logprobs, tokens=choice.reader.tokens))

    async def _put(self, event: Text | Done) -> None:
        while len(self._box) >= self._services.settings.limits.queued_chunks:
            self._room.clear()
            await self._room.wait()
        self._box.append(event)
        self._filled.set()

    # --- what is told beside the text ------------------------------------------------------------

    def usage(self) -> Usage:
        prompt = [len(one.token_ids) for one in self.prompts]
        cached = [0] * len(prompt)
        for choice in self._choices:
            if choice.end is not None and choice.end.cached_tokens is not None:
                most = min(choice.end.cached_tokens, prompt[choice.prompt] - 1)
                cached[choice.prompt] = max(cached[choice.prompt], most)
        completion = sum(choice.reader.tokens for choice in self._choices)
        return Usage(prompt_tokens=sum(prompt), completion_tokens=completion, cached_tokens=sum(cached))

    def echo(self) -> dict[str, object] | None:
        """The `nvext` block of the last chunk, as far as it was asked for; that of the first answer."""
        asked = self.wanted.extensions.extra_fields
        if not asked:
            return None
        choice = self._choices[0]
        end = choice.end
        told: dict[str, object] = {}
        if "worker_id" in asked and end is not None:
            told["worker_id"] = {"decode_worker": end.worker, "prefill_worker": end.prefill_worker or end.worker}
        if "timing" in asked:
            told["timing"] = self._timing(end)
        if "kv" in asked:
            usage = self.usage()
            told["kv"] = {"cached_tokens": usage.cached_tokens, "prompt_tokens": usage.prompt_tokens}
        if "decision" in asked:
            told["decision"] = self._decision(choice.ask.request_id)
        return told

    def _timing(self, end: End | None) -> dict[str, object]:
        parts = {} if end is None else {name: 1e3 * value for name, value in end.timing.items()}
        usage = self.usage()
        ttft_s = self.account.ttft_s
        return {
            "request_received_ms": round(1e3 * (time.time() - (self._services.now() - self.call.received_s))),
            "queue_wait_ms": parts.get("queue_s"),
            "prefill_time_ms": parts.get("prefill_s"),
            "ttft_ms": None if ttft_s is None else 1e3 * ttft_s,
            "total_time_ms": 1e3 * (self._services.now() - self.call.received_s),
            "kv_hit_rate": usage.cached_tokens / usage.prompt_tokens,
            "router_queue_depth": None,
            "migrated": 0 if end is None else end.migrations,
        }

    def _decision(self, request_id: RequestId) -> object:
        recent = self._services.backend.decisions(256)
        return next((dict(one) for one in recent if one.get("request_id") == request_id), None)
