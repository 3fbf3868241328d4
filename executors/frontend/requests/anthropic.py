"""Requests to /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping

from executors.frontend.errors import invalid, unsupported
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.nvext import read_extensions
from executors.frontend.requests.openai import content_text, model_name
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.sampling import read_sampling, read_stops
from executors.frontend.requests.wanted import ChatPrompt, Wanted

_TOOLS = ("tools", "tool_choice", "mcp_servers", "container", "context_management", "output_config")
ROLES = ("user", "assistant")


def read_messages(document: Mapping[str, object], rules: Rules) -> Wanted:
    body = rules.fields(document)
    extensions = read_extensions(body, rules)
    prompt = _prompt(body, rules)
    limit = body.integer("max_tokens", 1)
    if limit is None:
        raise invalid("max_tokens", "is missing")
    body.number("temperature", 0, 1)
    metadata = body.within("metadata")
    if metadata is not None:
        metadata.text("user_id", longest=512)
        metadata.done()
    body.text("service_tier")
    made = Wanted(
        model=model_name(body),
        prompts=(prompt,),
        max_tokens=limit,
        stops=read_stops(body, "stop_sequences", rules.limits.stops),
        sampling=read_sampling(body, rules, logprobs=None, greedy=extensions.greedy),
        stream=bool(body.flag("stream")),
        extensions=extensions,
    )
    body.done()
    return made


def read_count(document: Mapping[str, object], rules: Rules) -> Wanted:
    """A request that is only counted; `max_tokens` and sampling have no place in it."""
    body = rules.fields(document)
    made = Wanted(model=model_name(body), prompts=(_prompt(body, rules),))
    body.done()
    return made


def _prompt(body: Fields, rules: Rules) -> ChatPrompt:
    for name in _TOOLS:
        if body.value(name):
            raise unsupported(name, "the engines have no parser of tool calls")
    thinking = body.within("thinking")
    if thinking is not None:
        if thinking.text("type") != "disabled":
            raise unsupported("thinking", "no model here thinks in the open")
        thinking.done()
    messages: list[Mapping[str, object]] = []
    system = content_text(body, "system", ("text",))
    if system:
        messages.append({"role": "system", "content": system})
    given = body.items("messages") or []
    if not given:
        raise invalid("messages", "there must be at least one")
    if len(given) > rules.limits.messages:
        raise invalid("messages", f"{len(given)} given; at most {rules.limits.messages} are taken")
    for at, one in enumerate(given):
        messages.append(_message(body.object_at("messages", at, one)))
    return ChatPrompt(messages=tuple(messages))


def _message(one: Fields) -> Mapping[str, object]:
    role = one.one_of("role", ROLES)
    if role is None or not one.has("content"):
        raise invalid(one.path("role" if role is None else "content"), "is missing")
    made = {"role": role, "content": content_text(one, "content", ("text",))}
    one.done()
    return made
