"""Text to tokens and back: pieces joined are the whole, however tokens, characters and stop strings are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from frontend_builders import SPECIALS, TEMPLATE, chat_ids, ids_of, tokenizer, tokenizer_json
from hypothesis import given
from hypothesis import strategies as st

from executors.backend import Delta
from executors.frontend.detokenize import Detokenizer, StopStrings
from executors.frontend.errors import ApiError
from executors.frontend.reader import Reader
from executors.frontend.template import ChatTemplate
from executors.frontend.tokens import ServedTokenizer
from policies.errors import ConfigError

TEXTS = st.text(
    alphabet=st.sampled_from("abé🍎\u0301 \n<|中\ufffd") | st.characters(exclude_categories=["Cs"]), max_size=40
)
STOPS = st.lists(st.text(alphabet="abé🍎 中", min_size=1, max_size=4), max_size=4)


def read(ids: list[int], sizes: list[int], stops: list[str]) -> tuple[list[str], Reader]:
    """The pieces of an answer that comes in steps of `sizes`, the rest in one."""
    reader = Reader(tokenizer(), stops, 0)
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        if reader.stop is not None or at >= len(ids):
            break
        pieces.append(reader.push(Delta(token_ids=tuple(ids[at : at + size]), at_s=0.0)).text)
        at += size
    if reader.stop is None:
        pieces.append(reader.flush())
    return pieces, reader


def cut(text: str, stops: list[str]) -> str:
    """What is left of `text` before the stop string that is complete first; of two the longer."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), max_size=30), stops=STOPS)
def test_any_cutting_gives_the_text_up_to_the_first_stop_string(text: str, sizes: list[int], stops: list[str]) -> None:
    ids = ids_of(text)
    pieces, _ = read(ids, sizes, stops)
    whole, reader = read(ids, [len(ids)], stops)
    assert "".join(pieces) == "".join(whole) == cut(text, stops)
    assert (reader.stop is not None) == any(stop in text for stop in stops)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), max_size=30))
def test_no_piece_ends_within_a_character(text: str, sizes: list[int]) -> None:
    pieces, _ = read(ids_of(text), sizes, [])
    shown = "".join(pieces[:-1])
    assert text.startswith(shown)
    assert "".join(pieces) == text


@given(text=st.text(alphabet="ab", max_size=12), sizes=st.lists(st.integers(1, 3), max_size=12), stops=STOPS)
def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    ids = ids_of(text)
    _, reader = read(ids, sizes, stops)
    _, by_one = read(ids, [1] * len(ids), stops)
    assert reader.tokens == by_one.tokens


def test_what_may_become_a_stop_string_is_held_back_and_given_if_it_does_not() -> None:
    looking = StopStrings(["</end>", "<b"])
    assert looking.push("one <")[0] == "one "
    assert looking.push("/en")[0] == ""
    assert looking.push("x")[0] == "</enx"
    assert looking.push("<b?") == ("", "<b")
    assert looking.flush() == ""


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    (lone,) = [one for one in range(256) if tokenizer().decode([one]) == "\ufffd"][:1]
    detokenizer = Detokenizer(tokenizer().decode)
    shown = [detokenizer.push([lone]) for _ in range(100)]
    assert "".join(shown)
    assert "".join(shown) + detokenizer.flush() == "\ufffd" * 100


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    reader = Reader(tokenizer(), ["two"], 4)
    text = reader.push(Delta(token_ids=tuple(ids_of("one two three four two five")), at_s=0.0)).text
    assert text == "one two three four "
    assert reader.stop == "two"


def test_the_template_is_filled_and_its_control_tokens_are_tokens() -> None:
    text, ids = chat_ids([{"role": "user", "content": "one"}])
    assert text == "<s><|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer().encode(text.removeprefix("<s>"), raw=True)


@given(words=st.lists(st.sampled_from([*SPECIALS, "one", " ", "<|im_", "end|>"]), max_size=6))
def test_no_text_of_a_client_makes_a_control_token(words: list[str]) -> None:
    content = "".join(words)
    text, ids = chat_ids([{"role": "user", "content": content}])
    _, empty = chat_ids([{"role": "user", "content": ""}])
    control = set(tokenizer().encode("".join(SPECIALS), raw=True))
    assert sum(one in control for one in ids) == sum(one in control for one in empty)
    assert content in text
    assert content in tokenizer().decode(ids)


def test_a_template_that_takes_no_such_messages_says_so() -> None:
    strict = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ApiError, match="roles must alternate"):
        strict.render([])
    with pytest.raises(ApiError, match="cannot be filled"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_a_template_reaches_nothing_outside() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(ApiError, match="cannot be filled"):
            ChatTemplate(source, {}).render([])


def test_a_folder_has_a_tokenizer_and_its_template_in_either_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        ServedTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    assert ServedTokenizer.from_folder(tmp_path).chat is None
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    messages = [{"role": "user", "content": "one"}]
    assert chat_ids(messages, ServedTokenizer.from_folder(tmp_path)) == chat_ids(messages)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}own", encoding="utf-8")
    assert chat_ids(messages, ServedTokenizer.from_folder(tmp_path))[0] == "<s>own"
