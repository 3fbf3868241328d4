"""Ways to serve: how they are written, which of them finalists are simulated under, and what they are worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_builders import agg, disagg, estimated, room

from aiconfig.candidate import Candidate
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import rejection
from aiconfig.finalists import finals, one_after_another
from aiconfig.gain_text import gain_lines
from aiconfig.gains import Gain, gains_of
from aiconfig.judge import judge
from aiconfig.outcome import Scored
from aiconfig.physics import Physics
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest, search_request
from aiconfig.result import result_of
from aiconfig.scoring import Scoring
from aiconfig.search import search
from aiconfig.serving import Serving, router_choice, size_bytes, size_text
from aiconfig.variants import variants
from aiconfig.workload import Workload
from policies.errors import ConfigError
from reports.sla import parse_sla
from twin.perf.memory import GIB

TRACED = Workload(isl=1024, osl=256, prefix_tokens=512, trace=Path("mine.parquet"), requests=100)
"""Prompts of a trace that begin alike; nothing reads it here."""
LOAD = Load(users=8)


# ---------------------------------------------------------------- what people write


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("round_robin", "round-robin"),
        ("KV", "kv"),
        ("kv:router-temperature=.5", "kv:router_temperature=0.5"),
        ("kv:use_kv_events=false:router_temperature=0.50", "kv:router_temperature=0.5:use_kv_events=false"),
        ("kv:router_temperature=0", "kv"),
    ],
)
def test_a_router_is_written_in_one_way(text: str, meant: str) -> None:
    assert router_choice(text) == meant
    assert router_choice(meant) == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kvv", "did you mean 'kv'"),
        ("direct", "direct is not searched, it sends requests where they say themselves; take one of round-robin"),
        ("kv:temperature=1", r"key of \[router\] 'temperature' is not known"),
        ("kv:router_temperature=-1", "router_temperature = .*must be 0 or more"),
        ("kv:router_temperature", "write MODE:KEY=VALUE"),
        ("kv:mode=random", "'mode' is not known"),
    ],
)
def test_a_router_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        router_choice(text)


def test_sizes() -> None:
    assert [size_bytes(text, "--host-kv") for text in ("0", "off", "64GiB", "1.5 TB", "500gb")] == [
        0, 0, 64 * 2**30, 1_500_000_000_000, 500 * 10**9,
    ]  # fmt: skip
    assert [size_text(size) for size in (0, 64 * 2**30, 1_500_000_000_000, 7)] == ["0 B", "64 GiB", "1500 GB", "7 B"]
    for text in ("64", "GiB", "-1GB", "64XB", "1000B"):
        with pytest.raises(ConfigError, match=f"--host-kv {text}: "):
            size_bytes(text, "--host-kv")


def test_a_request_names_every_combination_the_first_of_each_first() -> None:
    request = search_request({"routers": ("kv", "random"), "host_kv": (0, 2**30)})
    assert [serving.text for serving in request.servings] == [
        "kv router", "kv router, 1 GiB host KV", "random router", "random router, 1 GiB host KV",
    ]  # fmt: skip
    assert "host_kv = none, 1 GiB (given)" in request.lines()
    for given, told in (
        ({"host_kv": (0, 0)}, "--host-kv 0 B,0 B: name at least one, each once"),
        ({"host_kv": (2**30,), "disk_kv": (2**30,)}, "--disk-kv 1 GiB: is not larger than the host tier"),
        ({"routers": ("round_robin",)}, "is written round-robin"),
    ):
        with pytest.raises(ConfigError, match=told):
            search_request(given)


# ---------------------------------------------------------------- who is simulated how


def asked(plain: Candidate, workload: Workload = TRACED, **given: object) -> tuple[list[str], dict[str, str]]:
    """(ways to serve that are played; reasons of the others) for one finalist."""
    found = variants(search_request({"workload": workload, **given}), plain, LOAD)
    assert all(one.reason == "no_effect" for one in found.left_out)
    return [one.serving.text for one in found.played], {one.name: one.detail for one in found.left_out}


PLAIN = "round-robin router, no KV tiers"


def test_two_workers_and_prompts_that_begin_alike_have_all() -> None:
    given = {"routers": ("round-robin", "kv"), "host_kv": (0, GIB)}
    played, left_out = asked(agg(replicas=2), **given)
    assert played == [PLAIN, "1 GiB host KV", "kv router", "kv router, 1 GiB host KV"]
    assert not left_out
    assert asked(disagg(1, 2), **given) == (played, {})


def test_a_router_with_one_worker_to_choose_is_not_played() -> None:
    for one in (agg(), disagg()):
        played, left_out = asked(one, routers=("round-robin", "kv", "least-loaded"), host_kv=(0, GIB))
        assert played == [PLAIN, "1 GiB host KV"]
        assert len(left_out) == 4
        assert all("there is one worker" in why for why in left_out.values())
        assert all(name.startswith(f"{one.name}-via_") for name in left_out)


def test_where_no_prompts_begin_alike_neither_kv_routing_nor_tiers_are_played() -> None:
    apart = Workload(isl=1024, osl=256)
    played, left_out = asked(
        agg(replicas=2), apart, routers=("round-robin", "least-loaded", "kv"), host_kv=(0, GIB), disk_kv=(0, 2 * GIB)
    )
    assert played == [PLAIN, "least-loaded router"]
    whys = set(left_out.values())
    assert any("could only balance load, as least-loaded does" in why for why in whys)
    assert any("nothing that went down is asked for again" in why for why in whys)


def test_one_prefix_that_all_prompts_share_never_goes_down() -> None:
    played, left_out = asked(agg(replicas=2), Workload(isl=1024, osl=256, prefix_tokens=512), host_kv=(0, GIB))
    assert played == [PLAIN]
    assert set(left_out.values()) == {"all prompts share one prefix, which never leaves the devices"}


def test_whoever_is_asked_for_alone_is_played_whatever_the_effect() -> None:
    assert asked(agg(), routers=("kv",))[0] == ["kv router"]
    assert asked(agg(replicas=2), Workload(isl=64, osl=8), routers=("kv",), host_kv=(GIB,))[0] == [
        "kv router, 1 GiB host KV"
    ]


def test_a_key_that_is_set_in_vain_is_named_as_the_twin_names_it() -> None:
    played, left_out = asked(agg(replicas=2), routers=("round-robin", "kv:host_cache_hit_weight=0.5"), host_kv=(0, GIB))
    assert played == [PLAIN, "1 GiB host KV", "kv:host_cache_hit_weight=0.5 router, 1 GiB host KV"]
    (why,) = left_out.values()
    assert why.startswith("router.host_cache_hit_weight: no worker has host memory")


def test_a_tier_is_held_against_the_memory_of_hosts_where_that_is_known(tmp_path: Path) -> None:
    table = tmp_path / "gpus.toml"
    table.write_text("[h100_sxm]\nhost_gb = 100\n", encoding="utf-8")
    request = SearchRequest(workload=TRACED, host_kv=(0, 150 * 10**9), hardware=table)
    found = variants(request, agg(), LOAD)
    assert [one.serving.text for one in found.played] == [PLAIN]
    (too_large,) = found.left_out
    assert (too_large.reason, too_large.unit) == ("host_memory", "GiB")
    assert (too_large.needs, too_large.has) == (150e9 / GIB, 100e9 / GIB)
    assert len(variants(request, agg(tp=2), LOAD).played) == 2, "two GPUs have 200 GB of it"
    served = replace(agg(), serving=Serving(host_kv_bytes=150 * 10**9))
    refused = rejection(served, Physics(hardware=table))
    assert refused is not None
    assert refused.reason == "host_memory"
    assert rejection(served) is None, "of these hosts nothing is known"


def test_finalists_are_multiplied_and_where_routers_are_tried_somebody_has_workers_to_choose() -> None:
    request = search_request(
        {"gpus": 2, "workload": TRACED, "modes": ("agg",), "routers": ("round-robin", "kv"), "load": LOAD, "top": 1,
         "kv": ("bf16",), "weights": ("bf16",)}
    )  # fmt: skip
    scoring = Scoring(request)
    one, two, wide = (
        replace(scored(each), score=score) for each, score in ((agg(), 2.0), (agg(replicas=2), 1.0), (agg(tp=2), 3.0))
    )
    runs: list[str] = []

    def simulate(candidate: Candidate, workload: Workload, load: Load) -> Estimate:
        runs.append(candidate.name)
        return estimated(candidate, load=load, output_tokens_per_s=120.0 if candidate.serving.mode == "kv" else 100.0)

    played, others, reasons = finals(scoring, [wide, one, two], one_after_another(simulate))
    assert f"{two.candidate.name}-via_kv" in runs
    assert {wide.candidate.name, two.candidate.name} <= set(runs)
    assert played[0].candidate.name == f"{two.candidate.name}-via_kv"
    assert played[0].score == 60.0
    assert {why.reason for why in reasons if "-via_kv" in why.name} == {"no_effect"}
    assert {one.candidate.serving for one in others} <= {Serving()}


# ---------------------------------------------------------------- what they are worth


def scored(candidate: Candidate, **figures: object) -> Scored:
    one = estimated(candidate, **figures)
    judgement = judge(one, None)
    return Scored(
        candidate=candidate, fit=room(replace(candidate, serving=Serving())), load=one.load, estimate=one, closed=one,
        judgement=judgement, screening=judgement, score=one.output_tokens_per_s, runs=1,
    )  # fmt: skip


def test_a_gain_compares_the_same_workers() -> None:
    request = SearchRequest(routers=("round-robin", "kv", "random"), gpus=2, sla=parse_sla("ttft=1s"))
    base, small = agg(replicas=2), agg()
    served = replace(base, serving=Serving(router="kv"))
    figures = {"ttft": {"p95": 0.4}, "tpot": {"p95": 0.02}}
    found = [
        scored(
            served, output_tokens_per_s=112.0, hit_share=0.5, load=Load(users=9), ttft={"p95": 0.3}, tpot={"p95": 0.02}
        ),
        scored(small, output_tokens_per_s=110.0, **figures),
        scored(base, output_tokens_per_s=100.0, hit_share=0.25, load=Load(users=8), **figures),
        scored(replace(small, serving=Serving(router="random"))),
    ]
    gains = gains_of(request, found)
    assert gains[0] == Gain(serving="kv router", name=served.name, against=base.name, change=pytest.approx(0.12))
    head, first, second = gain_lines(request, gains, found)
    assert head == f"served otherwise, against the same workers with {PLAIN}, each at its load:"
    assert first == (
        "  kv router      +12.0 % tok/s/GPU, TTFT p95 -25.0 %, TPOT p95 +0.0 %, hit rate 50.0 % instead of 25.0 %; "
        "vllm 2xTP1 bf16 at 9 users instead of 8 users"
    )
    assert second.startswith("  random router  -9.1 % tok/s/GPU, TTFT p95 not known")


def test_a_load_that_only_one_way_to_serve_carries() -> None:
    request = SearchRequest(routers=("round-robin", "kv"))
    served = replace(agg(replicas=2), serving=Serving(router="kv"))
    found, refused = [scored(served)], Rejection(name=agg(replicas=2).name, reason="unstable")
    (gain,) = gains_of(request, found, [refused])
    assert (gain.change, gain.refused) == (None, "unstable")
    assert list(gain_lines(request, [gain], found))[1].endswith("without it the queue grows at this load")
    assert gains_of(request, found) == (), "of the plain one nothing is known"


def test_the_closed_form_alone_says_that_it_cannot_tell() -> None:
    outcome = search(search_request({"gpus": 1, "routers": ("round-robin", "kv"), "sla": parse_sla("tpot=20ms@mean")}))
    assert any("cannot tell ways to serve apart" in note for note in outcome.notes)
    assert result_of(outcome).gains == ()


def test_workers_that_only_decode_have_no_tiers() -> None:
    serving = Serving(host_kv_bytes=GIB)
    assert serving.kvbm_config("prefill").cpu_cache_gb == GIB / 1e9
    assert not serving.kvbm_config("decode").has_tiers
    assert (serving.paths("mixed").host, serving.paths("decode").host) == ("pcie", None)
