"""Whole runs whose weights and host loads cross links of a topology: configured, simulated and reported.

The engine makes a prompt token in 1 ms and a decode step in 10 ms; every figure is worked out by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, run

from policies.errors import ConfigError
from reports.report import StartMeta
from reports.tables import moved_line, start_lines
from twin.cluster import build_groups
from twin.config_read import load
from twin.topology import build_topology

FIXED = ["workers.latency=fixed", "workers.latency.prefill_s_per_token=0.001", "workers.latency.decode_s=0.01"]
STARTS = """
[[workers]]
count = 3
model = "llama-3.1-8b"
weights = "bf16"
tp = 2
engine.kv_blocks = 100
startup.weights_from = "{source}"
startup.boot_s = 2
startup.warmup_s = 3
{weights}
"""
STORE = """
[[links]]
name = "store"
kind = "storage"
bandwidth_gb_per_s = 8
latency_s = 0
"""
OVER_STORE = f'links.weights = "pcie+store"\n{STORE}'
GIGABYTES = 16.06  # 8.03 billion values of 2 bytes


def started(tmp_path: Path, faults: str, *, source: str = "object", weights: str = OVER_STORE) -> Run:
    """A run of 100 requests, one a second, under these faults."""
    config, scenario, trace = tmp_path / "c.toml", tmp_path / "f.toml", tmp_path / "t.csv"
    config.write_text(STARTS.format(source=source, weights=weights), encoding="utf-8")
    scenario.write_text(f"version = 1\nmigration_limit = 3\nfaults = [{faults}]\n", encoding="utf-8")
    trace.write_text("arrival_s,isl,osl\n" + "".join(f"{n},10,2\n" for n in range(100)), encoding="utf-8")
    return run(trace, tmp_path / "run", *FIXED, f"faults.path={scenario}", config_file=config, perfetto=True)


def down(worker: int, at_s: float, for_s: float = 1.0) -> str:
    return f'{{at_ms = {at_s * 1e3:g}, kind = "worker_down", worker = "pool-{worker}", for_ms = {for_s * 1e3:g}}},'


def took_s(done: Run) -> dict[int, float | None]:
    return {
        start.worker_id: None if start.up_s is None else round(start.up_s - start.ordered_s, 6)
        for start in done.report.meta.starts
    }


def alone_s(done: Run) -> float:
    """What the weights of one worker take out of the store when nobody else loads."""
    (size,) = {start.weight_bytes for start in done.report.meta.starts}
    assert size == pytest.approx(GIGABYTES * 1e9, rel=1e-3)
    assert size is not None
    return size / 8e9


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_come_back_together_wait_for_each_other_at_the_store(tmp_path: Path, workers: int) -> None:
    done = started(tmp_path, "".join(down(worker, 5) for worker in range(workers)))
    each_s = 2 + workers * alone_s(done) + 3
    assert took_s(done) == {worker: pytest.approx(each_s, abs=1e-6) for worker in range(workers)}
    assert {start.timed_by for start in done.report.meta.starts} == {"links"}
    assert done.report.meta.moved_bytes == {"weights": round(8e9 * alone_s(done)) * workers}
    assert done.report.counts.completed == 100


def test_without_links_the_formula_stands_and_the_report_says_so(tmp_path: Path) -> None:
    done = started(tmp_path, down(0, 5) + down(1, 5), weights="")
    (start,) = {
        (s.timed_by, s.over, s.load_from_s, round((s.up_s or 0) - s.ordered_s, 3)) for s in done.report.meta.starts
    }
    assert start == ("formula", None, None, pytest.approx(2 + GIGABYTES / 5 + 3, abs=1e-2))
    assert done.report.meta.moved_bytes == {}
    assert "by formula" in done.report.meta.cluster[0]


def test_a_worker_that_dies_while_it_loads_is_loaded_again_from_the_start(tmp_path: Path) -> None:
    """Down at 5 s, ordered at 6, loads from 8 on; dies at 9 for 10 s, is ordered at 19 and has the store for itself."""
    done = started(tmp_path, down(0, 5) + down(0, 9, 10))
    first, second = done.report.meta.starts
    assert (first.ordered_s, first.load_from_s, first.loaded_s, first.up_s) == (6, 8, None, None)
    assert second.ordered_s == 19
    assert took_s(done) == {0: pytest.approx(5 + alone_s(done), abs=1e-6)}
    assert done.report.meta.moved_bytes == {"weights": second.weight_bytes}
    told = json.loads((done.folder / "faults.json").read_text(encoding="utf-8"))["timeline"]
    assert [entry["over_s"] for entry in told] == [None, second.up_s]


@pytest.mark.parametrize(
    ("fault", "later_s"),
    [
        ('kind = "link_down", link = "store", until_ms = 8500', 0.5),
        ('kind = "link_slow", link = "store", factor = 0.5, until_ms = 8500', 0.25),
        ('kind = "link_slow", link = "pcie:pool-1", factor = 0.01, until_ms = 8500', 0.0),
    ],
)
def test_faults_of_links_reach_a_load(tmp_path: Path, fault: str, later_s: float) -> None:
    """The weights of worker 0 come in from 8 s on."""
    done = started(tmp_path, f"{down(0, 5)} {{at_ms = 8000, {fault}}}")
    assert took_s(done) == {0: pytest.approx(5 + alone_s(done) + later_s, abs=1e-6)}


def test_a_store_that_stays_down_leaves_the_worker_out_of_the_run(tmp_path: Path) -> None:
    done = started(tmp_path, f'{down(0, 5)} {{at_ms = 8100, kind = "link_down", link = "store"}}')
    assert took_s(done) == {0: None}
    assert done.report.counts.completed == 100
    assert list(start_lines(done.report.meta.starts)) == [
        "0 workers came up: weights over pcie+store (simulated links); 1 did not come up"
    ]


def test_failures_that_recur_do_not_keep_a_run_going_for_the_sake_of_its_starts(tmp_path: Path) -> None:
    """A failure every second on average, and starts that take longer: some start is always under way."""
    faults = '{mtbf_ms = 1000, mttr_ms = 1000, kind = "worker_down", worker = "any"}'
    done = started(tmp_path, faults)
    told = json.loads((done.folder / "faults.json").read_text(encoding="utf-8"))["timeline"]
    assert len(told) > 50
    assert told[-1]["at_s"] < 101, "the last request arrives at 99 s"


def test_weights_of_a_peer_share_its_cards_with_other_starts(tmp_path: Path) -> None:
    """Worker 2 sends to 0 and 1 at once: each rank's card of 50 GB/s carries half of the weights twice."""
    done = started(tmp_path, down(0, 5) + down(1, 5), source="peer", weights='links.weights = "nic"')
    assert [start.sent_by for start in done.report.meta.starts] == [2, 2]
    half_s = alone_s(done) * 8 / 2 / 50
    assert took_s(done) == {0: pytest.approx(5 + 2 * half_s, abs=1e-6), 1: pytest.approx(5 + 2 * half_s, abs=1e-6)}


