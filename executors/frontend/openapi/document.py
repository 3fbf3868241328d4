"""The document at /openapi.json: every path of the frontend, what it takes and what it tells, errors included.

It is written from the settings of the server, so limits in it are the ones that hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from executors.frontend import errors
from executors.frontend.errors import Kind
from executors.frontend.openapi import answered, asked
from executors.frontend.openapi.shapes import Schema, is_text, ref
from executors.frontend.settings import Settings
from twin import __version__

_JSON: Final = "application/json"
_STREAM: Final = "text/event-stream"
_READING: Final = (errors.AUTHENTICATION, errors.FORBIDDEN, errors.NOT_FOUND, errors.VALIDATION, errors.HEADERS)
_BODY: Final = (*_READING, errors.LATE, errors.TOO_LARGE, errors.MEDIA, errors.INTERNAL)
_ANSWERING: Final = (
    *_BODY,
    errors.RATE_LIMIT,
    errors.OVERLOAD,
    errors.UNAVAILABLE,
    errors.ENGINE_TIMEOUT,
    errors.NOT_IMPLEMENTED,
)
_COUNTING: Final = (*_BODY, errors.RATE_LIMIT, errors.UNAVAILABLE)
_HEADERS: Final[Mapping[str, tuple[Schema, str]]] = {
    "x-request-id": (is_text(), "Comes back if it is 1 to 128 of A-Z a-z 0-9 . _ -; otherwise one is made."),
    "x-request-timeout-ms": (is_text(pattern="^[1-9][0-9]{0,8}$"), "The client's own deadline, in milliseconds."),
    "x-dynamo-session-id": (is_text(pattern="^[A-Za-z0-9._:-]{1,256}$"), "Requests of one session."),
    "x-dynamo-meta-policy-class": (is_text(pattern="^[A-Za-z0-9._:-]{1,64}$"), "Of trusted keys."),
    "x-worker-instance-id": (is_text(pattern="^[0-9]{1,18}$"), "A worker, named by a trusted key."),
}


def document(settings: Settings, limits: Sequence[str]) -> dict[str, object]:
    """OpenAPI 3.1. `limits`: names of those on load."""
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header"}}
    keys["key"]["name"] = "x-api-key"
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynatwin", "version": __version__, "description": _ABOUT},
        "paths": {**_answers(settings), **_models(), **_operations(settings)},
        "components": {
            "schemas": {**asked.schemas(settings, limits), **answered.schemas()},
            "securitySchemes": keys,
        },
        "security": [*([] if settings.access.keys_file else [{}]), {"bearer": []}, {"key": []}],
    }


_ABOUT: Final = (
    "Every answer has x-request-id. Null is the same as absent, and unknown keys are refused. Streams are server-sent "
    "events; what fails after their first byte is an event of its own."
)


def _answers(settings: Settings) -> dict[str, object]:
    made: dict[str, object] = {
        "/v1/chat/completions": _asking(settings, "Answer a chat", "ChatRequest", "ChatCompletion"),
        "/v1/completions": _asking(settings, "Go on from prompts", "CompletionRequest", "Completion"),
        "/v1/responses": _asking(settings, "Answer, keeping nothing", "ResponsesRequest", "Response"),
    }
    if settings.anthropic:
        made["/v1/messages"] = _asking(settings, "Answer messages", "MessagesRequest", "Message", "AnthropicError")
        counted = _operation("Count the tokens of messages", _as_json("Count"), _COUNTING, settings, "AnthropicError")
        made["/v1/messages/count_tokens"] = {"post": {**counted, **_takes("CountRequest")}}
    return made


def _asking(settings: Settings, what: str, request: str, answer: str, error: str = "Error") -> dict[str, object]:
    content = {**_as_json(answer), _STREAM: {"schema": is_text()}}
    made = _operation(what, content, _ANSWERING, settings, error)
    parameters = [
        {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in _HEADERS.items()
    ]
    return {"post": {**made, **_takes(request), "parameters": parameters}}


def _models() -> dict[str, object]:
    name = [{"name": "name", "in": "path", "required": True, "schema": ref("ModelName")}]
    ready = _operation("Whether a model is ready", _as_json("ModelReady"), _READING)
    return {
        "/v1/models": {"get": _operation("Models that are ready", _as_json("Models"), _READING)},
        "/v1/models/{name}": {"get": {**_operation("One model", _as_json("Model"), _READING), "parameters": name}},
        "/v1/models/{name}/ready": {"get": {**_or_503(ready, "ModelReady"), "parameters": name}},
    }


def _operations(settings: Settings) -> dict[str, object]:
    busy = _operation("Limits on load", _as_json("Limits"), _READING)
    change = _operation("Change limits on load; null clears one", _as_json("Limits"), _BODY)
    made: dict[str, object] = {
        "/live": {"get": _operation("The loop turns", _as_json("Live"))},
        "/ready": {"get": _or_503(_operation("Every role has a worker", _as_json("Ready")), "Ready")},
        "/health": {"get": _or_503(_operation("Both, with what is missing", _as_json("Health")), "Health")},
        "/metrics": {"get": _operation("Prometheus", {"text/plain": {"schema": is_text()}}, _READING)},
        "/busy_threshold": {"get": busy, "post": {**change, **_takes("BusyThresholds")}},
        "/dashboard": {"get": _operation("The dashboard", {"text/html": {"schema": is_text()}})},
        "/dashboard/data": {"get": _operation("What it draws", _as_json("Dashboard"), _READING)},
    }
    if settings.debug:
        count = {"name": "n", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}}
        decisions = _operation("The last decisions", _as_json("Decisions"), _READING)
        made["/debug/decisions"] = {"get": {**decisions, "parameters": [count]}}
        made["/debug/state"] = {"get": _operation("Workers and open requests", _as_json("State"), _READING)}
    return made


def _operation(
    what: str,
    content: Mapping[str, object],
    kinds: tuple[Kind, ...] = (),
    settings: Settings | None = None,
    error: str = "Error",
) -> dict[str, object]:
    overload = errors.OVERLOAD.status if settings is None else settings.overload_status
    statuses = {overload if kind is errors.OVERLOAD else kind.status for kind in kinds}
    failures = {str(status): _response("An error", _as_json(error)) for status in sorted(statuses)}
    return {"summary": what, "responses": {"200": _response(what, content), **failures}}


def _or_503(operation: dict[str, object], name: str) -> dict[str, object]:
    """It says the same whether the answer is yes or no."""
    responses = operation["responses"]
    assert isinstance(responses, dict)
    return {**operation, "responses": {**responses, "503": _response("Not now", _as_json(name))}}


def _response(what: str, content: Mapping[str, object]) -> dict[str, object]:
    return {"description": what, "headers": {"x-request-id": {"schema": is_text()}}, "content": content}


def _as_json(name: str) -> dict[str, object]:
    return {_JSON: {"schema": ref(name)}}


def _takes(name: str) -> dict[str, object]:
    return {"requestBody": {"required": True, "content": _as_json(name)}}
