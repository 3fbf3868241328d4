"""KV tiers of a live worker: every setting is carried out by the engine, or refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executors.engines import kv_tiers
from executors.engines.kv_tiers import OF_THE_HOST, KvPlaces, ObjectStore, connector, refusals, settings, simulated
from executors.engines.launch import Launch, Place, Ports, launch
from policies.errors import CapabilityError, ConfigError
from twin.config import EngineConfig, KvbmConfig, WorkerGroup
from twin.config_schema import keys_of

PLACES = KvPlaces(disk=Path("/kv"), objects=ObjectStore(bucket="store", prefix="a/b", endpoint="http://h:9000"))
HOST = {"cpu_cache_gb": 2.0}


def group(kind: str = "vllm", engine: dict[str, Any] | None = None, **more: Any) -> WorkerGroup:
    kvbm = KvbmConfig(**{**HOST, **more.pop("kvbm", {})})
    return WorkerGroup(name="pool", tp=1, engine=EngineConfig(kind=kind, **(engine or {})), kvbm=kvbm, **more)


def started(of: WorkerGroup, places: KvPlaces = PLACES) -> Launch:
    ports = Ports(host="127.0.0.1", http=8000, events=8001, replay=8003, side=8005)
    return launch(of, Place(name="w", model="/m", served_as="m", ports=ports, folder="/run/w", tiers=places, tag="w-1"))


def transfer(of: WorkerGroup) -> dict[str, Any]:
    argv = started(of).argv
    found: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return found


# ---------------------------------------------------------------- what is carried out

CARRIED: dict[str, tuple[dict[str, Any], Any]] = {
    "cpu_cache_gb": ({"cpu_cache_gb": 3.0}, ("host", "bytes", 3 * 10**9)),
    "cpu_cache_tokens": ({"cpu_cache_gb": None, "cpu_cache_tokens": 640}, ("host", "tokens", 640)),
    "cpu_offload": ({"cpu_offload": "presence_lfu"}, ("host", "offload", "presence_lfu")),
    "cpu_eviction": ({"cpu_eviction": "multi_lru"}, ("host", "eviction", "multi_lru")),
    "disk_cache_gb": ({"disk_cache_gb": 4.0}, ("disk", "bytes", 4 * 10**9)),
    "disk_cache_tokens": ({"disk_cache_tokens": 6400}, ("disk", "tokens", 6400)),
    "disk_offload": ({"disk_cache_gb": 4.0, "disk_offload": "presence"}, ("disk", "offload", "presence")),
    "disk_eviction": ({"disk_cache_gb": 4.0, "disk_eviction": "fifo"}, ("disk", "eviction", "fifo")),
    "remote": ({"remote": True}, ("remote", "offload", "presence_lfu")),
    "remote_offload": ({"remote": True, "remote_offload": "presence"}, ("remote", "offload", "presence")),
    "when_full": ({"when_full": "drop"}, (None, "when_full", "drop")),
    "min_lfu_count": ({"min_lfu_count": 3}, (None, "min_lfu_count", 3)),
    "decay_s": ({"decay_s": 5.0}, (None, "decay_s", 5.0)),
}
OTHER: dict[str, Any] = {
    "cpu_shared_by": 2, "disk_shared": True, "remote_cache_gb": 9.0, "remote_eviction": "lru",
    "cpu_trigger": "on_evict", "disk_trigger": "on_evict", "remote_trigger": "on_idle", "prefetch": True,
    "events": "dedupe", "peers": True, "load_layers": "each", "onboard": "faster", "onboard_deadline_s": 1.0,
    "tenant_quota_tokens": 64, "max_batch_blocks": 32, "min_batch_blocks": 4, "flush_s": 0.5, "batches_at_once": 2,
}  # fmt: skip


def test_every_setting_is_carried_out_or_refused_or_of_the_simulation() -> None:
    named = {entry.name for entry in keys_of(KvbmConfig)}
    assert CARRIED.keys() | OTHER.keys() | OF_THE_HOST == named
    assert len(CARRIED) + len(OTHER) + len(OF_THE_HOST) == len(named)


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_a_setting_is_told_to_the_engine(name: str) -> None:
    given, (tier, entry, value) = CARRIED[name]
    told = transfer(group(kvbm=given))["kv_connector_extra_config"]["dynatwin"]
    assert (told if tier is None else told["tiers"][tier])[entry] == value


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_setting_that_no_engine_carries_out_is_refused_by_name(name: str) -> None:
    of = group(kvbm={"remote": True, "disk_cache_gb": 4.0, name: OTHER[name]})
    with pytest.raises(CapabilityError, match=rf"workers\.pool\.kvbm\.{name}: .* cannot be carried out live: "):
        started(of)


@pytest.mark.parametrize(
    ("tier", "offload", "why"),
    [
        ("cpu", "pass_all", "never writes again"),
        ("disk", "presence+tenant_quota", "knows no tenants"),
        ("remote", "priority", "no caller sets priorities"),
        ("cpu", "first_blocks", "plug-ins are not loaded"),
    ],
)
def test_filters_that_cannot_be_loaded_are_refused(tier: str, offload: str, why: str) -> None:
    of = group(kvbm={"remote": True, "disk_cache_gb": 4.0, f"{tier}_offload": offload})
    with pytest.raises(CapabilityError, match=rf"kvbm\.{tier}_offload: .*{why}.*presence_lfu"):
        started(of)


def test_orders_that_cannot_be_loaded_are_refused() -> None:
    with pytest.raises(CapabilityError, match=r"kvbm\.cpu_eviction: deepest .* lineage, multi_lru, fifo"):
        started(group(kvbm={"cpu_eviction": "deepest"}))


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (group("sglang"), r"pool\.kvbm: tiers are carried out by vLLM, not by sglang; .*--attach"),
        (group(role="decode"), r"pool\.kvbm: a decode worker"),
        (group(engine={"host_blocks": 10}), r"pool\.engine\.host_blocks: .*give kvbm\.cpu_cache_tokens"),
        (group(engine={"prefix_caching": False}), r"without engine\.prefix_caching"),
        (group(kvbm={"cpu_cache_gb": None, "remote": True}), r"through host memory only; give cpu_cache_gb"),
    ],
)
def test_workers_that_can_have_no_tiers_are_refused(of: WorkerGroup, why: str) -> None:
    with pytest.raises(CapabilityError, match=why):
        started(of)


@pytest.mark.parametrize(
    ("kvbm", "why"), [({"disk_cache_gb": 1.0}, "give --kv-disk DIR"), ({"remote": True}, "give --kv-objects s3://")]
)
def test_a_tier_lies_somewhere(kvbm: dict[str, Any], why: str) -> None:
    with pytest.raises(CapabilityError, match=why):
        started(group(kvbm=kvbm), KvPlaces())


def test_what_describes_the_simulation_is_told_to_people() -> None:
    of = group(kvbm={"cpu_gb_per_s": 4.0, "block_bytes": 100})
    assert simulated(of) == ("block_bytes", "cpu_gb_per_s")
    assert not list(refusals(of, PLACES))


# ---------------------------------------------------------------- what the engine is given


def test_a_worker_without_tiers_is_started_as_before() -> None:
    bare = started(replace(group(), kvbm=KvbmConfig()))
    assert "--kv-transfer-config" not in bare.argv
    assert "PYTHONPATH" not in bare.env


def test_host_memory_alone_and_tiers_below_it() -> None:
    alone, deep = transfer(group()), transfer(group(kvbm={"disk_cache_gb": 4.0, "remote": True}))
    assert (alone["kv_connector"], alone["kv_role"], alone["engine_id"]) == ("OffloadingConnector", "kv_both", "w-1")
    assert alone["kv_connector_extra_config"]["spec_name"] == "HostSpec"
    extra = deep["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["spec_module_path"]) == ("TierSpec", kv_tiers.MODULE)
    disk, remote = extra["secondary_tiers"]
    assert (disk["type"], disk["root_dir"]) == ("DiskTier", "/kv")
    assert (remote["type"], remote["prefix"], remote["locality"]) == ("obj", "a/b", "REMOTE")
    assert remote["store_config"] == {"bucket": "store", "endpoint_override": "http://h:9000", "scheme": "http"}


def test_each_rank_has_its_share() -> None:
    assert settings(KvbmConfig(cpu_cache_gb=4.0), dp=2)["tiers"]["host"]["bytes"] == 2 * 10**9


def test_the_object_tier_has_the_telemetry_that_it_needs() -> None:
    assert started(group(kvbm={"remote": True})).env["NIXL_TELEMETRY_ENABLE"] == "y"
    assert "NIXL_TELEMETRY_ENABLE" not in started(group()).env


def test_only_our_door_is_on_the_path_of_the_engine() -> None:
    folder = Path(started(group()).env["PYTHONPATH"])
    assert [path.name for path in folder.iterdir() if path.suffix] == [f"{kv_tiers.MODULE}.py"]


# ---------------------------------------------------------------- where objects lie


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://kvs", ObjectStore(bucket="kvs")),
        (
            "s3://kvs/a/b/?endpoint=http://127.0.0.1:9000&region=eu-1",
            ObjectStore(bucket="kvs", prefix="a/b", endpoint="http://127.0.0.1:9000", region="eu-1"),
        ),
    ],
)
def test_an_object_store_is_an_address(text: str, expected: ObjectStore) -> None:
    assert ObjectStore.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://kvs", "is not s3://BUCKET"),
        ("s3://kvs?secret_key=x", "secret_key is not known; there are endpoint and region"),
        ("s3://ab", "bucket 'ab' is too short"),
    ],
)
def test_another_address_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ObjectStore.parse(text)


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as refused:
        ObjectStore.parse("s3://me:hidden@kvs")
    assert "hidden" not in str(refused.value)


def test_no_key_is_among_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    start = started(group(kvbm={"remote": True}))
    assert "hidden" not in json.dumps([start.argv, dict(start.env), dict(start.files)])
    assert "hidden" not in json.dumps(connector(group(kvbm={"remote": True}), PLACES, "w"))