def test_a_start_is_in_the_perfetto_trace(tmp_path: Path) -> None:
    done = started(tmp_path, down(0, 5))
    events = json.loads((done.folder / "perfetto.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = {e["name"]: (e["ts"], round(e["dur"] / 1e6, 3)) for e in events if e.get("cat") == "start"}
    assert slices == {
        "boot": (6e6, 2),
        "weights": (8e6, round(alone_s(done), 3)),
        "warm-up": (pytest.approx((8 + alone_s(done)) * 1e6, abs=1), 3),
    }


# ---------------------------------------------------------------- loads from host memory beside hand-offs

LEGS = """
disaggregation.kv_bytes_per_token = 1_000_000
[[workers]]
name = "p"
role = "prefill"
count = 1
tp = 1
model = "llama-3.1-8b"
engine.block_size = 64
engine.kv_blocks = 6
engine.host_blocks = 20
engine.host_block_bytes = 50_000_000
links.kv = "bus"
{host}
[[workers]]
name = "d"
role = "decode"
count = 1
tp = 1
model = "llama-3.1-8b"
engine.block_size = 64
engine.kv_blocks = 100
links.kv = "bus"
[[links]]
name = "bus"
kind = "pcie"
bandwidth_gb_per_s = 1
discipline = "{discipline}"
duplex = {duplex}
[trace]
hash_block_tokens = 64
"""


def handed_over(
    tmp_path: Path, *, host: bool = True, discipline: str = "fair", duplex: str = "false", leap: bool = True
) -> Run:
    """Prompts A to D of 130 tokens, a second apart, through a pool of six blocks; A again while D is handed over."""
    config, trace = tmp_path / "c.toml", tmp_path / "t.jsonl"
    config.write_text(
        LEGS.format(
            host='links.host = "bus"' if host else "engine.host_load_gb_per_s = 1", discipline=discipline, duplex=duplex
        ),
        encoding="utf-8",
    )
    rows = [(0, 1), (1000, 11), (2000, 21), (3000, 31), (3200, 1)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 130, "output_length": 2, "hash_ids": [k, k + 1, k + 2]}) + "\n"
            for at, k in rows
        ),
        encoding="utf-8",
    )
    sets = [text.replace("workers.", f"workers.{name}.") for name in "pd" for text in FIXED]
    return run(trace, tmp_path / "run", *sets, config_file=config, leap=leap)


