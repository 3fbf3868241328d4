"""The defaults that the specifications state, table by table: a figure that moves here moves every run."""

from __future__ import annotations

import pytest

from policies.kvbm import registry
from policies.kvbm.eviction.multi_lru import MultiLru
from policies.kvbm.health import DEGRADED_AFTER, PROBE_S
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.sketch import MOST, Sketch
from policies.router import replicas
from policies.router.chains import approximate, feed, orphans
from twin.config import (
    SHARED_CACHE_MULTIPLIER,
    SHARED_DISK_GB_PER_S,
    AffinityConfig,
    Config,
    DisaggregationConfig,
    KvbmConfig,
    QueueConfig,
    ResilienceConfig,
    RouterConfig,
    ThunderConfig,
)

ROUTER = {
    "mode": "round-robin",
    "tie_break": "seeded",
    "overlap_score_credit": 1.0,
    "overlap_score_credit_decay": 0.0,
    "prefill_load_scale": 1.0,
    "host_cache_hit_weight": 0.75,
    "disk_cache_hit_weight": 0.25,
    "shared_cache_multiplier": None,
    "decode_active_request_weight": 0.0,
    "router_temperature": 0.0,
    "track_active_blocks": True,
    "track_prefill_tokens": True,
    "assume_kv_reuse": True,
    "use_kv_events": True,
    "approximate_ttl_s": 120.0,
    "predicted_ttl_s": None,
    "decode_basis": "potential",
    "device_ratio": 8,
}
QUEUE = {"prefill_busy_share": None, "prefill_busy_tokens": None, "max_wait_s": None, "order": "fcfs"}
AFFINITY = {"mode": "off", "sessions": 65_536}
THUNDER = {"pause_at": 0.95, "pause_down_to": 0.80, "demote_at": 0.80, "demote_s": 2.0, "hysteresis": 0.10}
THUNDER |= {"tick_s": 5.0, "force_resume_s": 1800.0}
KVBM = {
    "cpu_cache_gb": None,
    "disk_cache_gb": None,
    "remote": False,
    "cpu_gb_per_s": 32.0,
    "cpu_latency_s": 10e-6,
    "disk_latency_s": 0.1e-3,
    "remote_gb_per_s": 5.0,
    "remote_latency_s": 5e-3,
    "cpu_offload": "presence",
    "disk_offload": "presence_lfu",
    "remote_offload": "presence_lfu",
    "min_lfu_count": 8,
    "cpu_eviction": "lineage",
    "when_full": "evict",
    "onboard": "always",
    "max_batch_blocks": 64,
    "min_batch_blocks": 8,
    "flush_s": 0.010,
    "batches_at_once": 1,
}
RESILIENCE = {
    "migration_limit": 0,
    "migration_max_seq_len": None,
    "lease_ttl_s": 10.0,
    "canary_idle_s": 10.0,
    "canary_timeout_s": 3.0,
    "grace_s": 5.0,
    "drain_timeout_s": 900.0,
    "response_inactivity_s": 60.0,
    "breaker_failures": 5,
    "breaker_share": 0.5,
    "breaker_requests": 20,
    "breaker_window_s": 30.0,
    "breaker_open_s": 10.0,
}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (RouterConfig(), ROUTER),
        (QueueConfig(), QUEUE),
        (AffinityConfig(), AFFINITY),
        (ThunderConfig(), THUNDER),
        (KvbmConfig(), KVBM),
        (ResilienceConfig(), RESILIENCE),
        (DisaggregationConfig(), {"lease_s": 60.0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_defaults_are_those_of_the_specification(table: object, expected: dict[str, object]) -> None:
    assert {name: getattr(table, name) for name in expected} == expected


def test_what_depends_on_something_else() -> None:
    assert SHARED_CACHE_MULTIPLIER == 0.5, "with a shared tier"
    assert SHARED_DISK_GB_PER_S == 80.0, "shared; 10 of its own"
    assert Config().compat == "none"


def test_the_figures_that_nobody_sets() -> None:
    """Orphans, buffers and waits of the index; sketch, levels and health of tiers; silence of routers."""
    assert (orphans.MOST_ORPHANS, feed.MOST_BUFFERED, approximate.MOST_BLOCKS) == (65_536, 100_000, 2**20)
    assert (feed.FIRST_WAIT_S, feed.MOST_WAIT_S) == (5.0, 60.0)
    assert (BatchRules().max_blocks, BatchRules().min_blocks, BatchRules().flush_s, BatchRules().at_once) == (
        64, 8, 0.010, 1,
    )  # fmt: skip
    assert MOST == 15
    assert [MultiLru(Sketch(1)).level(n) for n in (1, 2, 5, 6, 14, 15)] == [0, 1, 1, 2, 2, 3]
    assert (DEGRADED_AFTER, PROBE_S) == (5, 30.0)
    assert Rule().name == "always"
    assert (KvbmConfig().registry_lease_s, KvbmConfig().registry_negative_s) == (60.0, 1.0)
    assert (60.0 / registry.RENEWALS, registry.LOOK_UP_TIMEOUT_S) == (20.0, 0.020)
    assert (replicas.SILENCE_S, replicas.TOMBSTONE_S, replicas.BATCH_OPS) == (30.0, 60.0, 256)
