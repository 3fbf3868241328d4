"""/openapi.json says what the frontend does: requests drawn from it, right and wrong, are answered as it promises."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from frontend_builders import ANSWER, MODEL, Script, ScriptedBackend, beside, ids_of, run, served, tokenizer
from hypothesis import HealthCheck, given, settings

from executors.engines.protocol import Ability
from executors.frontend.errors import ApiError
from executors.frontend.openapi.document import document
from executors.frontend.requests.anthropic import read_count, read_messages
from executors.frontend.requests.openai import read_chat, read_completion
from executors.frontend.requests.responses import read_responses
from executors.frontend.requests.rules import Rules
from executors.frontend.settings import Limits, Settings

pytestmark = pytest.mark.long

schemathesis = pytest.importorskip("schemathesis", reason="requests are drawn by it: pip install 'dynatwin[test]'")

ABLE = Settings(debug=True, abilities=frozenset({Ability.GRAMMAR, Ability.LOGPROBS}))
EXAMPLES = 10
LIMITS = list(ScriptedBackend().limits)
READERS = {
    "ChatRequest": read_chat,
    "CompletionRequest": read_completion,
    "ResponsesRequest": read_responses,
    "MessagesRequest": read_messages,
    "CountRequest": read_count,
}
schemathesis.checks.load_all_checks()
CHECKED = schemathesis.checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)


def described(given: Settings = ABLE) -> dict[str, Any]:
    """The document, with the one model that is served as the only name of a model, and its vocabulary."""
    made: dict[str, Any] = copy.deepcopy(document(given, LIMITS))
    made["components"]["schemas"]["ModelName"] = {"enum": [MODEL]}
    made["components"]["schemas"]["TokenId"]["maximum"] = tokenizer().vocab_size - 1
    return made


def operations(*methods: str) -> list[Any]:
    """Those of the document, or only those with these methods."""
    found = [one.ok() for one in schemathesis.openapi.from_dict(described()).get_all_operations()]
    return [one for one in found if not methods or one.method in methods]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    says = Script(says=ids_of(ANSWER), cached_tokens=1)
    with beside(ScriptedBackend(says), ABLE) as address:
        yield address


def ask(operation: Any, mode: Any, url: str) -> set[int]:
    """Draw requests, check every answer against the document; the statuses that came."""
    seen: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def one(case: Any) -> None:
        answer = case.call(base_url=url)
        seen.add(answer.status_code)
        assert answer.headers["x-request-id"]
        case.validate_response(answer, checks=CHECKED)

    one()
    return seen


@pytest.mark.parametrize("operation", operations(), ids=lambda one: f"{one.method} {one.path}")
def test_what_it_allows_is_answered_as_it_says(operation: Any, url: str) -> None:
    assert 200 in ask(operation, schemathesis.GenerationMode.POSITIVE, url)


@pytest.mark.parametrize("operation", operations("post"), ids=lambda one: f"{one.method} {one.path}")
def test_what_it_does_not_allow_is_refused_as_it_says(operation: Any, url: str) -> None:
    assert 200 not in ask(operation, schemathesis.GenerationMode.NEGATIVE, url)


@run
async def test_it_is_served_with_the_limits_of_this_server() -> None:
    async with served(settings=Settings(limits=Limits(n=3), overload_status=429, anthropic=False)) as it:
        told = (await it.http.get("/openapi.json")).json()
    assert told["components"]["schemas"]["ChatRequest"]["properties"]["n"]["maximum"] == 3
    chat = told["paths"]["/v1/chat/completions"]["post"]
    assert "529" not in chat["responses"]
    assert chat["responses"]["429"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert not [path for path in told["paths"] if path.startswith("/v1/messages")]
    assert {} in told["security"]


class Noting(dict[str, object]):
    """Which keys a parser asks for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: object = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("name", READERS)
def test_it_has_every_field_that_is_read_and_no_other(name: str) -> None:
    rules = Rules(limits=Limits(), abilities=ABLE.abilities, trusted=True, headers={})
    known = set(document(ABLE, LIMITS)["components"]["schemas"][name]["properties"])  # type: ignore[index,call-overload]
    messages = {"messages": [{"role": "user", "content": "x"}]}
    least = {"ChatRequest": messages, "CompletionRequest": {"prompt": "x"}, "ResponsesRequest": {"input": "x"}}
    body = {"model": MODEL, **least.get(name, messages), **({"max_tokens": 1} if name == "MessagesRequest" else {})}
    noting = Noting(body)
    READERS[name](noting, rules)
    for field in noting.asked - known:
        with pytest.raises(ApiError, match="not supported by this server"):
            READERS[name]({**body, field: {"a": 1}}, rules)
    for field in known - noting.asked:
        READERS[name]({**body, field: None}, rules)
