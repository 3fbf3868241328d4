"""What moves over the links of a run, by use: words that the configuration, links and reports share."""

from __future__ import annotations

KV, WEIGHTS, HOST, STORE = CARGOES = ("kv", "weights", "host", "store")
"""KV from prefill to decode workers, weights of a worker that starts, KV between GPU and host memory, KV between a
worker and tiers that all workers share."""
TIER_LOADS, TIER_STORES, TIER_FETCHES = "tier_loads", "tier_stores", "tier_fetches"
TIER_PEERS = "tier_peers"
"""What moves between the tiers of a block manager: up to the device, down, up into host memory ahead of a load,
and from host memory of another worker to the device."""
