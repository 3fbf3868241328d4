"""Requests to /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from executors.frontend.errors import invalid, unsupported
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.nvext import read_extensions, token_ids
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.sampling import MAX_LOGPROBS, read_sampling, read_stops
from executors.frontend.requests.wanted import ChatPrompt, Extensions, Prompt, TextPrompt, TokenPrompt, Wanted

ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")


def read_chat(document: Mapping[str, object], rules: Rules) -> Wanted:
    body = rules.fields(document)
    extensions = read_extensions(body, rules)
    prompt = ChatPrompt(messages=_messages(body, rules))
    wanted = bool(body.flag("logprobs"))
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "needs logprobs: true")
    limit = _either(body, "max_completion_tokens", "max_tokens")
    for name in _TOOLS:
        if body.has(name):
            raise unsupported(name, "the engines have no parser of tool calls")
        body.ignore(name)
    return _wanted(body, rules, extensions, (prompt,), limit, (top or 0) if wanted else None)


def read_completion(document: Mapping[str, object], rules: Rules) -> Wanted:
    body = rules.fields(document)
    extensions = read_extensions(body, rules)
    if body.flag("echo"):
        raise unsupported("echo", "prompts are not repeated")
    if body.has("suffix"):
        raise unsupported("suffix", "nothing is inserted")
    body.ignore("suffix")
    prompts = _prompts(body, rules, extensions)
    wanted = _wanted(
        body,
        rules,
        extensions,
        prompts,
        body.integer("max_tokens", 1),
        body.integer("logprobs", 0, MAX_LOGPROBS),
        best_of=True,
    )
    return wanted


def _wanted(
    body: Fields,
    rules: Rules,
    extensions: Extensions,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    best_of: bool = False,
) -> Wanted:
    """What both APIs have in common; everything of the body has been looked at after it."""
    n = body.integer("n", 1, rules.limits.n) or 1
    if best_of and (body.integer("best_of", 1) or n) != n:
        raise unsupported("best_of", "every answer is returned")
    stream = bool(body.flag("stream"))
    include, running = _stream_options(body, stream)
    if extensions.annotations and not stream:
        raise invalid("nvext.annotations", "needs stream: true")
    if body.flag("store"):
        raise unsupported("store", "answers are not kept")
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        body.text(name, longest=512)
    body.within("metadata")
    body.text("service_tier")
    made = Wanted(
        model=model_name(body),
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        stops=read_stops(body, "stop", rules.limits.stops),
        sampling=read_sampling(body, rules, logprobs=logprobs, greedy=extensions.greedy),
        stream=stream,
        include_usage=include,
        running_usage=running,
        extensions=extensions,
    )
    body.done()
    return made


def model_name(body: Fields) -> str:
    name = body.text("model", longest=512)
    if not name:
        raise invalid("model", "is missing")
    return name


def content_text(part_of: Fields, name: str, kinds: tuple[str, ...]) -> str:
    """The content of a message: a string, or parts of text. Anything but text is refused, and no URL is opened."""
    value = part_of.value(name)
    if value is None or isinstance(value, str):
        return value or ""
    texts: list[str] = []
    for part in part_of.objects(name) or []:
        kind = part.text("type")
        if kind not in kinds:
            raise unsupported(part.path("type"), f"{str(kind)[:64]!r}: only text is taken")
        texts.append(part.text("refusal" if kind == "refusal" else "text") or "")
        part.ignore("cache_control", "annotations", "logprobs")
        part.done()
    return "\n".join(texts)


def _messages(body: Fields, rules: Rules) -> tuple[Mapping[str, object], ...]:
    given = body.items("messages") or []
    if len(given) > rules.limits.messages:
        raise invalid("messages", f"{len(given)} given; at most {rules.limits.messages} are taken")
    if not given:
        raise invalid("messages", "there must be at least one")
    return tuple(_message(body.object_at("messages", at, one)) for at, one in enumerate(given))


def _message(one: Fields) -> Mapping[str, object]:
    role = one.one_of("role", ROLES)
    if role is None:
        raise invalid(one.path("role"), "is missing")
    if one.has("tool_calls") or one.has("function_call"):
        raise unsupported(one.path("tool_calls"), "the engines have no parser of tool calls")
    one.ignore("tool_calls", "function_call", "refusal", "audio", "annotations")
    if not one.has("content") and role != "assistant":
        raise invalid(one.path("content"), "is missing")
    made: dict[str, object] = {"role": role, "content": content_text(one, "content", ("text", "refusal"))}
    for name in ("name", "tool_call_id"):
        text = one.text(name, longest=256)
        if text is not None:
            made[name] = text
    one.done()
    return made


def _prompts(body: Fields, rules: Rules, extensions: Extensions) -> tuple[Prompt, ...]:
    value = body.value("prompt")
    match value:
        case None if extensions.token_data is not None:
            return (TokenPrompt(token_ids=extensions.token_data),)
        case None | "" | []:
            raise invalid("prompt", "is empty")
        case str():
            return (TextPrompt(text=value),)
        case [int(), *_]:
            return (TokenPrompt(token_ids=token_ids("prompt", list(value))),)
        case list():
            if len(value) > rules.limits.prompts:
                raise invalid("prompt", f"{len(value)} given; at most {rules.limits.prompts} are taken")
            return tuple(_one_prompt(f"prompt[{at}]", one) for at, one in enumerate(value))
    raise invalid("prompt", "must be a string, token ids, or a list of either")


def _one_prompt(where: str, value: object) -> Prompt:
    match value:
        case str() if value:
            return TextPrompt(text=value)
        case list():
            return TokenPrompt(token_ids=token_ids(where, value))
    raise invalid(where, "must be a string or token ids, and not empty")


def _either(body: Fields, name: str, older: str) -> int | None:
    new, old = body.integer(name, 1), body.integer(older, 1)
    if new is not None and old is not None and new != old:
        raise invalid(name, f"{new} contradicts {older}, which is {old}")
    return old if new is None else new


def _stream_options(body: Fields, stream: bool) -> tuple[bool, bool]:
    options = body.within("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise invalid("stream_options", "needs stream: true")
    include, running = bool(options.flag("include_usage")), bool(options.flag("continuous_usage_stats"))
    options.ignore("include_obfuscation")
    options.done()
    return include, running
