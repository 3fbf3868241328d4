"""Whatever is sent, as heads or as bodies: never a 500, always an error in the client's envelope, always an id.

Bodies begin as good ones of each API; values in them are replaced by others of any type, keys are added or renamed.
"""

from __future__ import annotations

import http.client
import json
import string
from collections.abc import Iterator
from typing import Any

import pytest
from frontend_builders import ANSWER, MODEL, Script, ScriptedBackend, beside, ids_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from executors.engines.protocol import Ability
from executors.frontend.settings import Settings

pytestmark = pytest.mark.long

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, BUSY = "/v1/messages/count_tokens", "/busy_threshold"
ABLE = Settings(debug=True, abilities=frozenset({Ability.GRAMMAR, Ability.LOGPROBS}))
USER = {"role": "user", "content": "one"}
HINTS = {
    "agent_hints": {"priority": 1, "strict_priority": 1, "osl": 9, "speculative_prefill": True,
                    "latency_sensitivity": 1.0},
    "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
    "router": {"ttft_target": 100, "itl_target": 10.0},
    "decode_worker_id": 7, "cache_salt": "s", "use_raw_prompt": False, "greed_sampling": True,
    "extra_fields": ["worker_id", "timing", "decision", "kv"],
}  # fmt: skip
SAMPLING = {
    "temperature": 1, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
    "repetition_penalty": 1, "seed": 1, "logit_bias": {"5": 1}, "stop_token_ids": [3], "ignore_eos": True,
    "min_tokens": 1, "nvext": HINTS, "cache_salt": "t", "model": MODEL, "stream": True, "service_tier": "auto",
}  # fmt: skip
OPENAI = {**SAMPLING, "max_tokens": 3, "n": 2, "stop": ["x"], "user": "u", "safety_identifier": "i", "metadata": {},
          "prompt_cache_key": "k", "stream_options": {"include_usage": True, "continuous_usage_stats": True},
          "store": False, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": "x"}},
          }  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {**OPENAI, "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "two"}],
                                         "name": "n", "tool_call_id": "i"}],
           "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3},
    COMPLETIONS: {**OPENAI, "prompt": ["one", [5, 6]], "logprobs": 1, "echo": False, "best_of": 2},
    RESPONSES: {**SAMPLING, "input": [{"type": "message", **USER}], "instructions": "i", "max_output_tokens": 3,
                "store": False, "background": False, "truncation": "disabled", "metadata": {},
                "text": {"format": {"type": "text"}, "verbosity": "low"}, "stream_options": {}},
    MESSAGES: {**SAMPLING, "messages": [USER], "system": [{"type": "text", "text": "s"}], "max_tokens": 3,
               "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}},
    COUNT: {"model": MODEL, "messages": [USER], "system": "s"},
    BUSY: {"active_decode_blocks": 3},
}  # fmt: skip

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "\ue000", "﻿", "‮", "\U0010ffff", "٣", "²", "<|im_start|>", "{{ x }}", "a" * 70_000]),
)
NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, -(10**400), 1e308, 5e-324, -0.0, 1e16, 0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(TEXTS, below, max_size=3)),
    max_leaves=5,
)


