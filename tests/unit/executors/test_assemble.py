"""What a configuration becomes when it is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.assemble import Host, live_config
from executors.commands.lines import no_effect_live
from executors.starter import HostStarter, Model, Terms
from twin.config_read import load


@pytest.mark.parametrize(
    ("text", "limit"), [("", 3), ("[resilience]\nmigration_limit = 0", 0), ("[resilience]\nmigration_limit = 1", 1)]
)
def test_requests_of_a_lost_worker_go_on_elsewhere_unless_the_configuration_says_otherwise(
    tmp_path: Path, text: str, limit: int
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    config = load(file, {}, ("allow_no_effect=true",))
    host = Host(model=Model(checkpoint="", served_as="tiny"), pythons={}, attached={})
    served, notices = live_config(config, host)
    assert served.resilience.migration_limit == limit
    assert any("migration_limit" in notice for notice in notices) == (not text)


SPLIT = """
[[workers]]
name = "p"
role = "prefill"
[[workers]]
name = "d"
role = "decode"
[disaggregation]
lease_s = {lease_s}
"""


@pytest.mark.parametrize(
    ("lease_s", "flag", "attached", "counts"),
    [
        (60, None, (), 60.0),
        (60, None, ("d",), 60.0),
        (60, None, ("p",), 30.0),
        (20, None, ("p",), 20.0),
        (60, 45, ("p",), 45.0),
    ],
)
def test_the_lease_of_the_simulator_is_that_of_engines_and_foreign_ones_have_no_longer_one_than_usual(
    tmp_path: Path, lease_s: int, flag: int | None, attached: tuple[str, ...], counts: float
) -> None:
    """What the engine does not keep must not be asked for: a longer lease here than there reads others' KV (C17)."""
    file = tmp_path / "c.toml"
    file.write_text(SPLIT.format(lease_s=lease_s), encoding="utf-8")
    config = load(file, {"--lease": flag}, ("allow_no_effect=true",))
    urls = dict.fromkeys(attached, ("http://127.0.0.1:1",))
    host = Host(model=Model(checkpoint="", served_as="tiny"), pythons={}, attached=urls)
    served, notices = live_config(config, host)
    assert served.disaggregation.lease_s == counts
    assert any("lease_s" in notice for notice in notices) == (counts not in (lease_s, flag))
    planned = HostStarter(
        {"p": served.workers[0]}, host.model, {"vllm": Path("python")}, lambda: 0.0, tmp_path, Terms.of(served), gpus=()
    ).plan()
    assert f'"kv_lease_duration": {counts:g}' in planned[0].text()


def test_what_a_simulation_without_faults_passes_over_is_no_note_where_serving_reads_it() -> None:
    sets = ("allow_no_effect=true", "resilience.lease_ttl_s=3", "resilience.canary_idle_s=1")
    config = load(None, {"--grace": 0, "--drain": "20"}, sets)
    assert len(config.no_effect) == 4
    (left,) = no_effect_live(config, live=True)
    assert "resilience.lease_ttl_s has no effect" in left


def test_what_real_engines_are_told_is_no_note_with_them(tmp_path: Path) -> None:
    """With kv_blocks a simulation passes over the share of memory; an engine on the CPU takes it of main memory."""
    file = tmp_path / "c.toml"
    file.write_text("[workers.engine]\nkv_blocks = 100\ngpu_memory_utilization = 0.1\n", encoding="utf-8")
    config = load(file, {}, ("allow_no_effect=true",))
    assert len(no_effect_live(config, live=False)) == 1
    assert no_effect_live(config, live=True) == []


def test_a_planner_is_named_and_left_out_where_nobody_carries_it_out() -> None:
    host = Host(model=Model(checkpoint="", served_as="tiny"), pythons={}, attached={})
    served, notices = live_config(load(sets=["planner.name=load"]), host)
    assert not served.planner.is_on
    assert any(notice.startswith("planner.name = none") for notice in notices)
