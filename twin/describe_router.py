"""The router of a configuration in words, for reports of either world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twin.config import Config, ReplicasConfig, RouterConfig


def router_line(config: Config) -> str:
    """The router and what it depends on."""
    router = config.router
    text = router.mode
    if router.mode in ("least-loaded", "device-aware-weighted", "kv", "thunder"):
        text += f" · ties {router.tie_break}"
    if router.mode == "kv":
        text += f" · overlap credit {router.overlap_score_credit:g}, prefill scale {router.prefill_load_scale:g}"
        text += f", temperature {router.router_temperature:g} · {_cache_line(config)}"
    if router.mode == "thunder":
        thunder = router.thunder
        text += f" · programs paused at {thunder.pause_at:.0%} of a pool, down to {thunder.pause_down_to:.0%}"
    around = list(_around(router))
    if config.replicas.count > 1:
        around.append(replicas_line(config.replicas))
    return " · ".join([text, *around])


def _around(router: RouterConfig) -> Iterator[str]:
    """What stands around the mode: sessions, limits on load, the queue, taints."""
    if router.affinity.mode != "off":
        yield f"{router.affinity.mode} sessions"
    if router.required_taints:
        yield f"only workers with {', '.join(router.required_taints)}"
    busy, queue = router.busy, router.queue
    if busy.is_on:
        limits = {
            "of blocks": busy.decode_blocks_share,
            "prompt tokens": busy.prefill_tokens,
            "steps of prompt": busy.prefill_share,
            "requests beside those that run": busy.engine_queue,
        }
        yield f"overloaded above {_either(limits)}"
    if queue.is_on:
        above = _either({"prompt tokens": queue.prefill_busy_tokens, "steps of prompt": queue.prefill_busy_share})
        yield f"queue {queue.order} above {above}"


def _either(limits: Mapping[str, float | None]) -> str:
    return " or ".join(f"{limit:g} {what}" for what, limit in limits.items() if limit is not None)


def replicas_line(table: ReplicasConfig) -> str:
    """How many routers there are and what they know of each other."""
    text = f"{table.count} routers, arrivals {table.spread}, "
    if table.sync_delay_s is None:
        return text + "each sees its own load only"
    text += f"in sync after {table.sync_delay_s + table.sync_batch_s:g} s"
    if table.sync_jitter_s:
        text += f" to {table.sync_delay_s + table.sync_batch_s + table.sync_jitter_s:g} s"
    return text + (f", {table.sync_loss:.1%} of news lost" if table.sync_loss else "")


def _cache_line(config: Config) -> str:
    """How mode kv knows what workers have cached."""
    router = config.router
    if router.use_kv_events:
        ahead = f", sent prompts count for {router.predicted_ttl_s:g} s" if router.predicted_ttl_s is not None else ""
        whose = "engines' KV events" if router.index == "engine" else "KV events"
        ranks = ", ranks chosen too" if router.route_ranks else ""
        return f"{whose} {config.observe.kv_event_lag_s:g} s late{ahead}{ranks}"
    span = "while there is room" if router.index_policy == "lru" else f"for {router.approximate_ttl_s:g} s"
    return f"no KV events, sent prompts count as cached {span}"
