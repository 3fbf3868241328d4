"""What a tier is: how large, how far away, whose. Sizes come in bytes or tokens; blocks are only what they make.

A block of one engine may hold 64 times what a block of another holds, so nobody is asked for a size in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cluster.ids import Tier
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.kvbm.store import UNLIMITED_BLOCKS


@frozen
class TierSpec:
    """One tier below the device. `capacity_bytes` None: never full. `is_shared`: all workers have it in common.

    `latency_s` passes before the first byte of each transfer; `bytes_per_s` is what a transfer gets that is alone.
    """

    tier: Tier
    capacity_bytes: int | None
    block_bytes: int
    latency_s: float
    bytes_per_s: float
    desc_cost_s: float = 0.0
    is_shared: bool = False

    @property
    def capacity_blocks(self) -> int:
        """Whole blocks that fit."""
        return UNLIMITED_BLOCKS if self.capacity_bytes is None else self.capacity_bytes // self.block_bytes

    def alone_s(self, blocks: int, descriptors: int = 0) -> float:
        """How long so many blocks take when nobody else moves anything."""
        moved_s = blocks * self.block_bytes / self.bytes_per_s
        return self.latency_s + self.desc_cost_s * descriptors + moved_s


def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """KV bytes of one token on one rank: keys and values of all layers."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def latent_token_bytes(layers: int, latent_dim: int, dtype_bytes: int) -> int:
    """KV bytes of one token of a model with latent attention (MLA), rope part included in `latent_dim`."""
    return layers * latent_dim * dtype_bytes


def check_cascade(tiers: Sequence[TierSpec], device_blocks: int | None = None) -> list[str]:
    """What is odd about the sizes, from the device down: a tier that is not larger than the one above holds little but
    copies of it. Raises ConfigError for a tier that holds nothing, and for tiers out of order."""
    warnings = []
    order = list(Tier)
    above_name, above = "the device pool", device_blocks
    for i, spec in enumerate(tiers):
        if i and order.index(spec.tier) <= order.index(tiers[i - 1].tier):
            raise ConfigError(
                f"tier {spec.tier.value} stands below {tiers[i - 1].tier.value}; from fast to slow, each once"
            )
        if spec.capacity_blocks < 1:
            raise ConfigError(
                f"tier {spec.tier.value} of {spec.capacity_bytes} bytes holds no block of {spec.block_bytes} bytes; "
                "make it larger, or leave it out"
            )
        if above is not None and spec.capacity_blocks <= above and not spec.is_shared:
            warnings.append(
                f"tier {spec.tier.value} holds {spec.capacity_blocks} blocks and {above_name} {above}: a tier that is "
                "not larger than the one above it mostly keeps second copies"
            )
        above_name, above = f"tier {spec.tier.value}", spec.capacity_blocks
    return warnings
