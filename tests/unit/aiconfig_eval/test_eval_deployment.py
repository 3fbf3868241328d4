"""A candidate becomes a configuration that the twin takes without a word, and comes back from it unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate, pool, workload

from aiconfig.candidate import Candidate
from aiconfig.deployment import Setting, from_config, to_config, write_deployment
from aiconfig.engines import ENGINE
from aiconfig.estimate import Load
from aiconfig.physics import Physics
from aiconfig.serving import Serving
from policies.errors import ConfigError
from twin.config import Config, WorkerGroup
from twin.perf.layout import Layout

RANKS = Candidate(
    model="deepseek-v3",
    engine="sglang",
    pools=(
        pool("prefill", layout=Layout(tp=2, dp=4, ep=8), weights="fp8", gpu="h200_sxm", replicas=2),
        pool("decode", layout=Layout(tp=1, dp=8, ep=8), weights="fp8", gpu="h200_sxm", max_num_batched_tokens=4096),
    ),
    nextn=1,
)
SERVED = Serving(router="kv:router_temperature=0.5", host_kv_bytes=40 * 2**30, disk_kv_bytes=10**12)
ALL = [candidate(engine, mode, replicas=3, tp=2) for engine in ENGINE for mode in ("agg", "disagg")] + [RANKS]
ALL += [replace(one, serving=SERVED) for one in (ALL[0], ALL[3], RANKS)]


def _config(one: Candidate, tmp_path: Path, setting: Setting = Setting()) -> Config:  # noqa: B008
    return write_deployment(tmp_path, one, workload(), Load(users=3), setting).config


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_there_and_back(one: Candidate, tmp_path: Path) -> None:
    assert from_config(_config(one, tmp_path)) == one


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_is_written_is_what_was_made_and_nothing_is_without_effect(one: Candidate, tmp_path: Path) -> None:
    setting = Setting(sla="ttft=1s", usd_per_hour=2.5)
    read = _config(one, tmp_path, setting)
    made = to_config(one, workload(), Load(users=3), tmp_path / "workload.parquet", setting)
    assert read == made
    assert read.no_effect == ()
    assert {group.usd_per_hour for group in read.workers} == {2.5}


def test_sizes_are_those_of_a_rank(tmp_path: Path) -> None:
    prefill, decode = _config(RANKS, tmp_path).workers
    assert prefill.engine.chunked_prefill_size == 4 * 8192, "sglang's chunk is that of all ranks together"
    assert decode.engine.chunked_prefill_size == 8 * 4096
    assert prefill.engine.max_num_seqs == 256
    assert prefill.engine.gpu_memory_utilization == 0.88


def test_the_rows_are_found_beside_the_file(tmp_path: Path) -> None:
    path = write_deployment(tmp_path / "a", candidate(), workload(), Load(users=3)).path
    assert 'path = "workload.parquet"' in path.read_text(encoding="utf-8")


def test_a_users_table_of_gpus_is_kept(tmp_path: Path, root: Path) -> None:
    table = tmp_path / "gpus.toml"
    text = (root / "twin/perf/data/hardware.toml").read_text(encoding="utf-8")
    table.write_text(text, encoding="utf-8")
    config = _config(candidate(), tmp_path / "made", Setting(physics=Physics(hardware=table)))
    assert config.workers[0].latency.params["hardware"] == str(table)
    assert from_config(config) == candidate()


def test_a_closed_loop_and_a_rate(tmp_path: Path) -> None:
    closed = to_config(candidate(), workload(), Load(users=3), tmp_path / "t").trace
    assert (closed.arrivals, closed.concurrency, closed.rate_rps, closed.limit, closed.warmup) == (
        "closed",
        3,
        None,
        60,
        3,
    )
    rate = to_config(candidate(), workload(arrivals="poisson"), Load(rps=2.5), tmp_path / "t").trace
    assert (rate.arrivals, rate.concurrency, rate.rate_rps, rate.warmup) == ("recorded", None, 2.5, 10)
    traced = workload(arrivals="poisson", trace=tmp_path / "mine.csv")
    mine = to_config(candidate(), traced, Load(rps=2.5), tmp_path / "mine.csv").trace
    assert mine.arrivals == "poisson"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda group: replace(group, engine=replace(group.engine, kv_blocks=100)),
            r"workers\.pool\.engine\.kv_blocks = 100",
        ),
        (
            lambda group: replace(group, engine=replace(group.engine, block_size=32)),
            r"block_size = 32: a candidate cannot",
        ),
        (lambda group: replace(group, loras=("a",)), r"workers\.pool\.loras"),
        (lambda group: replace(group, latency=replace(group.latency, model="fixed")), r"workers\.pool\.latency\.model"),
        (
            lambda group: replace(group, latency=replace(group.latency, params={"e_bw": 0.5})),
            r"latency\.e_bw: a candidate has no single coefficients",
        ),
    ],
)
def test_what_no_candidate_can_say_is_named(change: Callable[[WorkerGroup], WorkerGroup], text: str) -> None:
    config = to_config(candidate(), workload(), Load(users=3), Path("rows.parquet"))
    with pytest.raises(ConfigError, match=text):
        from_config(replace(config, workers=(change(config.workers[0]),)))


def test_what_no_way_to_serve_can_say_is_named() -> None:
    config = to_config(replace(candidate(), serving=SERVED), workload(), Load(users=3), Path("rows.parquet"))
    group, router = config.workers[0], config.router
    tiers, queue = replace(group.kvbm, peers=True), replace(router.queue, prefill_busy_tokens=9)
    for changed, told in (
        (
            replace(config, workers=(replace(group, kvbm=tiers),)),
            r"workers\.pool\.kvbm\.peers = True: a candidate cannot",
        ),
        (replace(config, router=replace(router, queue=queue)), r"router\.queue\.prefill_busy_tokens = 9"),
        (replace(config, router=replace(router, mode="direct")), "direct is not searched"),
    ):
        with pytest.raises(ConfigError, match=told):
            from_config(changed)


def test_pools_that_differ_in_what_a_candidate_has_once_are_refused() -> None:
    config = to_config(candidate("vllm", "disagg"), workload(), Load(users=3), Path("rows.parquet"))
    prefill, decode = config.workers
    other = replace(decode, model="llama-3.1-70b")
    with pytest.raises(
        ConfigError, match=r"workers\.decode\.model = llama-3\.1-70b, and llama-3\.1-8b in group prefill"
    ):
        from_config(replace(config, workers=(prefill, other)))
    with pytest.raises(ConfigError, match="roles prefill"):
        from_config(replace(config, workers=(prefill,)))
    with pytest.raises(ConfigError, match=r"disaggregation\.first_token"):
        from_config(replace(config, disaggregation=replace(config.disaggregation, first_token="prefill")))


def test_the_twins_own_defaults_are_a_candidate() -> None:
    assert from_config(Config()).name == "vllm-agg-4xtp4-h100_sxm-fp8-kvbf16-b256-t8192"
