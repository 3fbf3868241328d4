"""Schemas of what clients are told: bodies of answers, errors in both families' words, what operators ask for."""

from __future__ import annotations

from executors.frontend.openapi.shapes import (
    Schema,
    integer,
    is_count,
    is_one_of,
    is_text,
    items,
    keyed,
    number,
    ref,
    text,
    told,
)

_BOOL: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {}


def schemas() -> dict[str, Schema]:
    return {
        "Error": told({"error": _openai_error()}),
        "AnthropicError": told(
            {"type": is_one_of(["error"]), "error": told({"type": is_text(), "message": is_text()})},
        ),
        "Usage": told(
            {
                **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), is_count()),
                "prompt_tokens_details": told({"cached_tokens": is_count()}),
            }
        ),
        "Told": _told_beside(),
        "ChatCompletion": _of_openai("chat.completion", _chat_choice()),
        "Completion": _of_openai("text_completion", _completion_choice()),
        "Response": _response(),
        "Message": _message(),
        "Count": told({"input_tokens": is_count()}),
        "Model": _model(),
        "Models": told({"object": is_one_of(["list"]), "data": _list(ref("Model"))}),
        "ModelReady": told({"model": is_text(), "ready": _BOOL, "missing": _list(is_text())}),
        "Live": told({"status": is_one_of(["live"])}),
        "Ready": told({"ready": _BOOL, "missing": _list(is_text())}),
        "Health": told(_health()),
        "Limits": {"type": "object", "additionalProperties": {"type": ["number", "null"]}},
        "Decisions": told({"decisions": _list({"type": "object"})}),
        "State": told({**_health(), "open_requests": is_count(), "workers": _list(_worker())}),
        "Dashboard": told(
            {
                **_health(),
                "open_requests": is_count(),
                "worker_list": _list(_worker()),
                "decisions": _list({"type": "object"}),
                "measured": {"type": "object", "additionalProperties": _list(_list(_ANY))},
                "predicted": {"type": "object", "additionalProperties": _list(_list(_ANY))},
                "shadow": {"type": ["object", "null"]},
                "busy_thresholds": ref("Limits"),
            }
        ),
    }


def _list(of: Schema) -> Schema:
    return items(of, null=False)


def _openai_error() -> Schema:
    return told({"message": is_text(), "type": is_text(), "param": text(), "code": text()})


def _of_openai(kind: str, choice: Schema) -> Schema:
    return told(
        {
            "id": is_text(),
            "object": is_one_of([kind]),
            "created": is_count(),
            "model": is_text(),
            "choices": _list(choice),
            "usage": ref("Usage"),
            "nvext": ref("Told"),
        },
        "nvext",
    )


def _chat_choice() -> Schema:
    token = {"token": is_text(), "logprob": _NUMBER, "bytes": _list(is_count())}
    tokens = _list(told({**token, "top_logprobs": _list(told(token))}))
    probabilities = told({"content": tokens, "refusal": {"type": "null"}})
    message = told({"role": is_one_of(["assistant"]), "content": is_text(), "refusal": {"type": "null"}})
    return told(
        {
            "index": is_count(),
            "message": message,
            "logprobs": {"anyOf": [probabilities, {"type": "null"}]},
            "finish_reason": is_one_of(["stop", "length"]),
        }
    )


def _completion_choice() -> Schema:
    probabilities = told(
        {
            "tokens": _list(is_text()),
            "token_logprobs": _list(_NUMBER),
            "top_logprobs": _list(keyed(_NUMBER)),
            "text_offset": _list(is_count()),
        }
    )
    return told(
        {
            "index": is_count(),
            "text": is_text(),
            "logprobs": {"anyOf": [probabilities, {"type": "null"}]},
            "finish_reason": is_one_of(["stop", "length"]),
        }
    )


def _told_beside() -> Schema:
    """What `nvext.extra_fields` asks for."""
    worker = told({"decode_worker": text(), "prefill_worker": text()})
    cached = told({"cached_tokens": is_count(), "prompt_tokens": is_count()})
    parts = {"worker_id": worker, "timing": {"type": "object"}, "kv": cached, "decision": {"type": ["object", "null"]}}
    return told(parts, *parts)


def _response() -> Schema:
    part = {"type": is_one_of(["output_text"]), "text": is_text(), "annotations": _list(_ANY), "logprobs": _list(_ANY)}
    item = {
        "id": is_text(),
        "type": is_one_of(["message"]),
        "status": is_text(),
        "role": is_one_of(["assistant"]),
        "content": _list(told(part)),
    }
    usage = {
        "input_tokens": is_count(),
        "input_tokens_details": told({"cached_tokens": is_count()}),
        "output_tokens": is_count(),
        "output_tokens_details": told({"reasoning_tokens": is_count()}),
        "total_tokens": is_count(),
    }
    properties = {
        "id": is_text(),
        "object": is_one_of(["response"]),
        "created_at": is_count(),
        "status": is_one_of(["completed", "incomplete"]),
        "model": is_text(),
        "output": _list(told(item)),
        "error": {"type": "null"},
        "incomplete_details": {"anyOf": [told({"reason": is_text()}), {"type": "null"}]},
        "usage": told(usage),
        "store": _BOOL,
        "background": _BOOL,
        "previous_response_id": {"type": "null"},
        "parallel_tool_calls": _BOOL,
        "tool_choice": is_text(),
        "tools": _list(_ANY),
        "text": {"type": "object"},
        "truncation": is_text(),
        "instructions": text(),
        "max_output_tokens": integer(),
        "temperature": number(),
        "top_p": number(),
        "metadata": {"type": "object"},
        "nvext": ref("Told"),
    }
    return told(properties, "nvext")


def _message() -> Schema:
    block = told({"type": is_one_of(["text"]), "text": is_text()})
    counts = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    properties = {
        "id": is_text(),
        "type": is_one_of(["message"]),
        "role": is_one_of(["assistant"]),
        "model": is_text(),
        "content": _list(block),
        "stop_reason": is_one_of(["end_turn", "max_tokens", "stop_sequence"]),
        "stop_sequence": text(),
        "usage": told(dict.fromkeys(counts, is_count())),
        "nvext": ref("Told"),
    }
    return told(properties, "nvext")


def _model() -> Schema:
    properties = {"id": is_text(), "object": is_one_of(["model"]), "created": is_count(), "owned_by": is_text()}
    return told({**properties, "root": is_text(), "max_model_len": is_count()})


def _health() -> dict[str, Schema]:
    return {
        "status": is_one_of(["ready", "not_ready", "draining"]),
        "models": _list(is_text()),
        "missing": _list(is_text()),
        "workers": told({"total": is_count(), "ready": is_count()}),
        "phase": is_text(),
    }


def _worker() -> Schema:
    properties = {
        "id": {"type": "integer"},
        "name": is_text(),
        "role": is_text(),
        "state": is_text(),
        "in_flight": is_count(),
        "running": integer(0),
        "waiting": integer(0),
        "kv_share": number(0),
        "cached_blocks": integer(0),
    }
    return told(properties)
