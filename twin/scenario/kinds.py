"""The kinds of faults, and which keys each may have in a file beside those that say when.

A key that a kind does not have is refused where the file is read. What a kind does is `twin.mocker.faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WHEN = ("at_ms", "every_ms", "jitter_ms", "count", "mtbf_ms")
TARGET = ("worker", "role")
DETECTED = ("detect", "detection_delay_ms")
HOW_LONG = ("for_ms", "until_ms", "mttr_ms")


class Kind(NamedTuple):
    """The keys of one kind of fault beside those that say when; `needs` names those that must be there."""

    keys: tuple[str, ...]
    needs: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "worker_down": Kind((*TARGET, *HOW_LONG, *DETECTED)),
    "worker_up": Kind(TARGET),
    "worker_hang": Kind((*TARGET, *HOW_LONG, "detection_delay_ms")),
    "partition": Kind((*TARGET, "between", *HOW_LONG, *DETECTED)),
    "worker_slow": Kind((*TARGET, *HOW_LONG, "factor"), ("factor",)),
    "drain": Kind((*TARGET, *HOW_LONG, "grace_ms", "timeout_ms", "known_after_ms")),
    "undrain": Kind(TARGET),
    "engine_error": Kind((*TARGET, *HOW_LONG, "rate")),
    "event_loss": Kind((*TARGET, *HOW_LONG, "rate"), ("rate",)),
    "event_delay": Kind((*TARGET, *HOW_LONG, "ms"), ("ms",)),
    "event_reorder": Kind((*TARGET, *HOW_LONG, "rate", "ms"), ("rate", "ms")),
    "event_dup": Kind((*TARGET, *HOW_LONG, "rate"), ("rate",)),
    "report_stale": Kind((*TARGET, *HOW_LONG)),
    "client_disconnect": Kind(("row", "rate", "within_ms")),
    "link_slow": Kind(("link", "factor", "for_ms", "until_ms"), ("link", "factor")),
    "link_down": Kind(("link", "for_ms", "until_ms"), ("link",)),
    "tcp_fallback": Kind(("for_ms", "until_ms")),
    "tier_down": Kind(("tier", "worker", *HOW_LONG), ("tier",)),
    "tier_full": Kind(("tier", "worker", *HOW_LONG), ("tier",)),
    "tier_corrupt": Kind(("tier", "worker", *HOW_LONG, "rate"), ("tier", "rate")),
    "discovery_down": Kind(("for_ms", "until_ms")),
    "discovery_flap": Kind(("for_ms", "until_ms", "ms"), ("ms",)),
    "start_fail": Kind((*TARGET, "for_ms", "until_ms", "rate")),
    "start_slow": Kind((*TARGET, "for_ms", "until_ms", "extra_ms"), ("extra_ms",)),
    "clock_skew": Kind((*TARGET, *HOW_LONG, "ms"), ("ms",)),
    "index_restart": Kind(("router",)),
    "router_restart": Kind(("router",)),
    "client_slow_reader": Kind(("row", "rate", "bytes_per_s"), ("bytes_per_s",)),
    "busy_thresholds": Kind(("set", "clear")),
    "load_surge": Kind(("factor", "for_ms", "until_ms"), ("factor",)),
}
LATER: Mapping[str, str] = {
    "frontend_restart": "there is no frontend in the simulated world: requests reach the router at once, and nothing "
    "keeps streams that a restart could cut; take router_restart, or client_disconnect with a rate",
    "metrics_blind": "there is no planner that could be left without figures",
}
"""Kinds of the format that have nothing to act on in this version, and why."""
CLIENTS = ("client_disconnect", "client_slow_reader")
"""Kinds that happen to requests: one by its row, or a share of all."""