def places(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Ways to everything within `value`."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        yield (*at, step)
        yield from places(below, (*at, step))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body with up to two places that are not as they should be."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body = json.loads(json.dumps(GOOD[path]))
    if draw(st.booleans()):
        body = {name: value for name, value in body.items() if draw(st.booleans()) or name == "model"}
    for _ in range(draw(st.integers(0, 2))):
        *way, last = draw(st.sampled_from([(), *places(body)]) if body else st.just(())) or (draw(TEXTS),)
        inside = body
        for step in way:
            inside = inside[step]
        if draw(st.integers(0, 4)) or isinstance(inside, list):
            inside[last] = draw(VALUES)
        else:
            inside[draw(TEXTS)] = inside.pop(last, None)
    return path, body


class Client:
    """One connection, kept as long as the server keeps it."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)

    def __call__(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of an answer that has an id, and whose errors are in the envelope of its path."""
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        told = answer.read()
        assert answer.headers["x-request-id"]
        assert answer.status != 500, told
        if answer.status >= 400 and method != "HEAD" and answer.status != 503:
            error = json.loads(told)["error"]
            assert error["message"]
            assert error["type"]
        return answer.status, told


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with beside(ScriptedBackend(Script(says=ids_of(ANSWER)[:2])), ABLE) as address:
        yield address


@given(asked=bodies())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@example(asked=(BUSY, {"active_decode_blocks": 10**400}))
@example(asked=(CHAT, {**GOOD[CHAT], "nvext": {"router": {"ttft_target": 10**400}}}))
@example(asked=(CHAT, {**GOOD[CHAT], "nvext": {"agent_hints": {"osl": 10**400}}}))
def test_bodies_that_are_json_are_answered_or_refused(asked: tuple[str, dict[str, Any]], url: str) -> None:
    path, body = asked
    status, told = Client(url)("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    if status == 200 and body.get("stream"):
        assert b'"server_error"' not in told
    elif status != 200:
        assert status in (400, 404), told


BROKEN = st.one_of(
    st.binary(max_size=200),
    st.tuples(st.sampled_from(sorted(GOOD)), st.integers(0, 2000), st.binary(max_size=4)).map(
        lambda cut: (
            (text := json.dumps(GOOD[cut[0]]).encode())[: cut[1] % len(text)]
            + cut[2]
            + text[cut[1] % len(text) + len(cut[2]) :]
        )
    ),
    st.integers(1, 2000).map(lambda depth: b'{"model":' + b"[" * depth + b"]" * depth + b"}"),
    st.integers(1, 6000).map(lambda digits: b'{"model":"tiny","prompt":"x","top_k":' + b"9" * digits + b"}"),
    st.sampled_from(["utf-16", "utf-32", "utf-8-sig"]).map(lambda coding: json.dumps(GOOD[CHAT]).encode(coding)),
)
MEDIA = st.sampled_from(
    ["application/json", "application/json; charset=utf-16", "APPLICATION/JSON", "text/plain", "",
     "multipart/form-data", "application/x-www-form-urlencoded", "application/json, text/plain", "\xff/\xfe"]
)  # fmt: skip


@given(path=st.sampled_from(sorted(GOOD)), body=BROKEN, media=MEDIA)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_bodies_that_are_broken_are_refused(path: str, body: bytes, media: str, url: str) -> None:
    status, told = Client(url)("POST", path, body, {"content-type": media})
    assert status in (200, 400, 404, 415), told


TOKEN = st.text(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=20)
KNOWN = st.sampled_from(
    ["x-request-id", "x-request-timeout-ms", "x-dynamo-session-id", "x-dynamo-meta-policy-class", "authorization",
     "x-worker-instance-id", "x-dp-rank", "x-api-key", "traceparent", "content-encoding", "content-length", "host",
     "accept", "expect", "upgrade", "connection", "origin", "transfer-encoding", "x-forwarded-for", "forwarded", "te",
     "x-forwarded-proto", "access-control-request-method", "range", "if-none-match", "if-modified-since", "cookie"]
)  # fmt: skip
FIELD = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30) | (
    st.sampled_from(["[", "[::1", "a:b:c", "999999", "9" * 5000, "0", "-1", "²", "chunked", "gzip", "Bearer", "close",
                     "upgrade", "websocket", "h2c", "100-continue", "bytes=0-", "bytes=5-1,9-", "*", "Basic \xff"])
)  # fmt: skip
PATHS = st.sampled_from(
    [*sorted(GOOD), "/live", "/ready", "/health", "/metrics", "/dashboard", "/dashboard/data",
     "/dashboard/dashboard.js", "/openapi.json", "/v1/models", "/v1/models/tiny/ready", "/debug/state",
     "/debug/decisions", "/nowhere"]
)  # fmt: skip
QUERY = st.text(string.ascii_letters + string.digits + "%&=+[]:/?", max_size=12) | st.sampled_from(
    ["n=" + "9" * 5000, "n=%D9%A3", "n=%C2%B2", "n=1&n=2", "n=%00", "n=-0", "%", "%zz=%ff"]
)
BODY = json.dumps({"model": MODEL, "prompt": "one", "max_tokens": 1}).encode()


@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]),
    path=PATHS | st.text(string.printable[:94], max_size=20).map(lambda text: "/" + text),
    query=st.none() | QUERY,
    heads=st.lists(st.tuples(KNOWN | TOKEN, FIELD), max_size=4),
)
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@example(method="GET", path="/nowhere", query=None, heads=[("host", "[::1")])
@example(method="GET", path="/debug/decisions", query="n=" + "9" * 5000, heads=[])
@example(method="POST", path=COMPLETIONS, query=None, heads=[("content-length", "9" * 5000)])
def test_heads_are_answered_or_refused(
    method: str, path: str, query: str | None, heads: list[tuple[str, str]], url: str
) -> None:
    headers = {"content-type": "application/json", **{name.lower(): value for name, value in heads}}
    body = BODY if method == "POST" and "content-length" not in headers else b""
    if "transfer-encoding" in headers:
        body = b"0\r\n\r\n" if headers["transfer-encoding"] == "chunked" else b""
    Client(url)(method, path if query is None else f"{path}?{query}", body, headers)
