"""`[live]`: every kind of key from file and --set, refusals in one line, and the text that reads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.deadlines import Deadlines
from executors.frontend.settings import Settings
from executors.live_worker import Upkeep
from executors.starter import Terms
from policies.errors import ConfigError
from twin.config import Config
from twin.config_live import TABLES, LiveConfig
from twin.config_read import load
from twin.config_schema import keys_of
from twin.config_text import show, to_plain, to_toml

EVERY_KIND = """
[live]
first_token_s = 30              # a number from a whole one
between_tokens_s = 0
misses = 2
[live.frontend]
aliases = ["gpt-4o=tiny", "small = tiny"]
loras = ["sql=tiny"]
anthropic = false
overload_status = 503
metrics_prefix = "llm"
[live.frontend.limits]
stops = 16
[live.frontend.deadlines]
total_s = 2.5
[live.frontend.access]
requests_per_s = 4
allowed_hosts = ["llm.example"]
tenant_isolation = "key"
[resilience]
drain_timeout_s = 7
[disaggregation]
lease_s = 45.5
"""
SETS = ("allow_no_effect=true",)


def read(folder: Path, text: str, *sets: str, flags: dict[str, object] | None = None) -> Config:
    file = folder / "c.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, flags, (*SETS, *sets))


def test_every_kind_of_key_reaches_whom_it_is_for(tmp_path: Path) -> None:
    config = read(tmp_path, EVERY_KIND)
    assert Deadlines.of(config) == Deadlines(first_token_s=30.0, between_tokens_s=None)
    assert (Upkeep.of(config).misses, Upkeep.of(config).drain_s) == (2, 7.0)
    assert (Terms.of(config).lease_s, Terms.of(config).drain_s) == (45.5, 7.0)
    settings = Settings.of(config, "tiny")
    assert settings.aliases == {"gpt-4o": "tiny", "small": "tiny"}
    assert settings.loras == {"sql": "tiny"}
    assert (settings.anthropic, settings.overload_status, settings.metrics_prefix) == (False, 503, "llm")
    assert (settings.limits.stops, settings.deadlines.total_s, settings.deadlines.drain_s) == (16, 2.5, 7.0)
    assert settings.access.requests_per_s == 4.0
    assert (settings.access.allowed_hosts, settings.access.tenant_isolation) == (("llm.example",), "key")


def test_nothing_given_is_what_serving_has_without_a_configuration() -> None:
    config = load(None, None, SETS)
    assert Deadlines.of(config) == Deadlines()
    assert Upkeep.of(config) == Upkeep()
    assert Terms.of(config) == Terms()
    assert Settings.of(config, "tiny") == Settings()


def test_one_silence_of_a_worker_counts_in_both_worlds_unless_serving_has_its_own(tmp_path: Path) -> None:
    assert Deadlines.of(read(tmp_path, "[resilience]\nresponse_inactivity_s = 20")).between_tokens_s == 20.0
    both = "[resilience]\nresponse_inactivity_s = 20\n[live]\nbetween_tokens_s = 5"
    assert Deadlines.of(read(tmp_path, both)).between_tokens_s == 5.0


def test_set_and_flags_win_over_the_table(tmp_path: Path) -> None:
    sets = ("live.first_token_s=12", "live.frontend.access.cors_origins=http://a,http://b", "resilience.grace_s=3")
    config = read(tmp_path, EVERY_KIND, *sets, flags={"--lease": "20", "--drain": "0", "--grace": None})
    assert config.live.first_token_s == 12.0
    assert config.live.frontend.access.cors_origins == ("http://a", "http://b")
    assert (config.disaggregation.lease_s, config.resilience.drain_timeout_s) == (20.0, 0.0)
    assert config.origins["disaggregation.lease_s"] == "--lease"
    assert config.resilience.grace_s == 3.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("live.first_token_s = -1", "live.first_token_s = -1: must be 0 or more"),
        ("live.misses = 1.5", "live.misses = 1.5: must be a whole number"),
        ("live.frontend.anthropic = 1", "must be true or false"),
        ("live.frontend.overload_status = 500", "live.frontend.overload_status = 500: must be 429, 503 or 529"),
        ('live.frontend.bucket_profile = "fine"', "must be superset or dynamo"),
        ("live.frontend.limits.stops = 33", "must be 32 or less"),
        ('live.frontend.aliases = ["a"]', '"a" must be a name, = and what it stands for, as in gpt-4o=llama'),
        ('live.frontend.aliases = ["a=b", "a=c"]', "a stands for b and for c"),
        ('live.frontend.metrics_prefix = "9x"', "not begin with a digit"),
        ("live.frontend.total_s = 3", "it belongs to [live.frontend.deadlines]"),
        ("[live.frontent]\nanthropic = true", "did you mean live.frontend"),
        ("live.frontend = 3", "live.frontend is a table"),
    ],
)
def test_bad_values_are_refused_in_one_line_that_says_where(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'c.toml'}:1: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("key", "wrong"), [("aliases", "gpt=lama"), ("loras", "sql=lama")])
def test_another_name_of_a_model_that_is_not_served_is_refused(tmp_path: Path, key: str, wrong: str) -> None:
    config = read(tmp_path, f'[live.frontend]\n{key} = ["{wrong}"]')
    with pytest.raises(ConfigError, match="lama is not served here; llama is"):
        Settings.of(config, "llama")


@pytest.mark.parametrize("live", [False, True])
def test_the_text_reads_back_equal(tmp_path: Path, live: bool) -> None:
    config = read(tmp_path, EVERY_KIND)
    for text in (to_toml(config, live=live), show(config)):
        assert read(tmp_path, text) == config


def test_the_record_of_serving_has_every_key_and_that_of_a_simulation_none(tmp_path: Path) -> None:
    config = load(None, None, SETS)
    assert "[live" not in to_toml(config)
    assert "live" not in to_plain(config)
    text = to_toml(config, live=True)
    for path, table in TABLES.items():
        part = text.split(f"[{path}]\n")[1].split("\n\n")[0]
        there = {line.split(" = ")[0] for line in part.splitlines()}
        assert {entry.name for entry in keys_of(table) if entry.default is not None} <= there
    assert read(tmp_path, text).live == LiveConfig()
    assert to_plain(config, live=True)["live"]["frontend"]["limits"]["stops"] == 4
    told = load(None, None, (*SETS, "live.misses=2"))
    assert "misses = 2" in to_toml(told), "what a deployment was given goes on with it"
    assert to_plain(told) == to_plain(config), "and changes nothing about a simulation"


def test_a_simulation_takes_a_file_with_such_a_table(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    file.write_text("[live]\nfirst_token_s = 30\n", encoding="utf-8")
    assert load(file).no_effect == ()
