"""The links of a configuration: which copies there are, what they carry, and how long a hand-off over them takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy

from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from twin.cluster import build_groups
from twin.config import Config
from twin.config_read import load
from twin.topology import Topology, build_topology

P, D = WorkerId(0), WorkerId(1)

TWO = """
[router]
mode = "round-robin"
[[workers]]
name = "p"
role = "prefill"
count = 1
model = "llama-3.1-8b"
tp = {p_tp}
links.kv = "{kv}"
[[workers]]
name = "d"
role = "decode"
count = 1
model = "llama-3.1-8b"
tp = {d_tp}
gpu = "{gpu}"
links.kv = "{kv}"
{links}
"""


@pytest.fixture
def config(tmp_path: Path):
    def make(kv: str = "nic", links: str = "", p_tp: int = 2, d_tp: int = 2, gpu: str = "a100_sxm_80") -> Config:
        file = tmp_path / "c.toml"
        file.write_text(TWO.format(kv=kv, links=links, p_tp=p_tp, d_tp=d_tp, gpu=gpu), encoding="utf-8")
        return load(file, sets=["allow_no_effect=true"])

    return make


def topology(config: Config) -> Topology:
    built = build_topology(config, build_groups(config))
    assert built is not None
    return built


def rates(built: Topology) -> dict[str, float]:
    return {link.name: link.bytes_per_s / 1e9 for link in built.links}


def test_without_tables_every_gpu_has_the_card_of_the_hardware_table(config) -> None:
    built = topology(config())
    assert rates(built) == {"nic:p-0:0": 50, "nic:p-0:1": 50, "nic:d-0:0": 25, "nic:d-0:1": 25}
    assert built.path(P, 1, D, 0) == ("nic:p-0:1/tx", "nic:d-0:0/rx")
    assert built.own_ranks


def test_links_of_other_kinds_take_their_gpus_figures(config) -> None:
    built = topology(config("pcie+nvlink"))
    assert {name: rate for name, rate in rates(built).items() if name.endswith(":0")} == {
        "pcie:p-0:0": 64, "nvlink:p-0:0": 450, "pcie:d-0:0": 32, "nvlink:d-0:0": 300,
    }  # fmt: skip
    assert {link.discipline for link in built.links if link.name.startswith("pcie")} == {"fifo"}
    assert built.path(P, 0, D, 1) == ("pcie:p-0:0/tx", "nvlink:p-0:0/tx", "nvlink:d-0:1/rx", "pcie:d-0:1/rx")


def test_a_spine_that_both_sides_cross_is_crossed_once(config) -> None:
    spine = '[[links]]\nname = "spine"\nper = "run"\nbandwidth_gb_per_s = 40\nduplex = false\nlatency_s = 1e-5'
    built = topology(config("nic+spine", spine))
    assert built.path(P, 0, D, 0) == ("nic:p-0:0/tx", "spine", "nic:d-0:0/rx")
    assert rates(built)["spine"] == 40
    assert not built.own_ranks, "ranks meet on it"


@pytest.mark.parametrize(("per", "name", "rate"), [("worker", "nic:p-0", 100), ("rank", "nic:p-0:1", 50)])
def test_a_worker_has_its_ranks_cards_together(config, per: str, name: str, rate: float) -> None:
    built = topology(config("nic", f'[[links]]\nname = "nic"\nper = "{per}"'))
    assert rates(built)[name] == rate


def test_a_table_overrides_the_card(config) -> None:
    built = topology(config("nic", '[[links]]\nname = "nic"\nbandwidth_gb_per_s = 12.5\ndiscipline = "private"'))
    assert set(rates(built).values()) == {12.5}
    assert {link.discipline for link in built.links} == {"private"}


@pytest.mark.parametrize(
    ("kv", "links", "gpu", "words"),
    [
        ("nic+spine", '[[links]]\nname = "spine"\nper = "run"', "h100_sxm", "shared by a whole run, .*give"),
        ("nic", "", "rtx_4090", "links.nic of d: rtx_4090 has no nic"),
        ("nvlink", "", "l40s", "links.nvlink of d: l40s has no nvlink"),
    ],
)  # fmt: skip
def test_a_link_that_nobody_knows_the_speed_of_is_refused(config, kv: str, links: str, gpu: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        topology(config(kv, links, gpu=gpu))


# ---------------------------------------------------------------- in a run

FIXED = [
    "workers.p.latency=fixed", "workers.d.latency=fixed", "workers.p.latency.prefill_s_per_token=0.001",
    "workers.p.latency.decode_s=0.01", "workers.d.latency.prefill_s_per_token=0.001", "workers.d.latency.decode_s=0.01",
]  # fmt: skip


def handed_over_ms(tmp_path: Path, text: str, rows: str, *sets: str) -> list[float | None]:
    """Second token of each request, less prefill and decode steps: when its KV had arrived, by its first token."""
    file, trace = tmp_path / "c.toml", tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8")
    trace.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    return toy.run(trace, tmp_path / "run", *FIXED, *sets, config_file=file).ms("first_token_s")


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "ms"),
    [
        (1, 1, 2.62144),  # 131,072,000 bytes over one card of 50 GB/s
        (2, 4, 1.31072),  # each prefill rank sends two parts of 32,768,000
        (4, 2, 1.31072),  # each decode rank takes in two of them: its card is the limit
        (2, 2, 1.31072),
    ],
)
def test_a_hand_off_takes_as_long_as_its_busiest_card(tmp_path: Path, p_tp: int, d_tp: int, ms: float) -> None:
    """1000 tokens of llama-3.1-8b: 1000 ms of prefill, the transfer, and 10 ms for the decode worker's first token."""
    text = TWO.format(kv="nic", links="", p_tp=p_tp, d_tp=d_tp, gpu="h100_sxm")
    assert handed_over_ms(tmp_path, text, "0,1000,2\n") == [pytest.approx(1010 + ms, abs=1e-3)]


