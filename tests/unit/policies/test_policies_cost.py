"""The cost formula: examples K1 to K16, term by term, and the batch form against the single one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import router_settings

from policies.router.cost import Load, Terms, Weights, costs, taint_factor, terms, weights

PLAIN = weights(router_settings("kv"))


def cost(isl: int, bs: int, load: Load, w: Weights = PLAIN, least: int = 0) -> float:
    return terms(w, isl, bs, load, least).cost_blocks


def k2(w: Weights, **changes: int) -> float:
    return cost(640, 64, Load(0, 22, device_blocks=8, **changes), w)


def test_k1_idle_worker() -> None:
    assert terms(PLAIN, 640, 64, Load(0, 10), 0) == Terms(10.0, 0.0, 10, 0.0, 20.0)


def test_k2_and_k3_overlap() -> None:
    assert k2(PLAIN) == 24
    assert cost(640, 64, Load(0, 15, device_blocks=4)) == 21


def test_k4_open_prefill() -> None:
    assert cost(640, 64, Load(640, 10, device_blocks=8)) == 22


def test_k5_the_fraction_of_a_block_counts() -> None:
    assert cost(100, 16, Load(0, 6, device_blocks=6)) == 6.25


def test_k6_and_k7_lower_tiers() -> None:
    load = Load(0, 16, 0, device_blocks=4, host_blocks=4, disk_blocks=2)
    assert terms(PLAIN, 1024, 64, load, 0)[:2] == (16, 7.5)
    assert cost(1024, 64, load) == 24.5
    with_shared = weights(router_settings("kv", shared_cache_multiplier=0.5))
    assert cost(1024, 64, load._replace(shared_blocks=6), with_shared) == 21.5
    with_peers = weights(router_settings("kv", peer_cache_hit_weight=0.5))
    assert cost(1024, 64, load._replace(peer_blocks=6), with_peers) == 21.5
    assert cost(1024, 64, load._replace(peer_blocks=6)) == 24.5


def test_k8_credit_is_clamped_at_zero() -> None:
    w = weights(router_settings("kv", overlap_score_credit=2.0))
    assert cost(640, 64, Load(0, 10, device_blocks=8), w) == 10


def test_k9_credit_decays_with_excess_prefill() -> None:
    w = weights(router_settings("kv", overlap_score_credit_decay=1.0))
    load = Load(640, 10, device_blocks=8)
    assert cost(640, 64, load, w, least=0) == 26
    assert cost(640, 64, load, w, least=320) == pytest.approx(24.6667, abs=5e-5)
    assert costs(w, 640, 64, [640, 320], [10, 10], [0, 0], [8, 8])[0] == cost(640, 64, load, w, least=320)


def test_k10_prefill_scale_and_its_older_name() -> None:
    assert k2(weights(router_settings("kv", prefill_load_scale=4.0))) == 30
    assert k2(weights(router_settings("kv", prefill_load_scale=0.0))) == 22
    older = weights(router_settings("kv", overlap_score_weight=4.0))
    assert older == weights(router_settings("kv", prefill_load_scale=4.0))
    assert weights(router_settings("kv", overlap_score_weight=0.0)).overlap_credit == 0


def test_k11_active_requests() -> None:
    w = weights(router_settings("kv", decode_active_request_weight=2.0))
    assert k2(w, active_requests=3) == 30


def test_k12_and_k13_without_prefill_tracking() -> None:
    w = weights(router_settings("kv", track_prefill_tokens=False))
    assert k2(w) == 22
    assert k2(w._replace(decode_leg=True, overlap_credit=0.0)) == 22
    assert k2(w._replace(decode_leg=True)) == 14


def test_k14_taints() -> None:
    assert 20 * taint_factor([1]) == pytest.approx(9.33843, abs=5e-6)
    assert 20 * taint_factor([-1]) == pytest.approx(42.83375, abs=5e-6)
    assert 20 * taint_factor([0.5, 0.5, -0.25]) == pytest.approx(10.59713, abs=5e-6)


def test_k15_a_hot_worker_loses_to_a_cold_one() -> None:
    hot, cold = Load(12_800, 150, device_blocks=100), Load(0, 100)
    assert [cost(6400, 64, hot), cost(6400, 64, cold)] == [350, 200]


@pytest.mark.shared
@pytest.mark.parametrize(("weight", "expected"), [(1, [14, 10, 11]), (2, [16, 20, 17]), (0, [12, 0, 5])])
def test_k16_classic_formula_on_the_state_of_c09(shared: Path, weight: float, expected: list[float]) -> None:
    state = json.loads((shared / "cases/inputs/c09_router_state.json").read_text())
    w = weights(router_settings("kv", overlap_score_weight=weight))
    rows = state["workers"]
    columns = [[row[name] for row in rows] for name in ("active_prefill_tokens", "active_decode_blocks")]
    overlaps = [row["overlap_blocks"] for row in rows]
    assert costs(w, state["request_prompt_tokens"], state["block_size"], *columns, [0] * 3, overlaps) == expected


def test_more_cached_than_the_prompt_costs_no_less_than_nothing() -> None:
    assert cost(640, 64, Load(0, 0, device_blocks=11)) == 0
    half = weights(router_settings("kv", overlap_score_credit=0.5))
    assert terms(half, 640, 64, Load(0, 0, device_blocks=20), 0)[:2] == (20, 10)
