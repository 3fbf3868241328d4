"""Schemas of what clients send: the fields that the parsers in `executors.frontend.requests` know, with their limits.

What is refused by name whatever it says (tools, pins to several workers) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from executors.engines.protocol import Ability
from executors.frontend.openapi.shapes import (
    Schema,
    choice,
    fields,
    flag,
    integer,
    is_text,
    items,
    keyed,
    number,
    ref,
    text,
)
from executors.frontend.requests.anthropic import ROLES as ANTHROPIC_ROLES
from executors.frontend.requests.openai import ROLES
from executors.frontend.requests.responses import PARTS
from executors.frontend.requests.responses import ROLES as RESPONSES_ROLES
from executors.frontend.requests.sampling import BIAS, GUIDED, MAX_LOGPROBS, SEED, STOP_TOKENS
from executors.frontend.requests.wanted import Annotation, Extra
from executors.frontend.settings import Settings

_INT32: Final = 2**31 - 1
_UINT64: Final = 2**64 - 1
_ANY: Final[Schema] = {}
_TOKEN: Final[Schema] = ref("TokenId")


def schemas(settings: Settings, limits: Sequence[str]) -> dict[str, Schema]:
    """By name; `limits` are those on load. Where `settings.allow_unknown` says so, objects may have unknown keys."""
    loose = settings.allow_unknown
    return {
        "ModelName": is_text(minLength=1, maxLength=512),
        "TokenId": {"type": "integer", "minimum": 0, "maximum": _UINT64},
        "Stops": {"anyOf": [text(minLength=1), items(is_text(minLength=1), most=settings.limits.stops)]},
        "NvExt": _nvext(loose),
        "ChatRequest": fields(
            {
                "messages": items(_message(loose), 1, settings.limits.messages, null=False),
                "logprobs": flag() if Ability.LOGPROBS in settings.abilities else choice(False),
                "top_logprobs": integer(0, MAX_LOGPROBS),
                "max_completion_tokens": integer(1),
                **_of_openai(settings),
            },
            "model",
            "messages",
            unknown=loose,
        ),
        "CompletionRequest": _completion(settings),
        "ResponsesRequest": _responses(settings),
        "MessagesRequest": _messages(settings, counted=False),
        "CountRequest": _messages(settings, counted=True),
        "BusyThresholds": {**fields(dict.fromkeys(limits, number(0))), "minProperties": 1},
    }


def _of_openai(settings: Settings) -> dict[str, Schema]:
    """What chat completions and completions have in common."""
    return {
        "model": ref("ModelName"),
        "max_tokens": integer(1),
        "n": integer(1, settings.limits.n),
        "stream": flag(),
        "stream_options": fields(
            {"include_usage": flag(), "continuous_usage_stats": flag(), "include_obfuscation": _ANY},
            null=True,
            unknown=settings.allow_unknown,
        ),
        "store": choice(False),
        "stop": ref("Stops"),
        **_tags(),
        **_common(),
        **_sampling(),
        **(_grammar(settings) if Ability.GRAMMAR in settings.abilities else {}),
    }


def _tags() -> dict[str, Schema]:
    """What is taken and has no effect."""
    return {
        "user": text(512),
        "safety_identifier": text(512),
        "prompt_cache_key": text(512),
        "metadata": keyed(_ANY),
        "service_tier": text(),
    }


def _common() -> dict[str, Schema]:
    return {"nvext": ref("NvExt"), "cache_salt": text(256)}


def _sampling(hottest: float = 2) -> dict[str, Schema]:
    return {
        "temperature": number(0, hottest),
        "top_p": number(None, 1, above=0),
        "top_k": integer(-1),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(None, 2, above=0),
        "seed": integer(-SEED, SEED - 1),
        "logit_bias": keyed(number(-BIAS, BIAS), r"^[0-9]{1,9}$"),
        "stop_token_ids": items(_TOKEN, most=STOP_TOKENS),
        "ignore_eos": flag(),
        "min_tokens": integer(0),
    }


def _grammar(settings: Settings) -> dict[str, Schema]:
    described = {"schema": keyed(_ANY), "name": _ANY, "strict": _ANY, "description": _ANY}
    loose = settings.allow_unknown
    form = {
        "type": choice("text", "json_object", "json_schema"),
        "json_schema": fields(described, null=True, unknown=loose),
    }
    return {"response_format": fields(form, "type", null=True, unknown=loose), **dict.fromkeys(GUIDED, _ANY)}


def _content(kinds: tuple[str, ...], loose: bool) -> list[Schema]:
    """What a message may say: a string, or parts of text."""
    part = {
        "type": {"enum": list(kinds)},
        "text": text(),
        "cache_control": _ANY,
        "annotations": _ANY,
        "logprobs": _ANY,
        **({"refusal": text()} if "refusal" in kinds else {}),
    }
    return [is_text(), items(fields(part, "type", unknown=loose), null=False)]


def _message(loose: bool) -> Schema:
    content = {"anyOf": [*_content(("text", "refusal"), loose), {"type": "null"}]}
    made: dict[str, Schema] = {
        "role": {"enum": list(ROLES)},
        "content": content,
        "name": text(256),
        "tool_call_id": text(256),
    }
    return fields({**made, **dict.fromkeys(("refusal", "audio", "annotations"), _ANY)}, "role", unknown=loose)


def _completion(settings: Settings) -> Schema:
    properties = {
        "prompt": _prompt(settings),
        "logprobs": integer(0, MAX_LOGPROBS) if Ability.LOGPROBS in settings.abilities else {"type": "null"},
        "echo": choice(False),
        "best_of": integer(1),
        **_of_openai(settings),
    }
    either = {"anyOf": [{"required": ["prompt"]}, {"required": ["nvext"]}]}  # which may have token_data
    return {**fields(properties, "model", unknown=settings.allow_unknown), **either}


def _prompt(settings: Settings) -> Schema:
    one, ids = is_text(minLength=1), items(_TOKEN, 1, null=False)
    return {"anyOf": [one, ids, items({"anyOf": [one, ids]}, 1, settings.limits.prompts, null=False)]}


def _responses(settings: Settings) -> Schema:
    loose = settings.allow_unknown
    item = {"type": choice("message"), "role": {"enum": list(RESPONSES_ROLES)}, "id": _ANY, "status": _ANY}
    item["content"] = {"anyOf": _content(PARTS, loose)}
    listed = items(fields(item, "role", "content", unknown=loose), 1, settings.limits.messages, null=False)
    form = fields({"type": {"const": "text"}}, "type", null=True, unknown=loose)
    properties: dict[str, Schema] = {
        "model": ref("ModelName"),
        "input": {"anyOf": [is_text(minLength=1), listed]},
        "instructions": text(),
        "max_output_tokens": integer(1),
        "stream": flag(),
        "stream_options": fields({"include_obfuscation": _ANY}, null=True, unknown=loose),
        "store": choice(False),
        "background": choice(False),
        "truncation": choice("disabled"),
        "text": fields({"format": form, "verbosity": text()}, null=True, unknown=loose),
        **_tags(),
        **_common(),
        **_sampling(),
        **(_grammar(settings) if Ability.GRAMMAR in settings.abilities else {}),
    }
    return fields(properties, "model", "input", unknown=loose)


def _messages(settings: Settings, *, counted: bool) -> Schema:
    loose = settings.allow_unknown
    message: dict[str, Schema] = {
        "role": {"enum": list(ANTHROPIC_ROLES)},
        "content": {"anyOf": _content(("text",), loose)},
    }
    listed = items(fields(message, "role", "content", unknown=loose), 1, settings.limits.messages, null=False)
    thinking = fields({"type": {"const": "disabled"}}, "type", null=True, unknown=loose)
    system = {"anyOf": [*_content(("text",), loose), {"type": "null"}]}
    prompt: dict[str, Schema] = {"model": ref("ModelName"), "messages": listed, "system": system, "thinking": thinking}
    if counted:
        return fields(prompt, "model", "messages", unknown=loose)
    properties: dict[str, Schema] = {
        **prompt,
        "max_tokens": {"type": "integer", "minimum": 1},
        "stop_sequences": ref("Stops"),
        "stream": flag(),
        "metadata": fields({"user_id": text(512)}, null=True, unknown=loose),
        "service_tier": text(),
        **_common(),
        **_sampling(hottest=1),
        **(_grammar(settings) if Ability.GRAMMAR in settings.abilities else {}),
    }
    return fields(properties, "model", "messages", "max_tokens", unknown=loose)


def _nvext(loose: bool) -> Schema:
    hints = {
        "priority": integer(-_INT32 - 1, _INT32),
        "strict_priority": integer(0, 2**32 - 1),
        "osl": integer(1),
        "speculative_prefill": flag(),
        "latency_sensitivity": number(),
    }
    constraints = {"required_taints": items(is_text(), most=64), "preferred_taints": keyed(number())}
    targets = {"ttft_target": number(above=0), "itl_target": number(above=0)}
    properties = {
        "agent_hints": fields(hints, null=True, unknown=loose),
        "routing_constraints": fields(constraints, null=True, unknown=loose),
        "router": fields(targets, null=True, unknown=loose),
        "backend_instance_id": integer(0),
        "decode_worker_id": integer(0),
        "cache_salt": text(256),
        "token_data": items(_TOKEN, 1),
        "use_raw_prompt": flag(),
        "greed_sampling": flag(),
        "extra_fields": items({"enum": list(get_args(Extra))}),
        "annotations": items({"enum": list(get_args(Annotation))}),
        "request_timestamp_ms": _ANY,
    }
    return fields(properties, null=True, unknown=loose)
