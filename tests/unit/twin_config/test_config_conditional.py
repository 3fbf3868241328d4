"""Conditional disaggregation that never comes to be asked: destination first, said or by the engine's default."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.config_read import load

LEGS = """
[disaggregation]
conditional = "isl"
{order}
[router]
mode = "kv"
[[workers]]
name = "p"
role = "prefill"
engine.kind = "{kind}"
[[workers]]
name = "d"
role = "decode"
engine.kind = "{kind}"
"""


@pytest.mark.parametrize(
    ("kind", "order"), [("sglang", ""), ("sglang", 'order = "decode-first"'), ("vllm", 'order = "decode-first"')]
)
def test_conditional_has_no_effect_where_room_is_taken_first(tmp_path: Path, kind: str, order: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(LEGS.format(kind=kind, order=order), encoding="utf-8")
    with pytest.raises(ConfigError, match="conditional has no effect: decode-first places every request"):
        load(path)


@pytest.mark.parametrize(("kind", "order"), [("vllm", ""), ("trtllm", ""), ("sglang", 'order = "prefill-first"')])
def test_it_has_one_where_the_prompt_is_computed_first(tmp_path: Path, kind: str, order: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(LEGS.format(kind=kind, order=order), encoding="utf-8")
    assert load(path).no_effect == ()
