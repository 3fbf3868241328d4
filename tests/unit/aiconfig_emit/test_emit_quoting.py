"""Quoting: what a user names reaches a shell and a YAML reader as it is, whatever it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from emit_builders import NAMES, agg, plan
from hypothesis import example, given
from hypothesis import strategies as st

from aiconfig.emit.files import emit
from aiconfig.emit.yamltext import dump, is_bare, load, one_line
from policies.errors import ConfigError

# What some version of YAML reads as something else than text.
TRICKY = (
    "", "y", "Y", "n", "N", "yes", "No", "on", "OFF", "true", "False", "null", "Null", "~", "nan", ".nan", ".inf",
    "-.inf", "1", "-1", "1.5", "1e3", "1E3", "0x1f", "0o17", "017", "1_000", "12:30:45", "2024-01-01", "=", "<<", "-",
    "---", "...", "- a", "a: b", "a #b", "#a", "&a", "*a", "!a", "%a", "@a", "`a", "{a}", "[a]", "a,", "'a'", '"a"',
    " a", "a ", "a\tb", "a\nb", "a\\n", "?", "? a", "|", ">", "0.0.0.0", "é", "\u2028", "\x07",
)  # fmt: skip
HOSTILE = (
    "a b",
    "it's",
    '"; rm -rf ~; "',
    "$(id)",
    "`id`",
    "${HOME}",
    "a'$(id)'b",
    "a\\",
    "!!",
    "*",
    "a#b",
    "#",
    "é;&|<>",
)


@pytest.mark.parametrize("text", TRICKY)
def test_what_could_be_read_as_something_else_is_quoted(text: str) -> None:
    assert not is_bare(text)
    written = dump([{"key": text, "list": [text]}])
    assert load(written, "test") == [{"key": text, "list": [text]}]
    assert f"key: {text}\n" not in written


@given(st.text())
@example("y")
@example("a\r\nb")
def test_any_text_comes_back_from_yaml(text: str) -> None:
    tree = {"key": text, "list": [text, {"inner": text}]}
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return
    assert yaml.safe_load(dump([tree])) == tree


@given(NAMES, st.text())
@example("v", "search\nb: 2")
@example("v", "search\u2028b: 2")
def test_a_comment_cannot_end_its_line_or_change_a_value(value: str, comment: str) -> None:
    tree = {"a": value, "b": [1, "x y"]}
    written = dump([tree], {(0, "a"): comment, (0, "b", 1): comment}, [one_line(comment)])
    assert yaml.safe_load(written) == tree
    assert len(written.splitlines()) == 1 + len(dump([tree]).splitlines())


@pytest.mark.parametrize("kind", ["vllm", "bench"])
@pytest.mark.parametrize("name", HOSTILE)
def test_bash_hands_a_name_over_as_it_is(tmp_path: Path, kind: str, name: str) -> None:
    made = emit(plan(agg(), checkpoint=name), kind)
    script = next(text for path, text in made.items() if path.endswith(".sh"))
    shown = "exec() { printf '%s\\0' \"$@\"; }\n" + script
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    assert name in done.stdout.split("\0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\nb", "-rf", "", "\x1b[31m", "a\u2028b"])
def test_a_name_that_no_file_could_hold_safely_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="begins with no dash and has printable characters"):
        plan(agg(), checkpoint=text)


def test_a_yaml_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"file\.yml:3: no YAML"):
        load("a: 1\nb: [\n", "file.yml")
