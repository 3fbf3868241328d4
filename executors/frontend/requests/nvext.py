"""`nvext`, agent hints, routing constraints and the headers that say the same: what a client may ask of the router."""

from __future__ import annotations

import re
from typing import Final, cast, get_args

from executors.frontend.errors import invalid, unsupported
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.wanted import Annotation, Extensions, Extra
from policies.cluster.events import TaintWeight
from policies.cluster.ids import WorkerId

_SESSION: Final = re.compile(r"[A-Za-z0-9._:-]{1,256}")
_CLASS: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_WORKER_KEYS: Final = ("backend_instance_id", "decode_worker_id")
_WORKER_HEADER: Final = "x-worker-instance-id"
_OTHER_PIN_KEYS: Final = ("prefill_worker_id", "dp_rank", "prefill_dp_rank")
_OTHER_PIN_HEADERS: Final = ("x-prefill-instance-id", "x-dp-rank", "x-prefill-dp-rank")
_NOT_OFFERED: Final = ("metadata_upload", "max_thinking_tokens")
_INT32: Final = 2**31 - 1
_SALT_CHARS: Final = 256


def read_extensions(body: Fields, rules: Rules) -> Extensions:
    """What `nvext` of `body` and the headers say. Raises ApiError for what is wrong or not for this client."""
    given = body.within("nvext")
    nvext = given if given is not None else Fields({}, "nvext")
    hints = nvext.within("agent_hints") or Fields({}, "nvext.agent_hints")
    for name in _NOT_OFFERED:
        if nvext.value(name) is not None:
            raise unsupported(nvext.path(name), "backend specifics are not passed on")
    nvext.ignore("request_timestamp_ms")
    required, preferred = _taints(nvext)
    ttft_s, itl_s = _targets(nvext)
    made = Extensions(
        priority=hints.integer("priority", -_INT32 - 1, _INT32) or 0,
        strict_priority=_strict(hints, rules),
        osl_tokens=hints.integer("osl", 1),
        required_taints=required,
        preferred_taints=preferred,
        policy_class=_policy_class(rules),
        session_id=_session(rules),
        worker=_worker(nvext, rules),
        ttft_target_s=ttft_s,
        itl_target_s=itl_s,
        cache_salt=nvext.text("cache_salt", longest=_SALT_CHARS) or body.text("cache_salt", longest=_SALT_CHARS),
        token_data=_token_data(nvext),
        raw_prompt=bool(nvext.flag("use_raw_prompt")) and rules.may(nvext.path("use_raw_prompt")),
        greedy=bool(nvext.flag("greed_sampling")),
        extra_fields=frozenset(cast("tuple[Extra, ...]", _words(nvext, "extra_fields", get_args(Extra)))),
        annotations=cast("tuple[Annotation, ...]", _words(nvext, "annotations", get_args(Annotation))),
    )
    hints.flag("speculative_prefill")
    hints.number("latency_sensitivity")
    hints.done()
    nvext.done()
    return made


def _strict(hints: Fields, rules: Rules) -> int:
    value = hints.integer("strict_priority", 0, 2**32 - 1) or 0
    return value if value and rules.may(hints.path("strict_priority")) else 0


def _taints(nvext: Fields) -> tuple[tuple[str, ...], tuple[TaintWeight, ...]]:
    wanted = nvext.within("routing_constraints")
    if wanted is None:
        return (), ()
    required = wanted.texts("required_taints", most=64)
    preferred = wanted.within("preferred_taints")
    weights: list[TaintWeight] = []
    if preferred is not None:
        for taint in preferred.names():
            weights.append(TaintWeight(taint=taint, weight=preferred.number(taint) or 0.0))
    wanted.done()
    return required, tuple(weights)


def _targets(nvext: Fields) -> tuple[float | None, float | None]:
    """The client's own limits; on the wire they are milliseconds."""
    router = nvext.within("router")
    if router is None:
        return None, None
    ttft_ms, itl_ms = router.number("ttft_target", above=0), router.number("itl_target", above=0)
    router.done()
    return None if ttft_ms is None else ttft_ms / 1e3, None if itl_ms is None else itl_ms / 1e3


def _worker(nvext: Fields, rules: Rules) -> WorkerId | None:
    """The worker that the client names, by body or header."""
    for name in _OTHER_PIN_KEYS:
        if nvext.value(name) is not None and rules.may(nvext.path(name)):
            raise unsupported(nvext.path(name), "a request can be pinned to one worker only")
    for name in _OTHER_PIN_HEADERS:
        if name in rules.headers and rules.may(name):
            raise unsupported(name, "a request can be pinned to one worker only")
    named = [number for name in _WORKER_KEYS if (number := nvext.integer(name, 0)) is not None]
    if _WORKER_HEADER in rules.headers:
        named.append(_number_header(rules, _WORKER_HEADER))
    if len(set(named)) > 1:
        raise invalid(nvext.path(_WORKER_KEYS[0]), "the request names two different workers")
    if not named or not rules.may("worker pin"):
        return None
    return WorkerId(named[0])


def _number_header(rules: Rules, name: str) -> int:
    text = rules.headers[name]
    if not re.fullmatch(r"\d{1,18}", text):
        raise invalid(name, "must be a whole number")
    return int(text)


def _session(rules: Rules) -> str | None:
    value = rules.headers.get("x-dynamo-session-id")
    if value is not None and not _SESSION.fullmatch(value):
        raise invalid("x-dynamo-session-id", "must be 1 to 256 of A-Z a-z 0-9 . _ : -")
    return value


def _policy_class(rules: Rules) -> str | None:
    """Of untrusted clients the header is dropped, and counted."""
    value = rules.headers.get("x-dynamo-meta-policy-class")
    if value is None:
        return None
    if not rules.trusted:
        rules.count("dropped_policy_class")
        return None
    if not _CLASS.fullmatch(value):
        raise invalid("x-dynamo-meta-policy-class", "must be 1 to 64 of A-Z a-z 0-9 . _ : -")
    return value


def _token_data(nvext: Fields) -> tuple[int, ...] | None:
    values = nvext.items("token_data")
    if values is None:
        return None
    return token_ids(nvext.path("token_data"), values)


def token_ids(where: str, values: list[object]) -> tuple[int, ...]:
    """A prompt that is token ids already; the vocabulary is checked where the model is known."""
    if not values:
        raise invalid(where, "has no tokens")
    for at, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise invalid(f"{where}[{at}]", "is no token id")
    return tuple(cast("list[int]", values))


def _words(nvext: Fields, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = nvext.texts(name)
    for word in words:
        if word not in known:
            raise invalid(nvext.path(name), f"{word[:64]!r} is none of {', '.join(known)}")
    return words
