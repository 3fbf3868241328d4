"""`loras` of worker groups: how the list is written, what it may hold, when it or its rank has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import CapabilityError, ConfigError
from twin.cluster import build_groups
from twin.config import Config
from twin.config_read import load
from twin.config_text import show, to_plain, to_toml

GROUPS = """
[[workers]]
name = "chat"
{chat}
[[workers]]
name = "code"
gpu = "h200_sxm"
{code}
"""

LEGS = """
[[workers]]
name = "p"
role = "prefill"
loras = {prefill}
[[workers]]
name = "d"
role = "decode"
loras = {decode}
"""


def groups(folder: Path, chat: str, code: str) -> Config:
    file = folder / "c.toml"
    file.write_text(GROUPS.format(chat=chat, code=code), encoding="utf-8")
    return load(file)


def test_each_group_has_its_own_set_and_the_workers_carry_it(tmp_path: Path) -> None:
    config = groups(tmp_path, 'loras = ["a", "b c"]', "loras = []")
    chat, code = build_groups(config)
    assert {spec.loras for spec in chat.workers} == {("a", "b c")}
    assert {spec.loras for spec in code.workers} == {()}
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config), encoding="utf-8")
    assert load(again) == config
    assert 'loras = ["a", "b c"]' in show(config)
    assert to_plain(config)["workers"]["chat"]["loras"] == ["a", "b c"]


@pytest.mark.parametrize(("text", "names"), [("a", ("a",)), ("a,b", ("a", "b")), (" a , b ", ("a", "b")), ("", ())])
def test_a_set_on_the_command_line_is_written_with_commas(text: str, names: tuple[str, ...]) -> None:
    assert load(sets=[f"workers.loras={text}"]).workers[0].loras == names


def test_without_a_list_a_worker_serves_whatever_is_asked_for() -> None:
    (group,) = build_groups(load())
    assert group.workers[0].loras is None


@pytest.mark.parametrize("value", ['"a"', "3", '["a", 3]', '["a", "a"]', '["a", " "]', '{ a = "b" }'])
def test_what_is_no_list_of_different_names_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        groups(tmp_path, f"loras = {value}", "loras = []")
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'c.toml'}:4: ")
    assert "\n" not in text
    assert "loras" in text


def test_one_group_with_a_list_and_one_without_is_a_question_not_a_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.toml:4: workers\.chat\.loras is given, and workers\.code\.loras is not"):
        groups(tmp_path, 'loras = ["a"]', "")


def test_adapters_take_memory_from_the_pool_and_an_empty_list_takes_none() -> None:
    none, some = (
        build_groups(load(sets=[f"workers.loras={text}", *more]))[0].settings.blocks
        for text, more in (("", ()), ("a,b", ("workers.lora_rank=64",)))
    )
    assert none == build_groups(load())[0].settings.blocks
    assert 0 < none - some < none / 10


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["workers.lora_rank=8"], "loras lists no adapters"),
        (["workers.loras=", "workers.lora_rank=8"], "loras lists no adapters"),
        (["workers.loras=a", "workers.lora_rank=8", "workers.engine.kv_blocks=100"], "kv_blocks says"),
        (["workers.loras=", "workers.engine.max_loras=2"], "loras lists 0 adapters"),
        (["workers.loras=a,b", "workers.engine.kv_blocks=100", "workers.engine.max_loras=2"], "loras lists 2 adapters"),
        (["workers.engine=trtllm", "workers.engine.max_loras=2"], "there for vllm"),
        (["workers.engine=sglang", "workers.engine.max_loras=2"], "there for vllm"),
        (["workers.engine.nextn=1", "workers.engine.max_loras=2"], "without draft tokens"),
        (["compat=dynamo-1.6.1", "workers.engine.max_loras=2"], "knows no adapters"),
        (["disaggregation.decode_busy_share=0.5"], "no group of workers has the role prefill"),
    ],
)
def test_a_rank_or_share_without_a_part_to_play_is_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="has no effect") as refusal:
        load(sets=sets)
    assert words in str(refusal.value)


def test_adapters_in_a_batch_are_those_in_memory() -> None:
    pools = {
        sets: build_groups(load(sets=sets))[0].settings
        for sets in [("workers.loras=a,b,c",), ("workers.loras=a,b,c", "workers.engine.max_loras=1")]
    }
    three, one = pools.values()
    plain = build_groups(load())[0].settings
    assert (three.max_loras, one.max_loras, plain.max_loras) == (None, 1, None)
    assert plain.blocks - three.blocks == pytest.approx(3 * (plain.blocks - one.blocks), abs=3)
    any_of_two = build_groups(load(sets=["workers.engine.max_loras=2"]))[0].settings
    assert three.blocks < any_of_two.blocks < one.blocks


def test_a_limit_where_there_is_none_is_refused_even_if_options_may_be_idle() -> None:
    config = load(sets=["allow_no_effect=true", "workers.engine=trtllm", "workers.engine.max_loras=2"])
    with pytest.raises(CapabilityError, match=r"workers\.pool\.engine\.max_loras"):
        build_groups(config)


def test_prefill_workers_with_an_adapter_that_nobody_decodes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "legs.toml"
    file.write_text(LEGS.format(prefill='["a", "b"]', decode='["a"]'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"workers\.p\.loras has no effect: no decode worker serves b"):
        load(file)
    file.write_text(LEGS.format(prefill='["a"]', decode='["a", "b"]'), encoding="utf-8")
    assert load(file).workers[1].loras == ("a", "b")


def test_a_busy_share_is_read_with_a_condition(tmp_path: Path) -> None:
    file = tmp_path / "legs.toml"
    file.write_text(LEGS.format(prefill="[]", decode="[]"), encoding="utf-8")
    with pytest.raises(ConfigError, match="conditional = off keeps no prompt"):
        load(file, sets=["disaggregation.decode_busy_share=0.5"])
    sets = ["disaggregation.decode_busy_share=0.5", "disaggregation.conditional=isl", "router.mode=kv"]
    assert load(file, sets=sets).disaggregation.decode_busy_share == 0.5
    with pytest.raises(ConfigError, match="must be 1 or less"):
        load(file, sets=["disaggregation.decode_busy_share=1.5"])
