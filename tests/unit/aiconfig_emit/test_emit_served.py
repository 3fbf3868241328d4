"""Ways to serve in emitted files: an engine's own host tier, Dynamo's frontend, and a note for what has no flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from emit_builders import agg, disagg, plan

from aiconfig.candidate import Candidate
from aiconfig.emit.files import emit, write
from aiconfig.emit.reading import import_files
from aiconfig.emit.worker import worker_items
from aiconfig.serving import GB, Serving

HOST = Serving(host_kv_bytes=64 * GB)


def served(one: Candidate, serving: Serving) -> Candidate:
    return replace(one, serving=serving)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("vllm", {"host_kv_backend": "native", "host_kv_gib": 64 * GB / 2**30}),
        ("sglang", {"host_kv": True, "host_kv_gb": 32}),
        ("trtllm", {"host_kv_bytes": 32 * GB}),
    ],
)
def test_each_engine_has_its_own_host_tier_and_it_is_read_back(
    engine: str, settings: dict[str, object], tmp_path: Path
) -> None:
    one = served(agg(engine), HOST)  # TP 2: a GPU has half of it
    made = plan(one)
    items = {item.key: item.value for item in worker_items(made, one.pools[0])}
    assert {key: items[key] for key in settings} == settings
    assert not made.notices() or all("host memory" not in notice for notice in made.notices())
    write(emit(made, engine), tmp_path)
    assert import_files([tmp_path / "launch"]).candidate == one
    plain = {item.key for item in worker_items(plan(agg(engine)), agg(engine).pools[0])}
    assert plain == set(items) - set(settings)


def test_what_an_engine_has_no_flag_for_is_noted() -> None:
    (note,) = (text for text in plan(served(disagg("vllm"), HOST)).notices() if "host memory" in text)
    assert note.startswith("workers are to have 64 GB of host memory for KV, for which vllm")
    old = replace(plan(served(agg("vllm"), HOST)), engine_version="0.9.2")
    assert any("vllm 0.9.2 has no flag here" in text for text in old.notices())
    assert not any("host memory" in text for text in plan(served(disagg("sglang"), HOST)).notices())
    disk = plan(served(agg(), Serving(disk_kv_bytes=10**12)))
    assert any("1 TB of disk for KV" in text for text in disk.notices())


@pytest.mark.parametrize(
    ("router", "variables"),
    [
        ("round-robin", None),
        ("least-loaded", {"DYN_ROUTER_MODE": "least-loaded"}),
        (
            "kv:router_temperature=0.5:use_kv_events=false",
            {"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_TEMPERATURE": "0.5", "DYN_ROUTER_USE_KV_EVENTS": "false"},
        ),
        ("thunder", None),
    ],
)
def test_dynamo_s_frontend_is_told_the_mode(router: str, variables: dict[str, str] | None) -> None:
    made = plan(served(agg(), Serving(router=router)))
    (text,) = emit(made, "dynamo").values()
    frontend = list(yaml.safe_load_all(text))[-1]["spec"]["services"]["Frontend"]
    told = {entry["name"]: entry["value"] for entry in frontend["envs"]} if "envs" in frontend else None
    assert told == variables
    assert any(f"routed by {router}" in notice for notice in made.notices()) == (router != "round-robin")


@pytest.mark.parametrize(
    ("router", "policy"), [("round-robin", "round_robin"), ("kv", "cache_aware"), ("thunder", "round_robin")]
)
def test_routers_of_engines_get_their_nearest_policy(router: str, policy: str) -> None:
    made = plan(served(disagg("sglang"), Serving(router=router)))
    scripts = emit(made, "sglang")["launch/router.sh"]
    assert f"--policy {policy}" in scripts
    assert f"- {policy}" in emit(made, "k8s")["k8s/deployment.yaml"]