@pytest.mark.parametrize(
    ("host", "discipline", "duplex", "d_ms", "a_ms"),
    [
        # D: 130 MB from 3130 on. A: two blocks, 100 MB, from 3200 on, then 2 tokens, 130 MB, a decode step.
        (False, "fair", "false", 270, 100 + 2 + 130 + 10),
        (True, "fair", "true", 270, 100 + 2 + 130 + 10),
        # D has 60 MB left at 3200: half the bus each until 3320, when A has 40 left
        (True, "fair", "false", 330, 160 + 2 + 130 + 10),
        # D goes on to 3260, A is served then
        (True, "fifo", "false", 270, 160 + 2 + 130 + 10),
    ],
)  # fmt: skip
@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_a_host_load_and_a_hand_off_share_a_bus(
    tmp_path: Path, host: bool, discipline: str, duplex: str, d_ms: float, a_ms: float, leap: bool
) -> None:
    done = handed_over(tmp_path, host=host, discipline=discipline, duplex=duplex, leap=leap)
    assert done.ms("ttft_s") == [270, 270, 270, d_ms, a_ms]
    assert done.report.meta.tiers["g2_hit_blocks"] == 2
    assert done.report.meta.moved_bytes == ({"host": 100_000_000} if host else {}) | {"kv": 5 * 130_000_000}


# ---------------------------------------------------------------- words


def test_what_moved_and_who_came_up_in_words() -> None:
    assert (
        moved_line({"kv": 131_072_000, "weights": 141_000_000_000})
        == "moved 131 MB of KV handed over, 141 GB of weights"
    )
    starts = (
        StartMeta(worker_id=0, ordered_s=1, timed_by="links", up_s=11, over="nic"),
        StartMeta(worker_id=1, ordered_s=1, timed_by="links", up_s=21, over="nic"),
        StartMeta(worker_id=2, ordered_s=1, timed_by="given", up_s=31),
        StartMeta(worker_id=3, ordered_s=1, timed_by="formula"),
    )
    assert list(start_lines(starts)) == [
        "2 workers came up in 10.0 s to 20.0 s: weights over nic (simulated links)",
        "1 worker came up in 30.0 s: startup_s as given",
        "0 workers came up: by the formula of cold starts; 1 did not come up",
    ]


