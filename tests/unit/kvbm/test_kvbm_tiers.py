"""Sizes of blocks and tiers (S1 to S4), and what single loads take (L1 to L4, N1 to N9, K7)."""

from __future__ import annotations

import pytest

from policies.cluster.ids import Tier
from policies.errors import ConfigError
from policies.kvbm.onboard import bounce_s, direct_s, inter_layer_s, intra_layer_s, piped_bounce_s
from policies.kvbm.tiers import TierSpec, check_cascade, latent_token_bytes, token_bytes

BLOCK = 8_388_608


def spec(tier: Tier, latency_s: float, gb_per_s: float, capacity_bytes: int | None = None, **more: object) -> TierSpec:
    base: dict = {"block_bytes": BLOCK} | more
    return TierSpec(tier=tier, capacity_bytes=capacity_bytes, latency_s=latency_s, bytes_per_s=gb_per_s * 1e9, **base)


@pytest.mark.parametrize(
    ("case", "found", "per_token", "block_16", "block_64"),
    [
        ("S1", token_bytes(32, 8, 128, 2), 131_072, 2_097_152, 8_388_608),
        ("S2, 2 bytes", token_bytes(80, 8, 128, 2), 327_680, 5_242_880, 20_971_520),
        ("S2, 1 byte", token_bytes(80, 8, 128, 1), 163_840, 2_621_440, 10_485_760),
        ("S3", latent_token_bytes(61, 576, 2), 70_272, 1_124_352, 4_497_408),
    ],
)
def test_s1_to_s3_bytes_of_blocks(case: str, found: int, per_token: int, block_16: int, block_64: int) -> None:
    assert (found, 16 * found, 64 * found) == (per_token, block_16, block_64), case


def test_s4_a_tier_holds_whole_blocks() -> None:
    assert spec(Tier.G2_HOST, 1e-5, 32, 8 * 10**9).capacity_blocks == 953
    assert 953 * 64 == 60_992


@pytest.mark.parametrize(
    ("case", "tier", "one_ms", "many_ms"),
    [
        ("L1", spec(Tier.G2_HOST, 1e-5, 32), 0.272144, 16.787216),
        ("L2", spec(Tier.G3_DISK, 1e-4, 10), 0.938861, 53.787091),
        ("L3", spec(Tier.G3_DISK, 1e-4, 80), 0.204858, 6.810886),
        ("L4", spec(Tier.G4_REMOTE, 5e-3, 5), 6.677722, 112.374182),
    ],
)
def test_l1_to_l4_what_loads_take(case: str, tier: TierSpec, one_ms: float, many_ms: float) -> None:
    assert tier.alone_s(1) * 1e3 == pytest.approx(one_ms, abs=5e-7), case
    assert tier.alone_s(64) * 1e3 == pytest.approx(many_ms, abs=5e-7), case


def test_k7_descriptors_cost() -> None:
    tier = spec(Tier.G2_HOST, 0.0, 32, desc_cost_s=2e-6)
    assert tier.alone_s(1, descriptors=64) * 1e3 == pytest.approx(0.390144)


@pytest.mark.parametrize(
    ("case", "load_ms", "compute_ms", "layers", "inter_ms", "intra_ms"),
    [("N1", 32, 32, 32, 64, 33), ("N2", 32, 64, 32, 96, 65), ("N3", 64, 32, 32, 96, 65), ("N4", 1, 2, 32, 3, 2.03125),
     ("N5", 10, 10, 1, 20, 20)],
)  # fmt: skip
def test_n1_to_n5_layers_may_come_while_others_compute(
    case: str, load_ms: float, compute_ms: float, layers: int, inter_ms: float, intra_ms: float
) -> None:
    assert inter_layer_s(load_ms, compute_ms) == pytest.approx(inter_ms), case
    assert intra_layer_s(load_ms, compute_ms, layers) == pytest.approx(intra_ms), case


def test_n6_to_n9_one_hop_or_two() -> None:
    disk, host = 10e9, 32e9
    assert direct_s(64 * BLOCK, disk, host) * 1e3 == pytest.approx(53.687091)
    assert bounce_s(64 * BLOCK, disk, host) * 1e3 == pytest.approx(70.464307)
    assert piped_bounce_s(64, BLOCK, disk, host) * 1e3 == pytest.approx(53.949235)
    assert direct_s(BLOCK, disk, host) * 1e3 == pytest.approx(0.838861, abs=5e-7)
    assert bounce_s(BLOCK, disk, host) * 1e3 == pytest.approx(1.101005, abs=5e-7)


def test_tiers_that_do_not_grow_downwards_are_told() -> None:
    small, large = spec(Tier.G2_HOST, 0, 32, 10 * BLOCK), spec(Tier.G3_DISK, 0, 10, 20 * BLOCK)
    assert check_cascade([small, large], device_blocks=5) == []
    (warning,) = check_cascade([small, large], device_blocks=10)
    assert warning.startswith("tier g2 holds 10 blocks and the device pool 10")
    (warning,) = check_cascade([spec(Tier.G2_HOST, 0, 32, 30 * BLOCK), large])
    assert warning.startswith("tier g3 holds 20 blocks and tier g2 30")


def test_a_tier_without_a_block_and_tiers_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="holds no block of 8388608 bytes"):
        check_cascade([spec(Tier.G2_HOST, 0, 32, BLOCK - 1)])
    with pytest.raises(ConfigError, match="g2 stands below g3"):
        check_cascade([spec(Tier.G3_DISK, 0, 32), spec(Tier.G2_HOST, 0, 32)])
