"""The table of flags: one spelling for each setting and release, and a notice beyond the releases that were read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from aiconfig.candidate import ENGINES
from aiconfig.emit import flags as module
from aiconfig.emit.flags import KINDS, find_flags, releases
from policies.errors import ConfigError

TABLE = tomllib.loads((Path(module.__file__).parent / "flags.toml").read_text(encoding="utf-8"))
EACH = [(engine, release) for engine in TABLE for release in TABLE[engine]["read"]]


@pytest.mark.parametrize(("engine", "release"), EACH)
def test_a_release_has_each_setting_once_and_each_name_once(engine: str, release: str) -> None:
    found = find_flags(engine, release)
    rows = [row for row in TABLE[engine]["flags"] if module._has(row, module._order(release))]
    assert len(rows) == len(found.by_key), "a setting has two rows that hold in this release"
    names = [name for flag in found.by_key.values() for name in (flag.name, *flag.also) if name]
    assert len(names) == len(set(names))
    assert not set(names) & set(found.aside)
    assert found.notice is None
    assert found.version == release


def test_rows_are_written_as_the_head_of_the_file_says() -> None:
    for engine, table in TABLE.items():
        assert table["read"] == sorted(table["read"], key=module._order)
        for row in table["flags"]:
            assert row["kind"] in KINDS, row
            assert ("name" in row) != ("yaml" in row), row
            assert set(row) <= {
                "key", "name", "also", "short", "kind", "yaml", "yaml_too", "spell", "takes", "since", "until"
            }  # fmt: skip
            for bound in (row.get("since"), row.get("until")):
                assert bound is None or bound in table["read"], f"{engine}: {bound} was not read, so nobody knows"


@pytest.mark.parametrize(
    ("engine", "asked", "nearest"),
    [("vllm", "0.6.0", "0.9.2"), ("vllm", "0.40.1", "0.32.0"), ("sglang", "0.6", "0.5.23"), ("trtllm", "2.0", "1.2.1")],
)
def test_a_release_beyond_the_table_is_answered_with_the_nearest_and_a_notice(
    engine: str, asked: str, nearest: str
) -> None:
    found = find_flags(engine, asked)
    assert found.version == nearest
    assert found.notice is not None
    assert asked in found.notice
    assert f"flags of {nearest}, the nearest" in found.notice


def test_a_release_between_two_that_were_read_has_the_flags_of_the_older() -> None:
    assert "hosts" not in find_flags("vllm", "0.10.1")
    assert "hosts" in find_flags("vllm", "v0.12.1rc0")
    assert find_flags("sglang", "0.5.21.post1")["dp"].name == "--dp-size"
    assert find_flags("sglang", "0.5.22")["dp"].name == "--attn-dp-size"


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_release_the_newest_that_was_read_counts(engine: str) -> None:
    assert find_flags(engine) == find_flags(engine, releases(engine)[-1])


def test_what_is_no_release_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm version 'latest': a release is written like 0\.12\.0"):
        find_flags("vllm", "latest")
    with pytest.raises(ConfigError, match="did you mean 'sglang'"):
        find_flags("sglan")


def test_a_value_that_the_engine_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype 'int3' is not known.*bf16"):
        find_flags("vllm")["kv"].words("int3")
