"""`[replicas]`: what is said of several routers, and what would do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from policies.router.disaggregation import Disaggregated
from policies.router.fleet import Fleet
from twin.config_read import load
from twin.deciding import build_policy
from twin.describe_router import router_line


def test_the_router_line_says_what_routers_know_of_each_other() -> None:
    sets = ["router.mode=kv", "replicas.count=4"]
    assert "4 routers, arrivals round-robin, each sees its own load only" in router_line(load(sets=sets))
    more = ["replicas.sync_delay_s=0.005", "replicas.sync_jitter_s=0.002", "replicas.sync_loss=0.01"]
    told = router_line(load(sets=[*sets, *more]))
    assert "in sync after 0.006 s to 0.008 s, 1.0% of news lost" in told


def test_one_router_is_the_router_itself() -> None:
    assert not isinstance(build_policy(load(sets=["router.mode=kv"]), 16), Fleet)
    assert isinstance(build_policy(load(sets=["router.mode=kv", "replicas.count=2"]), 16), Fleet)


IDLE = {
    "one router": (["router.mode=kv", "replicas.sync_delay_s=1"], "replicas.sync_delay_s", "there is one router"),
    "no sync": (
        ["router.mode=kv", "replicas.count=2", "replicas.sync_loss=0.1"],
        "replicas.sync_loss",
        "sync_delay_s is not given",
    ),
    "no books": (
        ["replicas.count=2", "replicas.sync_delay_s=1"],
        "replicas.sync_delay_s",
        "mode round-robin keeps no books",
    ),
    "no index": (
        ["replicas.count=2", "replicas.kv_event_lag_s=1"],
        "replicas.kv_event_lag_s",
        "does not listen to KV events",
    ),
}


@pytest.mark.parametrize("line", IDLE)
def test_what_would_do_nothing_is_refused(line: str) -> None:
    sets, key, why = IDLE[line]
    with pytest.raises(ConfigError, match=f"{key}.*{why}"):
        load(sets=sets)


def test_a_queue_or_a_limit_on_load_keeps_books_of_what_peers_have_sent() -> None:
    sets = ["replicas.count=2", "replicas.sync_delay_s=1", "router.mode=least-loaded"]
    for more in ("router.queue.prefill_busy_tokens=900", "router.busy.prefill_tokens=900"):
        assert isinstance(build_policy(load(sets=[*sets, more]), 16), Fleet)
    with pytest.raises(ConfigError, match=r"replicas.sync_delay_s.*keeps no books"):
        load(sets=[*sets, "router.busy.engine_queue=4"])


def test_replicas_of_a_router_that_places_legs(tmp_path: Path) -> None:
    file = tmp_path / "legs.toml"
    groups = "".join(f'[[workers]]\nname = "{role[0]}"\nrole = "{role}"\n' for role in ("prefill", "decode"))
    file.write_text(f"[replicas]\ncount = 2\n{groups}", encoding="utf-8")
    policy = build_policy(load(file), 16)
    assert isinstance(policy, Fleet)
    assert [type(replica._router) for replica in policy.replicas] == [Disaggregated] * 2
