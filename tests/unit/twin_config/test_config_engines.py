"""Keys of engine kinds and engine options: their own defaults, their limits, and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.cluster import build_groups
from twin.config_lists import accept_rates, graph_sizes
from twin.config_read import load
from twin.engine.settings import SglangSettings, Speculation
from twin.engine.trtllm import TrtllmSettings


def test_trtllm_has_blocks_of_32_unless_told_otherwise() -> None:
    assert load(sets=["workers.engine=trtllm"]).workers[0].engine.block_size == 32
    assert load(sets=["workers.engine=TRTLLM", "workers.engine.block_size=64"]).workers[0].engine.block_size == 64
    assert load().workers[0].engine.block_size == 16


def test_sglang_has_pages_of_one_token_unless_told_otherwise() -> None:
    assert load(sets=["workers.engine=sglang"]).workers[0].engine.block_size == 1
    assert load(sets=["workers.engine=sglang", "workers.engine.block_size=16"]).workers[0].engine.block_size == 16


def test_sglang_settings_reach_the_engine() -> None:
    sets = ["schedule_policy=lpm", "chunked_prefill_size=512", "clip_max_new_tokens=7", "schedule_conservativeness=0.5"]
    config = load(sets=["workers.engine=sglang", *[f"workers.engine.{pair}" for pair in sets]])
    settings = build_groups(config)[0].settings
    assert isinstance(settings, SglangSettings)
    assert (settings.schedule_policy, settings.chunked_prefill_size, settings.clip_max_new_tokens) == ("lpm", 512, 7)
    assert settings.schedule_conservativeness == 0.5
    assert settings.blocks > 100_000  # a pool in tokens
    assert not settings.free_recompute


def test_sglang_takes_a_chunk_to_be_for_all_ranks_and_dares_more_with_several() -> None:
    settings = build_groups(load(sets=["workers.engine=sglang", "workers.dp=4"]))[0].settings
    assert isinstance(settings, SglangSettings)
    assert (settings.ranks, settings.chunked_prefill_size, settings.max_num_batched_tokens) == (4, 2048, 2048)
    assert settings.schedule_conservativeness == pytest.approx(0.3)
    sets = ["workers.engine=sglang", "workers.dp=4", "workers.engine.block_size=64"]
    with pytest.raises(ConfigError, match="make it 256 or more"):
        build_groups(load(sets=[*sets, "workers.engine.chunked_prefill_size=128"]))


def test_sglang_with_drafts_and_a_host_tier_on_each_rank() -> None:
    sets = ["dp=2", "engine.nextn=2", "engine.host_blocks=1000", "engine.host_offload=on_store", "seed=5"]
    config = load(sets=["workers.engine=sglang", "seed=5", *[f"workers.{pair}" for pair in sets[:-1]]])
    settings = build_groups(config)[0].settings
    assert settings.speculation == Speculation(accept_rates=(0.85, 0.3), seed=5)
    assert settings.host is not None
    assert (settings.host.blocks, settings.host.trigger, settings.host.overlap) == (1000, "on_store", True)


def test_trtllm_settings_reach_the_engine() -> None:
    config = load(sets=["workers.engine=trtllm", "workers.engine.capacity_policy=max-utilization"])
    settings = build_groups(config)[0].settings
    assert isinstance(settings, TrtllmSettings)
    assert settings.capacity_policy == "max_utilization"
    assert settings.preemption == "lifo"


def test_a_pool_from_memory_is_dealt_out_to_the_ranks() -> None:
    one, two = (build_groups(load(sets=[f"workers.dp={dp}", "workers.tp=2"]))[0].settings for dp in (1, 2))
    assert (one.ranks, two.ranks) == (1, 2)
    assert two.blocks == pytest.approx(one.blocks, rel=0.01)


def test_drafts_are_padded_with_chance_0_and_cut_to_their_number() -> None:
    for nextn, rates in ((1, (0.85,)), (2, (0.85, 0.3)), (4, (0.85, 0.3, 0.0, 0.0))):
        settings = build_groups(load(sets=[f"workers.engine.nextn={nextn}", "seed=5"]))[0].settings
        assert settings.speculation == Speculation(accept_rates=rates, seed=5)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["workers.engine.capacity_policy=max_utilization"], "belongs to trtllm"),
        (["workers.engine=trtllm", "workers.engine.preemption=fifo"], "preempts nobody"),
        (["workers.engine=trtllm", "workers.engine.exclusive_prefill=true"], "beside decodes"),
        (["workers.engine.schedule_policy=lpm"], "belongs to sglang"),
        (["workers.engine=trtllm", "workers.engine.chunked_prefill_size=512"], "belongs to sglang"),
        (["workers.engine=sglang", "workers.engine.max_num_batched_tokens=512"], "chunked_prefill_size"),
        (["workers.engine=sglang", "workers.engine.preemption=fifo"], "retracts"),
        (["workers.engine=sglang", "workers.dp=2", "workers.engine.prefill_schedule_interval=4"], "instead"),
        (["workers.engine=sglang", "workers.engine.host_load_overlap=false"], "no host tier"),
        (["workers.engine.host_blocks=100", "workers.engine.host_load_overlap=false"], "belongs to sglang"),
        (["workers.engine=sglang", "workers.engine.host_blocks=100", "workers.links.host=pcie"], "within the step"),
        (["workers.engine.accept_rates=0.5"], "no draft tokens"),
        (["workers.engine.eager_factor=3"], "cuda_graph_sizes"),
        (["workers.engine.prefill_schedule_interval=4"], "one rank"),
        (["workers.engine.nextn=2", "workers.engine.exclusive_prefill=true"], "beside decodes"),
        (["workers.engine.recv_interval=10"], "belongs to sglang"),
        (["workers.engine=sglang", "workers.dp=2", "workers.engine.recv_interval=10"], "every step looks who has come"),
        (["workers.engine=sglang", "workers.engine.batch_wait_iters=5"], "belongs to trtllm"),
        (["workers.engine=trtllm", "workers.engine.batch_wait_iters=5"], "any prompt is enough"),
        (["workers.engine=trtllm", "workers.engine.batch_wait_ratio=0.5"], "prompts do not wait"),
        (
            ["workers.engine=trtllm", "workers.dp=2", "workers.engine.batch_wait_iters=5"],
            "dp_balance_wait_iters instead",
        ),
        (["workers.engine=trtllm", "workers.engine.dp_balance_wait_iters=5"], "one rank"),
        (["workers.engine=trtllm", "workers.dp=2", "workers.engine.dp_balance_wait_iters=1"], "in every step"),
        (["workers.dp=2", "workers.engine.dp_balance_wait_iters=5"], "belongs to trtllm"),
        (["workers.latency=table", "workers.latency.overlap_scheduling=true"], "belongs to the roofline"),
        (["workers.engine.kv_blocks=100", "workers.latency=polynomial", "workers.pp=2"], "no hardware"),
        (["workers.engine=trtllm", "workers.engine.host_blocks=100"], "one rank and without draft tokens"),
        (["workers.engine.nextn=1", "workers.engine.host_blocks=100"], "one rank and without draft tokens"),
    ],
)
def test_an_option_without_a_part_to_play_is_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="has no effect") as refusal:
        load(sets=sets)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["workers.engine.nextn=6"], "5 or less"),
        (["workers.engine.nextn=2", "workers.engine.accept_rates=0.5,x"], "x must be a number from 0 to 1"),
        (["workers.engine.nextn=2", "workers.engine.accept_rates=1.5"], "1.5 must be a number from 0 to 1"),
        (["workers.engine.nextn=2", "workers.engine.accept_rates=nan"], "nan must be a number from 0 to 1"),
        (["workers.engine.cuda_graph_sizes=1,,4"], "nothing must be a batch size"),
        (["workers.engine.cuda_graph_sizes=8-4/2"], "8-4/2 must be a batch size"),
        (["workers.engine.cuda_graph_sizes=0"], "0 must be a batch size"),
        (["workers.engine.cuda_graph_sizes=8-64/0"], "8-64/0 must be a batch size"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(sets=sets)
    text = str(refusal.value)
    assert words in text
    assert text.startswith("--set: workers.pool.engine.") or "workers.engine" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("role", "words"), [("prefill", "prefill workers do not decode"), ("decode", "all prompts come by hand-off")]
)
def test_prompts_do_not_wait_where_there_are_none_beside_decodes(role: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "legs.toml"
    other = "decode" if role == "prefill" else "prefill"
    knob = "[workers.engine]\nkind = 'trtllm'\nbatch_wait_iters = 10\nbatch_wait_ratio = 0.5\n"
    file.write_text(
        f"[[workers]]\nname = 'one'\nrole = '{role}'\n{knob}[[workers]]\nname = 'two'\nrole = '{other}'\n"
        "[workers.engine]\nkind = 'trtllm'\n"
    )
    with pytest.raises(ConfigError, match=words):
        load(file)
    if role == "decode":  # where prompts may stay on a decode worker, they wait there
        load(file, sets=["disaggregation.conditional=isl", "router.mode=kv"])


def test_waits_reach_the_engines() -> None:
    looks = build_groups(load(sets=["workers.engine=sglang", "workers.engine.recv_interval=10"]))[0].settings
    assert isinstance(looks, SglangSettings)
    assert looks.recv_interval == 10
    gathers = ["workers.engine=trtllm", "workers.engine.batch_wait_iters=20", "workers.engine.batch_wait_ratio=0.5"]
    settings = build_groups(load(sets=gathers))[0].settings
    assert isinstance(settings, TrtllmSettings)
    assert (settings.batch_wait_iters, settings.batch_wait_ratio) == (20, 0.5)
    ranks = ["workers.engine=trtllm", "workers.dp=2", "workers.engine.dp_balance_wait_iters=50"]
    assert build_groups(load(sets=ranks))[0].settings.balance_wait == 50


def test_lists_are_read_as_written() -> None:
    assert accept_rates("1, 0.5,0", "here") == (1.0, 0.5, 0.0)
    assert graph_sizes("1,2,4, 8-32/8,32", "here") == (1, 2, 4, 8, 16, 24, 32)