def test_transfers_of_two_workers_share_the_card_of_the_third(tmp_path: Path) -> None:
    """Two prompts end at 1 s on two workers; both transfers enter one card, at half speed each."""
    text = TWO.format(kv="nic", links="", p_tp=1, d_tp=1, gpu="h100_sxm").replace("count = 1", "count = 2", 1)
    both = handed_over_ms(tmp_path, text, "0,1000,2\n0,1000,2\n")
    assert both == [pytest.approx(1010 + 2 * 2.62144, abs=1e-3)] * 2


def test_a_slow_spine_is_shared_by_all_ranks(tmp_path: Path) -> None:
    """All 131,072,000 bytes of both ranks cross the spine: 26.2144 ms at 5 GB/s."""
    spine = '[[links]]\nname = "spine"\nper = "run"\nbandwidth_gb_per_s = 5\n'
    text = TWO.format(kv="nic+spine", links=spine, p_tp=2, d_tp=2, gpu="h100_sxm")
    assert handed_over_ms(tmp_path, text, "0,1000,2\n") == [pytest.approx(1010 + 26.2144, abs=1e-3)]


@pytest.mark.parametrize(
    ("fault", "ms"),
    [
        ('kind = "tcp_fallback"', 2.62144 * 350),
        ('kind = "link_slow", link = "nic:p-0", factor = 0.5', 2.62144 * 2),
        ('kind = "link_slow", link = "nic:d-0:0", factor = 0.25', 2.62144 * 4),
        ('kind = "link_down", link = "nic:d-0", until_ms = 1500', 500 + 2.62144),
    ],
)
def test_faults_reach_the_links_of_the_run(tmp_path: Path, fault: str, ms: float) -> None:
    scenario = tmp_path / "faults.toml"
    scenario.write_text(f"version = 1\nfaults = [{{at_ms = 500, {fault}}}]\n", encoding="utf-8")
    text = TWO.format(kv="nic", links="", p_tp=1, d_tp=1, gpu="h100_sxm")
    first = handed_over_ms(tmp_path, text, "0,1000,2\n", f"faults.path={scenario}")
    assert first == [pytest.approx(1010 + ms, abs=1e-3)]
