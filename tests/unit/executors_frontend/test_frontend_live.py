"""The frontend over the live world with mock engines, on one virtual clock: C01, C21 and C22 as a client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from frontend_builders import tokenizer_json
from live_builders import First, Live, live

from executors.frontend.application import application
from executors.frontend.operations import missing, status
from executors.frontend.services import Services
from executors.frontend.settings import Settings
from executors.frontend.stopping import Stopping
from executors.frontend.tokens import ServedTokenizer
from executors.service import Service, Wanted
from policies.cluster.events import WorkerFenced, WorkerUnfenced
from policies.cluster.ids import FenceCause, Role, WorkerId
from policies.resilience.migration import Migration, MigrationSettings

PATH = "/v1/completions"


class Inline(Executor):
    """Runs at once: a virtual clock does not wait for threads."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Client:
    """One request to an ASGI application, which its client may leave."""

    def __init__(self, app: Any, body: dict[str, object]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.status = 0
        self.text = ""
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "headers": headers,
                 "query_string": b"", "root_path": "", "state": {}}  # fmt: skip
        self.over = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()


class OneLetter(ServedTokenizer):
    """Mock engines make tokens that no vocabulary has: each is shown as one letter."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)


class Front:
    """A frontend over `it`, whose model is called "mock"."""

    def __init__(self, it: Live) -> None:
        backend = Service(it.world, [Wanted(model="mock", roles=frozenset({Role.MIXED}), context_tokens=4096)])
        now = it.clock.now
        self.services = Services.build(backend, {"mock": OneLetter(tokenizer_json())}, Settings(), Stopping(), now)
        self.services.pool = Inline()
        self._app = application(self.services)

    def post(self, first: int, out: int, *, stream: bool = False) -> Client:
        """100 prompt tokens that begin with `first`, so that none is shared."""
        prompt = [first, *range(100, 199)]
        return Client(self._app, {"model": "mock", "prompt": prompt, "max_tokens": out, "stream": stream})

    def sample(self, name: str, **labels: str) -> float | None:
        return self.services.metrics.registry.get_sample_value(f"dynamo_frontend_{name}", {"model": "mock", **labels})


def test_c01_the_wait_in_the_queue_is_part_of_the_time_to_first_token() -> None:
    async def main(it: Live) -> None:
        front = Front(it)
        clients = [front.post(at, 11) for at in range(3)]
        await asyncio.gather(*(one.over for one in clients))
        assert [one.status for one in clients] == [200, 200, 200]
        name = "time_to_first_token_seconds"
        assert front.sample(f"{name}_sum") == pytest.approx(0.9)
        assert [front.sample(f"{name}_bucket", le=le) for le in ("0.1", "0.25", "0.5", "+Inf")] == [1, 1, 3, 3]
        assert front.sample("inter_token_latency_seconds_sum") == pytest.approx(0.3)
        assert front.sample("request_duration_seconds_sum") == pytest.approx(1.2)

    live(main, max_num_seqs=1)


@pytest.mark.parametrize("stream", [False, True])
def test_c22_when_the_client_leaves_the_next_one_is_served_at_once(stream: bool) -> None:
    async def main(it: Live) -> None:
        front = Front(it)
        first = front.post(1, 1000, stream=stream)
        second: list[Client] = []
        it.at(0.05, lambda: second.append(front.post(2, 1)))
        it.at(0.305, first.leave)
        await first.over
        await second[0].over
        assert 0.355 <= (front.sample("time_to_first_token_seconds_sum") or 0) <= 0.360
        assert front.sample("time_to_first_token_seconds_count") == 1
        assert front.sample("model_cancellation_total") == 1
        assert front.sample("inflight_requests") == 0 == front.sample("active_requests")
        assert 21 <= it.ends[next(iter(it.ends))].output_tokens <= 22
        load = await it.engines[0].load()
        assert load is not None
        assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)

    live(main, max_num_seqs=1)


@pytest.mark.parametrize(("limit", "tokens"), [(3, 20), (0, 7)])
def test_c21_an_answer_goes_on_elsewhere_as_one_answer_or_ends_with_an_error(limit: int, tokens: int) -> None:
    async def main(it: Live) -> None:
        front = Front(it)
        client = front.post(1, 20, stream=True)
        it.at(0.165, lambda: it.world.fleet.lose(it.world.fleet.workers[WorkerId(0)], "killed"))
        await client.over
        told = [json.loads(line[6:]) for line in client.text.splitlines() if line.startswith("data: {")]
        assert client.text.endswith("data: [DONE]\n\n")
        assert len({(one["id"], one["created"]) for one in told if "id" in one}) == 1
        text = "".join(one["choices"][0]["text"] for one in told if "choices" in one)
        assert text == "x" * tokens
        assert ("error" in told[-1]) == (limit == 0)
        (end,) = it.ends.values()
        assert end.output_tokens == tokens
        if limit:
            assert told[-1]["choices"][0]["finish_reason"] == "length"
            assert front.sample("model_migration_total") == 1
            assert front.sample("inter_token_latency_seconds_sum") == pytest.approx(0.292)

    policies: Sequence[Any] = [First(), Migration(MigrationSettings(limit=limit, max_seq_len=None))]
    live(main, policies, roles=(Role.MIXED, Role.MIXED))


def test_who_takes_no_new_work_is_not_ready_and_what_is_asked_meanwhile_is_for_the_policies() -> None:
    """A worker that does not answer its canaries is up, and fenced: load balancers have to be told."""

    async def main(it: Live) -> None:
        front = Front(it)
        cause = FenceCause.CANARY
        for worker_id in it.world.fleet.workers:
            assert front.services.ready
            it.world.post(WorkerFenced(at_s=it.clock.now(), worker_id=worker_id, cause=cause))
        assert not front.services.ready
        assert status(front.services)["status"] == "not_ready"
        assert missing(front.services) == [f"no mixed worker takes new work: {len(it.world.fleet.workers)} fenced"]
        assert (front.services.names(), front.sample("model_ready")) == ([], 0)
        client = front.post(1, 1)
        await asyncio.sleep(0.01)
        assert len(it.world.open) == 1
        client.leave()
        await client.over
        it.world.post(WorkerUnfenced(at_s=it.clock.now(), worker_id=WorkerId(0), cause=cause))
        assert (front.services.ready, front.services.names(), front.sample("model_ready")) == (True, ["mock"], 1)

    live(main)
