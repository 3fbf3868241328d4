"""Records of workers, how a place is written, and the corners of leases that no store's contract reaches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from executors.discovery import open_discovery
from executors.discovery.folder import FolderDiscovery
from executors.discovery.protocol import Watch, differences, newest
from executors.discovery.record import WorkerRecord, from_plain, read_entry, to_plain, write_entry
from executors.discovery.static import StaticDiscovery, read_workers
from policies.cluster.ids import Role
from policies.errors import ConfigError

LEAST = {"name": "a", "incarnation": 1, "engine": "vllm", "url": "http://h:1", "role": "prefill"}
FULL = WorkerRecord(
    name="a", incarnation=3, engine="sglang", url="http://h:1", role=Role.DECODE, models=("m", "n"), version="0.5.23",
    host="h", pid=9, block_size=32, dp_ranks=4, gpus=8, kv_events="tcp://h:2", kv_replay="tcp://h:3", handoff="h:4",
    fingerprint="f", compatibility="c", taints=("zone/a",), draining=True,
)  # fmt: skip


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60.0):
            await play()

    asyncio.run(limited())


@pytest.mark.parametrize("record", [FULL, from_plain(LEAST, "here")])
def test_a_record_survives_its_writing(record: WorkerRecord) -> None:
    assert from_plain(to_plain(record), "here", strict=True) == record
    assert read_entry(write_entry(record, 7.5), "here") == (record, 7.5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../etc"}, "name = '../etc'"),
        ({"name": 5}, "name = 5 is not a text"),
        ({"url": "ipc://h:1"}, "url = 'ipc://h:1' is no address"),
        ({"url": "http://me:secret@h:1"}, "url has a user in it"),
        ({"role": "both"}, "role = 'both' is none of mixed, prefill, decode"),
        ({"models": "tiny"}, "models = 'tiny' is not a list of texts"),
        ({"dp_ranks": 0}, "dp_ranks = 0 is not a whole number of 1 or more"),
        ({"incarnation": True}, "incarnation = True is not a whole number of 0"),
        ({"draining": "no"}, "draining = 'no' is not true or false"),
        ({"engine": None}, "engine = None is not a text"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_bad_record_is_refused_with_its_place(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(LEAST | change, "w.toml: worker 2", strict=True)
    assert str(caught.value).startswith("w.toml: worker 2")
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_is_missing_is_named_and_what_a_later_release_adds_is_not_in_the_way() -> None:
    with pytest.raises(ConfigError, match="here: 'url' is missing"):
        from_plain({key: value for key, value in LEAST.items() if key != "url"}, "here")
    assert from_plain(LEAST | {"colour": "red"}, "here").name == "a"


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"schema": 1, "lease_s": "x", "worker": {}}',
                                  b'{"schema": 2, "lease_s": 1, "worker": {}}',
                                  b'{"schema": 1, "lease_s": 1e999, "worker": {}}'])  # fmt: skip
def test_a_torn_entry_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="here"):
        read_entry(text, "here")


def test_of_a_name_and_of_an_address_only_the_newest_life_counts() -> None:
    def one(name: str, incarnation: int, url: str) -> WorkerRecord:
        return WorkerRecord(name=name, incarnation=incarnation, engine="vllm", url=url, role=Role.MIXED)

    lives = [one("a", 1, "http://h:1"), one("a", 2, "http://h:2"), one("b", 3, "http://h:2"), one("c", 0, "http://h:1")]
    assert list(newest(lives)) == ["b", "c"], "b has the address of a's newest life; its older one does not come back"
    assert differences(newest(lives), newest(lives)) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers = 3", "tables and nothing else"),
        ("[[worker]]\nname = 'a'", "nothing else, not worker"),
        ("[[workers]]\nname = 'a'", "worker 1: 'engine' is missing"),
        ("name = ", "cannot be read"),
        ("[[workers]]\nname='a'\nengine='v'\nurl='http://h:1'\nrole='mixed'\n" * 2, "name = 'a' is given to 2 workers"),
    ],
)
def test_a_bad_file_is_refused_when_the_watch_begins(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_workers(path)

    async def play() -> None:
        watch = StaticDiscovery(path).watch()
        with pytest.raises(ConfigError, match=says):
            await watch.listed()
        with pytest.raises(ConfigError, match=says):
            await anext(watch)

    run(play)


def test_a_place_is_a_file_a_folder_or_etcd(tmp_path: Path) -> None:
    async def play() -> None:
        found = {where: open_discovery(where).name for where in ("w.toml", str(tmp_path), "etcd://h:1,i:2/mine")}
        assert list(found.values()) == ["w.toml", f"folder {tmp_path}", "etcd at h:1,i:2"]

    run(play)
    for where in ("consul://h", "etcd://me:secret@h:1", "etcd:///x", str(tmp_path / "no")):
        with pytest.raises(ConfigError):
            open_discovery(where)


def test_who_is_missing_after_an_outage_gets_one_lease_of_time_to_come_back() -> None:
    record = from_plain(LEAST, "here")

    async def play(grace_s: float) -> set[str]:
        async def follow(watch: Watch) -> None:
            watch.told([record], {})
            watch.lost_sight("gone")
            watch.told([], {})
            watch.told([], {})

        watch = Watch(follow, grace_s)
        await watch.listed()
        return set(watch.workers)

    assert asyncio.run(play(60.0)) == {"a"}
    assert asyncio.run(play(0.0)) == set()


def test_a_file_that_is_old_at_first_sight_counts_once_it_moves(tmp_path: Path) -> None:
    path = tmp_path / "a@1.json"
    path.write_bytes(write_entry(from_plain(LEAST, "here"), 10.0))
    os.utime(path, (1000.0, 1000.0))

    async def play() -> None:
        watch = FolderDiscovery(tmp_path, 0.01).watch()
        await watch.listed()
        assert watch.workers == {}
        os.utime(path, (1001.0, 1001.0))
        assert (await anext(watch)).record.name == "a"
        await watch.close()

    run(play)


def test_an_entry_gives_way_to_a_newer_life_of_its_name_and_comes_back_after_a_mere_deletion(tmp_path: Path) -> None:
    old, new = (from_plain(LEAST | {"incarnation": n}, "here") for n in (1, 2))

    async def play() -> None:
        store = FolderDiscovery(tmp_path, 0.01)
        first = await store.register(old, lease_s=0.03)
        (tmp_path / "a@1.json").unlink()
        while not (tmp_path / "a@1.json").exists():
            await asyncio.sleep(0.005)
        second = await store.register(new, lease_s=30.0)
        while not first.superseded:
            await asyncio.sleep(0.005)
        assert [path.name for path in tmp_path.iterdir()] == ["a@2.json"]
        await first.deregister()
        await second.deregister()
        assert list(tmp_path.iterdir()) == []

    run(play)
