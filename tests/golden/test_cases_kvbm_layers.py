"""Layers that are computed as they come: the worked examples N1 to N5 as whole runs, and what wins nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cases_kvbm import DEVICE, TIER, faults, hits, rows
from toy import toy

from policies.errors import CapabilityError, ConfigError
from policies.kvbm.onboard import intra_layer_s

BLOCK_BYTES = 8_388_608
EACH = "workers.kvbm.load_layers=each"
OF_32 = (EACH, "workers.model=llama-3.1-8b")
"""Layer by layer, with a model of 32 layers."""


def loads_in(ms: float, *, blocks: int = 2) -> str:
    """A rate at which `blocks` come up in so many ms."""
    return f"workers.kvbm.cpu_gb_per_s={blocks * BLOCK_BYTES / ms / 1e6!r}"


def comes_back(tmp_path: Path, compute_tokens: int, *others: tuple[float, int, list[int], int]) -> Path:
    """A prompt of two blocks and so many tokens; two that push it down; the first one again at 3 s; more."""
    isl = 128 + compute_tokens
    mine, one, two = [[base + n for n in range(-(-isl // 64))] for base in (1, 101, 201)]
    return rows(tmp_path, (0, isl, mine, 1), (1000, isl, one, 1), (2000, isl, two, 1), (3000, isl, mine, 1), *others)


def one_layer(tmp_path: Path) -> Path:
    """The shape of a model that has a single layer."""
    path = tmp_path / "config.json"
    shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    path.write_text(json.dumps(shape))
    return path


def after_loading(tmp_path: Path, load_ms: float, compute_ms: int, *sets: str, **options: object) -> float:
    """Time to the first token of the prompt that came back, in ms."""
    trace = comes_back(tmp_path, compute_ms)
    room = ("workers.kvbm.cpu_cache_tokens=100000", f"workers.engine.kv_blocks={-(-(128 + compute_ms) // 64) + 1}")
    run = toy(trace, tmp_path / "run", *TIER, *room, loads_in(load_ms), *sets, key_tokens=64, **options)
    assert hits(run)["g2"] == 2
    ttft_ms = run.requests("ttft_s")[3] * 1e3
    assert isinstance(ttft_ms, float)
    return ttft_ms


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("case", "load_ms", "compute_ms", "inter_ms", "intra_ms"),
    [("N1", 32, 32, 64, 33), ("N2", 32, 64, 96, 65), ("N3", 64, 32, 96, 65), ("N4", 1, 2, 3, 2.03125)],
)
def test_n1_to_n4(
    case: str, load_ms: float, compute_ms: int, inter_ms: float, intra_ms: float, leap: bool, tmp_path: Path
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "each").mkdir()
    found = after_loading(tmp_path / "all", load_ms, compute_ms, leap=leap)
    assert found == pytest.approx(inter_ms, abs=3e-6), case
    found = after_loading(tmp_path / "each", load_ms, compute_ms, *OF_32, leap=leap)
    assert found == pytest.approx(intra_ms, abs=3e-6), case


def test_n5_one_layer_wins_nothing(tmp_path: Path) -> None:
    assert after_loading(tmp_path, 10, 10, EACH, f"workers.model={one_layer(tmp_path)}") == pytest.approx(20, abs=3e-6)


@pytest.mark.parametrize(
    "engine",
    [
        ["workers.engine.exclusive_prefill=false", "workers.engine.chunked_prefill=true"],
        ["workers.engine.kind=sglang"],
        ["workers.engine.kind=trtllm", "workers.engine.capacity_policy=guaranteed_no_evict"],
        ["workers.engine.kind=trtllm", "workers.engine.capacity_policy=max_utilization"],
        ["workers.engine.nextn=1", "workers.engine.accept_rates=0.5", "workers.engine.exclusive_prefill=false"],
    ],
    ids=["vllm in chunks", "sglang", "trtllm no evict", "trtllm max use", "draft tokens"],
)
def test_n3_on_other_engines(engine: list[str], tmp_path: Path) -> None:
    sets = [*engine, "allow_no_effect=true"]
    assert after_loading(tmp_path, 64, 32, *OF_32, *sets, serial=False) == pytest.approx(65, abs=3e-6)


MEETS = (*TIER, *OF_32, "workers.kvbm.cpu_cache_tokens=100000", loads_in(32), "workers.engine.kv_blocks=9")
"""Two blocks come up in 32 ms; a pool that holds two prompts of four blocks."""


def meeting(tmp_path: Path, *meet: tuple[float, int, list[int], int]) -> Path:
    """A and B of two blocks and 64 tokens, pushed down by three others; then whoever meets at 9 s or later."""
    others = [(1000 * n, 192, [100 * n, 100 * n + 1, 100 * n + 2], 1) for n in range(2, 6)]
    return rows(tmp_path, (0, 192, A, 1), (1000, 192, B, 1), *others, *meet)


A, B, SHORT = [1, 2, 3], [11, 12, 13], [91]
WINS_NOTHING_MS, WINS_ALL_MS = 32 + 64, 1 + 64


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("meet", "ttft_ms"),
    [
        ([], WINS_ALL_MS),
        # it passes A, whose load begins, and takes the engine up to 9020: 12 ms are left
        ([(9000, 20, SHORT, 1)], WINS_NOTHING_MS - 12),
        # the first layer comes at 9001; from 9021 to 9030 others compute: 9001..9021 and 9030..9032
        ([(9021, 9, SHORT, 1)], WINS_NOTHING_MS - 22),
        # it is there when the load lands, and goes first: 9001..9025, then the load waits for the end of the step
        ([(9025, 20, SHORT, 1)], 45 + 64 - 24),
    ],
    ids=["idle", "busy at first", "busy between", "busy at the end"],
)
def test_only_time_in_which_the_engine_has_nothing_to_do_is_won(
    meet: list[tuple[float, int, list[int], int]], ttft_ms: float, leap: bool, tmp_path: Path
) -> None:
    run = toy(
        meeting(tmp_path, (9000, 192, A, 1), *meet), tmp_path / "run", *MEETS, key_tokens=64, serial=False, leap=leap
    )
    assert run.requests("ttft_s")[6] * 1e3 == pytest.approx(ttft_ms, abs=3e-6)


@pytest.mark.parametrize("leap", [True, False])
def test_a_decode_is_work_like_any_other(leap: bool, tmp_path: Path) -> None:
    """Somebody decodes all the time: no step is shorter than its work, and no decode waits for a layer."""
    trace = meeting(tmp_path, (8000, 20, SHORT, 300), (9000, 192, A, 1))
    plain = [text for text in MEETS if text not in OF_32]
    runs = [
        toy(trace, tmp_path / name, *sets, key_tokens=64, serial=False, leap=leap)
        for name, sets in (("all", plain), ("each", MEETS))
    ]
    assert runs[0].requests("ttft_s") == runs[1].requests("ttft_s")
    assert runs[0].requests("last_token_s") == runs[1].requests("last_token_s")


@pytest.mark.parametrize("leap", [True, False])
def test_an_idle_second_is_given_away_once(leap: bool, tmp_path: Path) -> None:
    """A and B come up one after the other over the same link, 32 ms each; 1 ms a layer, 2 ms to compute it.

    A is computed from 9001 to 9032 and has 33 ms left. Of B, whose first layer comes at 9033, nothing can be computed
    before A has ended at 9065: when B has landed at 9064 the engine was not idle since."""
    trace = meeting(tmp_path, (9000, 192, A, 1), (9000, 192, B, 1))
    run = toy(trace, tmp_path / "run", *MEETS, key_tokens=64, serial=False, leap=leap)
    assert run.requests("ttft_s")[6] * 1e3 == pytest.approx(65, abs=3e-6)
    assert run.requests("ttft_s")[7] * 1e3 == pytest.approx(65 + 64, abs=3e-6)
    overlap = run.report.meta.kvbm["layers"]
    assert overlap == {"loads": 1, "overlap_s": pytest.approx(0.031)}


def test_what_comes_damaged_wins_nothing(tmp_path: Path) -> None:
    broken = faults(tmp_path, 'kind = "tier_corrupt"\ntier = "g2"\nrate = 1.0\nat_ms = 8000')
    run = toy(meeting(tmp_path, (9000, 192, A, 1)), tmp_path / "run", *MEETS, broken, key_tokens=64)
    assert run.ms("ttft_s")[6] == 32 + 192


def test_the_time_before_the_first_byte_is_nobodys(tmp_path: Path) -> None:
    """Layers come evenly while bytes move: the latency of a tier is waited for."""
    sets = (*MEETS, "workers.kvbm.cpu_latency_s=0.05")
    run = toy(meeting(tmp_path, (9000, 192, A, 1)), tmp_path / "run", *sets, key_tokens=64)
    assert run.requests("ttft_s")[6] * 1e3 == pytest.approx(50 + 1e3 * intra_layer_s(0.032, 0.064, 32), abs=3e-6)


def test_layers_come_on_the_last_hop(tmp_path: Path) -> None:
    """From disk through host memory: all is there before any of it goes up to the device."""
    trace, disk = meeting(tmp_path, (9000, 192, A, 1)), ("workers.kvbm.disk_cache_tokens=100000",)
    sets = (*DEVICE, *OF_32, *disk, "workers.engine.kv_blocks=9", "workers.kvbm.block_bytes=8388608", loads_in(32))
    sets += ("workers.kvbm.disk_offload=presence", f"workers.kvbm.disk_gb_per_s={2 * BLOCK_BYTES / 10e6!r}")
    sets += ("workers.kvbm.disk_latency_s=0", "workers.kvbm.disk_path=bounce")
    run = toy(trace, tmp_path / "run", *sets, key_tokens=64)
    assert hits(run)["g3"] == 2
    assert run.requests("ttft_s")[6] * 1e3 == pytest.approx(10 + 65, abs=3e-6)


def test_stages_of_a_pipeline_load_side_by_side(tmp_path: Path) -> None:
    """Two stages of 16 layers, 2 ms to load one; 64 ms for all 32 layers. The second stage has its layers long before
    it needs them, so the first one decides: 15 layers of 2 ms are computed while the last one comes."""
    sets = (*MEETS, "workers.pp=2")
    run = toy(meeting(tmp_path, (9000, 192, A, 1)), tmp_path / "run", *sets, key_tokens=64)
    assert run.requests("ttft_s")[6] * 1e3 == pytest.approx(32 + 64 - 30, abs=3e-6)


def test_layers_need_a_tier_and_one_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvbm\.load_layers has no effect: there is no tier"):
        toy("c20_tiers.jsonl", tmp_path / "run", *DEVICE, EACH, key_tokens=64)
    with pytest.raises(CapabilityError, match=r"kvbm\.load_layers = each: the group has 2 ranks"):
        toy("c20_tiers.jsonl", tmp_path / "run", *TIER, *OF_32, "workers.dp=2", key_tokens=64)
    with pytest.raises(ConfigError, match=r"workers\.pool\.model has no effect"):
        toy("c20_tiers.jsonl", tmp_path / "run", *TIER, "workers.model=llama-3.1-8b", key_tokens=64)


def test_the_model_counts_where_it_says_how_large_a_block_is(tmp_path: Path) -> None:
    sets = [text for text in TIER if "block_bytes" not in text]
    half = run_bytes(tmp_path / "fp8", *sets, "workers.kv=fp8")
    assert 2 * half == run_bytes(tmp_path / "bf16", *sets) > 0


def run_bytes(out: Path, *sets: str) -> int:
    """Bytes that come up in C20 with blocks as large as the model makes them."""
    moved = toy("c20_tiers.jsonl", out, *sets, key_tokens=64).report.meta.moved_bytes["tier_loads"]
    assert isinstance(moved, int)
    return moved
