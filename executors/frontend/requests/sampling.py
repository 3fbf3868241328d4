"""How tokens are to be drawn, in the words of OpenAI and in those that engines add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from executors.engines.protocol import NOTHING, Ability, Sampling
from executors.frontend.errors import invalid, unsupported
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.rules import Rules

MAX_LOGPROBS: Final = 20
BIAS: Final = 100.0
STOP_TOKENS: Final = 256
GUIDED: Final[Mapping[str, str]] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
SEED: Final = 2**63


def read_sampling(body: Fields, rules: Rules, *, logprobs: int | None, greedy: bool) -> Sampling:
    """`logprobs`: how many alternatives the client wants of each token; `greedy` overrules the temperature."""
    if logprobs is not None and Ability.LOGPROBS not in rules.abilities:
        raise unsupported(body.path("logprobs"), "the engines tell no probabilities")
    temperature = body.number("temperature", 0, 2)
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_p=body.number("top_p", None, 1, above=0),
        top_k=body.integer("top_k", -1),
        min_p=body.number("min_p", 0, 1),
        presence_penalty=body.number("presence_penalty", -2, 2),
        frequency_penalty=body.number("frequency_penalty", -2, 2),
        repetition_penalty=body.number("repetition_penalty", None, 2, above=0),
        seed=body.integer("seed", -SEED, SEED - 1),
        logprobs=logprobs,
        logit_bias=_bias(body),
        stop_token_ids=_stop_token_ids(body),
        ignore_eos=bool(body.flag("ignore_eos")),
        min_tokens=body.integer("min_tokens", 0) or 0,
        grammar=_grammar(body, rules),
    )


def read_stops(body: Fields, name: str, most: int) -> tuple[str, ...]:
    """Stop strings: one, or a list of at most `most`."""
    value = body.value(name)
    stops = (value,) if isinstance(value, str) else body.texts(name, most=most)
    if any(not stop for stop in stops):
        raise invalid(body.path(name), "has an empty string")
    return stops


def _bias(body: Fields) -> Mapping[int, float]:
    given = body.within("logit_bias")
    if given is None:
        return {}
    for token in given.names():
        if not re.fullmatch(r"\d{1,9}", token):
            raise invalid(given.path(token[:64]), "is no token id")
    return {int(token): given.number(token, -BIAS, BIAS) or 0.0 for token in given.names()}


def _stop_token_ids(body: Fields) -> tuple[int, ...]:
    values = body.items("stop_token_ids") or []
    if len(values) > STOP_TOKENS:
        raise invalid(body.path("stop_token_ids"), f"{len(values)} given; at most {STOP_TOKENS} are taken")
    ids = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    if len(ids) != len(values):
        raise invalid(body.path("stop_token_ids"), "has what is no token id")
    return tuple(ids)


def _grammar(body: Fields, rules: Rules) -> Mapping[str, object]:
    """What guides the answer; at most one thing."""
    asked = {word: body.value(name) for name, word in GUIDED.items() if body.has(name)}
    form = body.within("response_format")
    if form is not None:
        asked.update(_response_format(form))
    if not asked:
        return NOTHING
    name = "response_format" if form is not None else next(name for name in GUIDED if body.has(name))
    if Ability.GRAMMAR not in rules.abilities:
        raise unsupported(body.path(name), "the engines answer without a grammar")
    if len(asked) > 1:
        raise invalid(body.path(name), f"two things are to guide the answer: {', '.join(asked)}")
    return asked


def _response_format(form: Fields) -> Mapping[str, object]:
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    schema = form.within("json_schema")
    if kind == "json_schema":
        if schema is None or schema.within("schema") is None:
            raise invalid(form.path("json_schema.schema"), "is missing")
        schema.ignore("name", "strict", "description")
        schema.done()
        form.done()
        return {"json_schema": schema.value("schema")}
    form.done()
    if kind is None:
        raise invalid(form.path("type"), "is missing")
    return {} if kind == "text" else {"json_schema": {"type": "object"}}