# ---------------------------------------------------------------- what is refused, and what has no effect


def refusal(tmp_path: Path, text: str, *sets: str) -> str:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        load(file, sets=sets)
    return str(told.value)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            "[workers.links]\nkv = 'nic+nic'",
            2,
            'links.kv = "nic+nic": nic is there 2 times; a path crosses a link once',
        ),
        ("[workers.links]\nhost = 'pcie+nic+pcie'", 2, "pcie is there 2 times"),
        ("[workers.links]\nweights = 'storag'", 2, 'there is no link "storag"; did you mean storage'),
        (
            "[workers.startup]\nweights_from = 'object'\n[workers.links]\nweights = 'pcie+nic'",
            4,
            "weights come from object, and no link of the path is a store; add one (storage, disk,",
        ),
        (
            "[workers.startup]\nweights_from = 'peer'\n[workers.links]\nweights = 'nic+storage'",
            4,
            "weights come from a peer, and storage is a store",
        ),
    ],
)
def test_a_path_that_cannot_be_is_refused_with_its_place(tmp_path: Path, text: str, line: int, words: str) -> None:
    told = refusal(tmp_path, text + "\n")
    assert f"c.toml:{line}: " in told
    assert words in told


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["workers.links.host=pcie"], "workers.pool.links.host has no effect: there is no host tier"),
        (["workers.links.weights=storage"], "links.weights has no effect: nothing in this run adds workers"),
        (
            ["faults.path=F", "workers.links.weights=storage"],
            "workers.pool.links.weights has no effect: startup.weights_from is not given",
        ),
        (
            ["faults.path=F", "workers.links.weights=storage", "workers.startup_s=5"],
            "links.weights has no effect: startup_s says",
        ),
        (
            [
                "faults.path=F", "workers.links.weights=storage", "workers.startup.weights_from=object",
                "workers.startup.bandwidth_gb_per_s=7",
            ],
            "workers.pool.startup.bandwidth_gb_per_s has no effect: links.weights says what the weights cross",
        ),
        (
            ["workers.engine.host_blocks=9", "workers.links.host=pcie", "workers.engine.host_load_gb_per_s=7"],
            "host_load_gb_per_s has no effect: links.host says what loads cross",
        ),
    ],
)  # fmt: skip
def test_a_path_that_nothing_takes_is_said_so(tmp_path: Path, sets: list[str], words: str) -> None:
    scenario = tmp_path / "f.toml"
    scenario.write_text("version = 1\nfaults = []\n", encoding="utf-8")
    assert words in refusal(tmp_path, "", *(text.replace("=F", f"={scenario}") for text in sets))


def test_links_are_there_for_what_moves_over_them_alone(tmp_path: Path) -> None:
    """Mixed workers hand nothing over: no cards, a bus for each rank, a disk for each worker, one store."""
    scenario = tmp_path / "f.toml"
    scenario.write_text("version = 1\nfaults = []\n", encoding="utf-8")
    sets = [
        f"faults.path={scenario}", "workers.count=2", "workers.tp=2", "workers.engine.host_blocks=9",
        "workers.model=llama-3.1-8b", "workers.links.host=pcie", "workers.startup.weights_from=disk",
        "workers.links.weights=pcie+disk+storage",
    ]  # fmt: skip
    config = load(sets=sets)
    built = build_topology(config, build_groups(config))
    assert built is not None
    assert {link.name: link.bytes_per_s / 1e9 for link in built.links} == {
        "pcie:pool-0:0": 64, "pcie:pool-0:1": 64, "pcie:pool-1:0": 64, "pcie:pool-1:1": 64,
        "disk:pool-0": 10, "disk:pool-1": 10, "storage": 5,
    }  # fmt: skip
    assert not built.own_ranks
    assert build_topology(load(), build_groups(load())) is None
