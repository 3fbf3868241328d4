"""What moves over the links of a run, by use: words that the configuration, links and reports share."""

from __future__ import annotations

KV, WEIGHTS, HOST = CARGOES = ("kv", "weights", "host")
"""KV from prefill to decode workers, weights of a worker that starts, KV between GPU and host memory."""
TIER_LOADS, TIER_STORES = "tier_loads", "tier_stores"
"""What moves between the tiers of a block manager: up to the device, and down."""
