"""Requests to /v1/responses: text in, text out, nothing kept."""

from __future__ import annotations

from collections.abc import Mapping

from executors.frontend.errors import invalid, unsupported
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.nvext import read_extensions
from executors.frontend.requests.openai import content_text, model_name
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.sampling import read_sampling
from executors.frontend.requests.wanted import ChatPrompt, Wanted

_NOT_OFFERED = {
    "previous_response_id": "answers are not kept",
    "conversation": "conversations are not kept",
    "prompt": "prompts are not kept",
    "background": "answers are not kept",
    "store": "answers are not kept; send store: false",
    "tools": "the engines have no parser of tool calls",
    "tool_choice": "the engines have no parser of tool calls",
    "parallel_tool_calls": "the engines have no parser of tool calls",
    "max_tool_calls": "the engines have no parser of tool calls",
    "reasoning": "no model here reasons in the open",
    "include": "there is nothing more to include",
    "top_logprobs": "probabilities are told by chat completions",
}
_FLAGS = ("background", "store")
ROLES = ("developer", "system", "user", "assistant")
PARTS = ("input_text", "output_text", "text")


def read_responses(document: Mapping[str, object], rules: Rules) -> Wanted:
    body = rules.fields(document)
    extensions = read_extensions(body, rules)
    for name, why in _NOT_OFFERED.items():
        if body.flag(name) if name in _FLAGS else body.value(name):
            raise unsupported(name, why)
    if body.one_of("truncation", ("auto", "disabled")) == "auto":
        raise unsupported("truncation", "nothing is cut off")
    _text_form(body)
    instructions = body.text("instructions")
    messages = _messages(body, rules, instructions)
    body.text("user", longest=512)
    body.text("safety_identifier", longest=512)
    body.text("prompt_cache_key", longest=512)
    body.text("service_tier")
    metadata = body.within("metadata")
    if extensions.annotations:
        raise unsupported("nvext.annotations", "only chat completions and completions have them")
    options = body.within("stream_options")
    if options is not None:
        options.ignore("include_obfuscation")
        options.done()
    limit = body.integer("max_output_tokens", 1)
    made = Wanted(
        model=model_name(body),
        prompts=(ChatPrompt(messages=messages),),
        max_tokens=limit,
        sampling=read_sampling(body, rules, logprobs=None, greedy=extensions.greedy),
        stream=bool(body.flag("stream")),
        extensions=extensions,
        echoed={
            "instructions": instructions,
            "max_output_tokens": limit,
            "temperature": body.number("temperature"),
            "top_p": body.number("top_p"),
            "metadata": {} if metadata is None else body.value("metadata"),
        },
    )
    body.done()
    return made


def _text_form(body: Fields) -> None:
    text = body.within("text")
    if text is None:
        return
    form = text.within("format")
    if form is not None:
        if form.text("type") != "text":
            raise unsupported("text.format", "only plain text is made")
        form.done()
    text.text("verbosity")
    text.done()


def _messages(body: Fields, rules: Rules, instructions: str | None) -> tuple[Mapping[str, object], ...]:
    given = body.value("input")
    messages: list[Mapping[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str) and given:
        return (*messages, {"role": "user", "content": given})
    items = body.items("input") if not isinstance(given, str) else None
    if not items:
        raise invalid("input", "is empty")
    if len(items) > rules.limits.messages:
        raise invalid("input", f"{len(items)} given; at most {rules.limits.messages} are taken")
    return (*messages, *(_item(body.object_at("input", at, one)) for at, one in enumerate(items)))


def _item(one: Fields) -> Mapping[str, object]:
    kind = one.text("type")
    if kind not in (None, "message"):
        raise unsupported(one.path("type"), f"{str(kind)[:64]!r}: only messages are taken")
    role = one.one_of("role", ROLES)
    if role is None or not one.has("content"):
        raise invalid(one.path("role" if role is None else "content"), "is missing")
    one.ignore("id", "status")
    made = {"role": role, "content": content_text(one, "content", PARTS)}
    one.done()
    return made
