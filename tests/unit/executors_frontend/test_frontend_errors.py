"""What is refused, with which status, and in whose words: S8-S15 of the contract and its table of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from frontend_builders import (
    ANSWER,
    FAST,
    Script,
    ScriptedBackend,
    chat,
    chunks,
    frames,
    ids_of,
    limits,
    run,
    served,
)

from executors.backend import End, WorkerGlance
from executors.engines.protocol import Ability
from executors.frontend.errors import of_end
from executors.frontend.settings import Access, Settings
from policies.router.refusals import REFUSALS, Counted

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROMPT = {"model": "tiny", "prompt": "one"}
MESSAGE = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "one"}]}
BAD = [
    (CHAT, chat(frobnicate=1), "frobnicate"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "mood": 1}]), "messages[0].mood"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(temperature=5), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(presence_penalty=2.5), "presence_penalty"),
    (CHAT, chat(stop=["a", "b", "c", "d", "e"]), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=True), "logprobs"),
    (CHAT, chat(n=5), "n"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(guided_regex="a+"), "guided_regex"),
    (CHAT, chat(store=True), "store"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias.x"),
    (CHAT, chat(min_tokens=9, max_tokens=3), "min_tokens"),
    (CHAT, chat(model=""), "model"),
    (CHAT, chat(nvext={"magic": 1}), "nvext.magic"),
    (CHAT, chat(nvext={"agent_hints": {"session_control": 1}}), "nvext.agent_hints.session_control"),
    (CHAT, chat(nvext={"extra_fields": ["weather"]}), "nvext.extra_fields"),
    (CHAT, chat(nvext={"annotations": ["token_ids"]}), "nvext.annotations"),
    (CHAT, chat(nvext={"metadata_upload": {}}), "nvext.metadata_upload"),
    (CHAT, chat(nvext={"dp_rank": 0}), "nvext.dp_rank"),
    (CHAT, chat(kv_transfer_params={"remote_host": "10.0.0.1"}), "kv_transfer_params"),
    (CHAT, chat(bootstrap_host="10.0.0.1"), "bootstrap_host"),
    (COMPLETIONS, {**PROMPT, "prompt": ""}, "prompt"),
    (COMPLETIONS, {**PROMPT, "prompt": []}, "prompt"),
    (COMPLETIONS, {**PROMPT, "prompt": ["a"] * 129}, "prompt"),
    (COMPLETIONS, {**PROMPT, "prompt": [1, -1]}, "prompt[1]"),
    (COMPLETIONS, {**PROMPT, "prompt": [1, 100_000]}, "prompt"),
    (COMPLETIONS, {**PROMPT, "echo": True}, "echo"),
    (COMPLETIONS, {**PROMPT, "best_of": 2}, "best_of"),
    (RESPONSES, {"model": "tiny", "input": ""}, "input"),
    (RESPONSES, {"model": "tiny", "input": "x", "store": True}, "store"),
    (RESPONSES, {"model": "tiny", "input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"model": "tiny", "input": "x", "background": True}, "background"),
    (MESSAGES, {name: value for name, value in MESSAGE.items() if name != "max_tokens"}, "max_tokens"),
    (MESSAGES, {**MESSAGE, "temperature": 1.5}, "temperature"),
    (MESSAGES, {**MESSAGE, "tools": [{"name": "x"}]}, "tools"),
]  # fmt: skip


@run
async def test_bad_requests_are_400_and_name_the_field() -> None:
    async with served() as it:
        for path, body, param in BAD:
            answer = await it.post(path, body)
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error", body
            assert error["message"].startswith(param), (param, error)
            if path != MESSAGES:
                assert error["param"] == param
        assert it.backend.asks == []
        samples = await it.metrics()
    key = 'dynamo_frontend_failures_total{class="validation",reason="unknown_parameter"}'
    assert samples[key] == 6


@run
async def test_bodies_that_are_no_json_object_are_refused() -> None:
    deep = b"[" * 100_000
    async with served() as it:
        for body in (
            b"{bad", b"[1]", b"\xff{}", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":1e999}', b'{"a":"\\ud800"}', b"", deep,
            b'{"a":' * 70 + b"1" + b"}" * 70, b'{"a":' + b"9" * 5000 + b"}", b'{"a":"' + b"x" * 1_000_001 + b'"}',
        ):  # fmt: skip
            answer = await it.http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body[:20]


@run
async def test_other_media_types_and_codings_are_415() -> None:
    async with served() as it:
        plain = await it.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        coded = await it.http.post(CHAT, content=b"{}", headers=packed)
    assert (plain.status_code, coded.status_code) == (415, 415)


@run
async def test_a_prompt_longer_than_the_context_names_both_numbers_and_reaches_no_engine() -> None:
    async with served() as it:
        answer = await it.post(COMPLETIONS, {"model": "tiny", "prompt": [5] * 6001})
        fits = await it.post(COMPLETIONS, {"model": "tiny", "prompt": [5] * 4095})
        above = await it.post(COMPLETIONS, {"model": "tiny", "prompt": [5] * 4000, "max_tokens": 97})
        asks = it.backend.asks
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "6001 > 4095" in answer.json()["error"]["message"]
    assert fits.status_code == 200
    assert above.json()["error"]["code"] == "context_length_exceeded"
    assert [ask.max_tokens for ask in asks] == [1]


@run
async def test_an_unknown_model_is_404_in_the_words_of_each_api() -> None:
    async with served() as it:
        openai = await it.post(CHAT, chat(model="huge"))
        anthropic = await it.post(MESSAGES, {**MESSAGE, "model": "huge"})
        samples = await it.metrics()
    assert openai.status_code == 404 == anthropic.status_code
    assert openai.json()["error"]["code"] == "model_not_found"
    assert anthropic.json()["error"]["type"] == "not_found_error"
    labels = (
        'endpoint="chat_completions",error_type="not_found",model="unknown_model",request_type="unary",status="error"'
    )
    assert samples[f"dynamo_frontend_requests_total{{{labels}}}"] == 1


@pytest.mark.parametrize("status", [529, 429, 503])
def test_overload_has_the_configured_status_and_says_when_to_come_again(status: int) -> None:
    @run
    async def one() -> None:
        busy = Script(outcome="rejected", code="all_busy", reason="all workers are busy", retry_after_s=2.2)
        settings = Settings(overload_status=status, deadlines=FAST)  # type: ignore[arg-type]
        async with served(ScriptedBackend(busy), settings) as it:
            for stream in (False, True):
                answer = await it.post(CHAT, chat(stream=stream))
                assert answer.status_code == status
                assert answer.headers["retry-after"] == "3"
                assert answer.json()["error"]["code"] == "all_busy"
            anthropic = await it.post(MESSAGES, MESSAGE)
            assert anthropic.json()["error"]["type"] == "overloaded_error"

    one()


@run
async def test_no_worker_is_503_and_names_the_role() -> None:
    backend = ScriptedBackend()
    backend.gone("prefill workers of tiny: 0 of 1")
    async with served(backend) as it:
        answer = await it.post(CHAT, chat())
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert "prefill workers of tiny" in answer.json()["error"]["message"]


@run
async def test_a_worker_that_dies_in_mid_stream_ends_it_with_an_error_and_done() -> None:
    dies = Script(says=ids_of(ANSWER)[:7], outcome="failed", code="worker_lost", reason="the worker was lost")
    async with served(ScriptedBackend(dies)) as it:
        streamed = await it.post(CHAT, chat(stream=True, max_tokens=20))
        whole = await it.post(CHAT, chat(max_tokens=20))
        anthropic = await it.post(MESSAGES, {**MESSAGE, "max_tokens": 20, "stream": True})
        samples = await it.metrics()
    told = chunks(streamed.text)
    assert len(told) == 8
    assert told[-1]["error"]["code"] == "worker_lost"
    assert not any(one["choices"][0]["finish_reason"] for one in told[:-1])
    assert whole.status_code == 503
    assert "event: error\n" in anthropic.text
    assert "[DONE]" not in anthropic.text
    assert "message_stop" not in anthropic.text
    assert samples['dynamo_frontend_active_requests{model="tiny"}'] == 0
    assert samples['dynamo_frontend_inflight_requests{model="tiny"}'] == 0


@run
async def test_a_migrated_answer_is_whole_and_counted() -> None:
    async with served(ScriptedBackend(Script(says=ids_of(ANSWER) * 2, migrations=1))) as it:
        body = (await it.post(CHAT, chat(max_tokens=20))).json()
        samples = await it.metrics()
    assert body["usage"]["completion_tokens"] == 20
    assert samples['dynamo_frontend_model_migration_total{model="tiny"}'] == 1


@run
async def test_a_fault_inside_shows_no_insides() -> None:
    secret = RuntimeError("/etc/secret at 10.1.2.3")
    for stream in (False, True):
        async with served(ScriptedBackend(Script(says=ids_of("one two"), breaks=secret))) as it:
            answer = await it.post(CHAT, chat(stream=stream))
        assert "secret" not in answer.text
        assert "server_error" in answer.text
        assert answer.status_code == (200 if stream else 500)


@run
async def test_a_fault_of_a_small_path_has_the_envelope_too() -> None:
    class Broken(ScriptedBackend):
        def workers(self) -> Sequence[WorkerGlance]:
            raise RuntimeError("/etc/secret")

    async with served(Broken()) as it:
        answer = await it.http.get("/health")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]


@run
async def test_paths_and_methods_that_are_not_there_have_the_same_envelope_and_an_id() -> None:
    async with served() as it:
        for method, path, status in (
            ("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/v1/embeddings", 404), ("DELETE", "/live", 405),
        ):  # fmt: skip
            answer = await it.http.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
            assert answer.headers["x-request-id"]
        embeddings = (await it.http.post("/v1/embeddings")).json()["error"]
    assert "not supported by this server" in embeddings["message"]


@run
async def test_more_open_requests_than_allowed_are_refused_and_counted() -> None:
    hold = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={0: hold}))
    async with served(backend, limits(in_flight=1)) as it:
        first = asyncio.create_task(it.post(CHAT, chat()))
        await backend.arrived.wait()
        second = await it.post(CHAT, chat())
        hold.set()
        assert (await first).status_code == 200
        samples = await it.metrics()
    assert second.status_code == 529
    assert second.json()["error"]["code"] == "queue_limit"
    assert samples['dynamo_frontend_failures_total{class="overload",reason="queue_limit"}'] == 1


@run
async def test_unknown_parameters_can_be_let_pass_and_are_counted() -> None:
    settings = Settings(allow_unknown=True, deadlines=FAST)
    async with served(settings=settings) as it:
        answer = await it.post(CHAT, chat(frobnicate=1, nvext={"magic": 2}))
        samples = await it.metrics()
    assert answer.status_code == 200
    assert samples["dynatwin_frontend_unknown_parameter_total"] == 2


@run
async def test_a_grammar_reaches_engines_that_can_keep_it() -> None:
    settings = Settings(abilities=frozenset({Ability.GRAMMAR}), deadlines=FAST)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with served(settings=settings) as it:
        await it.post(CHAT, chat(response_format=form))
        await it.post(CHAT, chat(guided_choice=["yes", "no"]))
        both = await it.post(CHAT, chat(guided_choice=["yes"], guided_regex="y"))
        asks = it.backend.asks
    assert [dict(ask.sampling.grammar) for ask in asks] == [{"json_schema": schema}, {"choice": ["yes", "no"]}]
    assert both.status_code == 400


def test_every_refusal_of_a_router_has_its_status() -> None:
    for code, kind in REFUSALS.items():
        error = of_end(End(outcome="rejected", output_tokens=0, code=code, reason="why"))
        assert error.kind.counted == kind.counted.value
        assert error.kind.status == (kind.status or 529)
        if kind.counted is Counted.OVERLOAD:
            assert error.kind.again


def test_what_no_table_knows_is_an_error_of_the_server_or_a_lack_of_workers() -> None:
    assert of_end(End(outcome="failed", output_tokens=0, code="odd")).kind.status == 500
    assert of_end(End(outcome="rejected", output_tokens=0, code="odd")).kind.status == 503
    assert of_end(End(outcome="failed", output_tokens=0, code="response_timeout")).kind.status == 504
    assert frames("data: x\n\n") == ["x"]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(Exception, match="require_auth"):
        Settings(access=Access(require_auth=True))
    with pytest.raises(Exception, match="overload_status"):
        replace(Settings(), overload_status=418)  # type: ignore[arg-type]
