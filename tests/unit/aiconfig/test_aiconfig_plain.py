"""Results as JSON and back: whole, equal, and refused with the place where something does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aiconfig.plain import from_plain, to_plain
from aiconfig.request import search_request
from aiconfig.result import Result, read_result, result_of
from aiconfig.search import search
from policies.errors import ConfigError
from policies.frozen import frozen
from reports.sla import parse_sla


@frozen
class Leaf:
    value: float
    words: tuple[str, ...] = ()
    where: Path | None = None


@pytest.fixture(scope="module")
def result() -> Result:
    request = search_request({"gpus": 1, "sla": parse_sla("tpot=20ms@mean,ttft=100s@mean"), "modes": ("agg",)})
    return result_of(search(request))


def test_a_result_comes_back_as_it_was(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(result.to_json(), encoding="utf-8")
    assert read_result(tmp_path) == result
    assert read_result(path).to_json() == result.to_json()


def test_what_is_not_finite_has_a_name() -> None:
    plain = to_plain(Leaf(value=math.inf))
    assert json.dumps(plain, allow_nan=False)
    assert from_plain(Leaf, plain, "leaf").value == math.inf
    assert math.isnan(from_plain(Leaf, to_plain(Leaf(value=math.nan)), "leaf").value)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({}, "leaf: 'value' is missing"),
        ({"value": "much"}, "leaf.value = 'much': must be of type float"),
        ({"value": True}, "must be of type float"),
        ({"value": 1.0, "more": 1}, "'more' is not known"),
        ({"value": 1.0, "words": "one"}, "leaf.words: must be a list"),
        ({"value": 1.0, "words": ["a", 2]}, r"leaf.words\[1\]"),
        ([], "leaf: must be a table"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(plain: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_plain(Leaf, plain, "leaf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not there"),
        ("{", "is not JSON"),
        ("[]", "schema None"),
        ('{"schema": "aiconfig.result/0"}', "search again"),
        ('{"schema": "aiconfig.result/1"}', "is missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_result(tmp_path)
