"""What workers with tiers publish of their blocks, C1 to C6 in whole runs: each change with its tier, or one account
of all tiers, in the simulator's own words and in the engines'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cases_kvbm import DEVICE, faults, hits, rows
from toy import Run, run, toy

from policies.errors import ConfigError
from policies.kvbm.consolidate import DEDUPE, PER_TIER

HOST = (
    *DEVICE,
    "workers.kvbm.cpu_cache_tokens=256",
    "workers.kvbm.block_bytes=8388608",
    "workers.kvbm.cpu_gb_per_s=16.777216",
    "workers.kvbm.cpu_latency_s=0",
)
"""A device that holds one prompt of two blocks, host memory for two: half a millisecond a block, after at most 10."""
DISK = (
    "workers.kvbm.disk_cache_tokens=100000",
    "workers.kvbm.disk_offload=presence",
    "workers.kvbm.disk_gb_per_s=8.388608",
    "workers.kvbm.disk_latency_s=0",
)
INDEXES = ["simulated", "engine"]


def asked(tmp_path: Path, names: str) -> Path:
    """A prompt each second, by name: two blocks of their own, and a token of a third."""
    keys = {name: 10 * (1 + ord(name) - ord("a")) for name in names}
    return rows(tmp_path, *((1000 * n, 130, [keys[name] + i for i in range(3)], 1) for n, name in enumerate(names)))


def replay(trace: Path, folder: Path, index: str, events: str, *sets: str, leap: bool = True) -> Run:
    listens = ("router.mode=kv", f"router.index={index}", f"workers.kvbm.events={events}")
    return toy(trace, folder, *HOST, *listens, *sets, key_tokens=64, journal=True, leap=leap)


def events_of(run: Run) -> Iterator[dict]:
    for line in (run.folder / "journal.jsonl").read_text().splitlines()[1:]:
        yield json.loads(line)["event"]


def told(run: Run) -> list[str]:
    """What workers said of blocks: when (ms), what of which prompt (a, b, ... as they came), in which tier. Both
    blocks of a prompt come and go together."""
    found, names = [], {}
    for event in events_of(run):
        kind, at_ms = event["type"], round(event["at_s"] * 1e3, 3)
        if kind in ("BlocksCleared", "KvCleared"):
            found.append(f"{at_ms:g} clear {event['tier'][:2]}")
        elif kind in ("BlocksStored", "BlocksRemoved", "KvStored", "KvRemoved"):
            if "runs" in event:
                content = [(run[0], block) for run in event["runs"] for block in range(run[1], run[2])]
            else:
                content = event["exts"]
            for first in content[::2]:
                name = names.setdefault(first, chr(ord("a") + len(names)))
                found.append(f"{at_ms:g} {'+' if kind.endswith('Stored') else '-'}{name} {event['tier'][:2]}")
    return found


def of(prompt: str, run: Run) -> list[str]:
    return [line for line in told(run) if line.split()[1][1:] == prompt]


CASES = {
    "C1 to C3": (
        "abcd",
        (),
        ["130 +a G1", "141 +a G2", "1130 -a G1", "2140 -a G2"],
        ["130 +a G1", "2140 -a G1"],
    ),
    "C4 as it is copied": (
        "abcd",
        DISK,
        ["130 +a G1", "141 +a G2", "153 +a G3", "1130 -a G1", "2140 -a G2"],
        ["130 +a G1"],
    ),
    "C4 of what has left the device": (
        "abcde",
        (*DISK, "workers.kvbm.cpu_trigger=on_evict"),
        ["130 +a G1", "1011 +a G2", "1023 +a G3", "1130 -a G1", "3010 -a G2"],
        ["130 +a G1"],
    ),
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("leap", [True, False])
def test_c1_to_c4_what_is_published(case: str, index: str, leap: bool, tmp_path: Path) -> None:
    names, sets, *expected = CASES[case]
    for events, lines in zip((PER_TIER, DEDUPE), expected, strict=True):
        run = replay(asked(tmp_path, names), tmp_path / events, index, events, *sets, leap=leap)
        assert of("a", run) == lines
        assert ("published as one" in str(run.report.meta.cluster)) == (events == DEDUPE)


@pytest.mark.parametrize("index", INDEXES)
def test_c5_a_worker_that_starts_again_has_nothing(index: str, tmp_path: Path) -> None:
    """It dies with a in host memory and b on the device, and is asked for a again."""
    trace = asked(tmp_path, "abca")
    dies = faults(tmp_path, 'kind = "worker_down"\nworker = "pool-0"\nat_ms = 1500\nfor_ms = 400')
    first = ["130 +a G1", "1130 +b G1"]
    again = ["2130 +c G1", "3130 +a G1"]
    run = replay(trace, tmp_path / DEDUPE, index, DEDUPE, dies)
    assert told(run) == first + again
    ups = [(event["at_s"], event["epoch"]) for event in events_of(run) if event["type"] == "WorkerUp"]
    assert ups == [(0, 0), (1.9, 1)]
    assert hits(run) == {"lookups": 8, "miss_absent": 8}
    copies = ["141 +a G2", "1130 -a G1", "1141 +b G2", "2141 +c G2", "3130 -c G1", "3141 +a G2"]
    each = told(replay(trace, tmp_path / PER_TIER, index, PER_TIER, dies))
    assert sorted(each) == sorted(first + again + copies)


@pytest.mark.parametrize("index", INDEXES)
def test_a_worker_that_comes_back_with_what_it_has_tells_it_as_it_is_then(index: str, tmp_path: Path) -> None:
    """It is cut off and taken for lost, and is back while it computes c, for nobody. a lies in host memory; b has left
    the device, of which no event has told yet, and host memory never had it."""
    full = 'kind = "tier_full"\ntier = "g2"\nat_ms = 1000'
    cut = 'kind = "partition"\nworker = "pool-0"\nat_ms = 2010\nfor_ms = 50\n'
    both = faults(tmp_path, full, cut + 'detect = "disconnect"\ndetection_delay_ms = 20')
    run = replay(asked(tmp_path, "abcb"), tmp_path / "run", index, DEDUPE, both)
    *said, last = told(run)
    if index == "simulated":
        assert said == ["130 +a G1", "1130 +b G1", "2060 +a G1", "2060 +c G1", "3130 -c G1"]
    else:
        assert said == ["130 +a G1", "1130 +b G1", "3130 -c G1"]
        first, again = [event["entries"] for event in events_of(run) if event["type"] == "IndexDump"]
        assert first == []
        assert [(len(entry["exts"]), entry["tiers"]) for entry in again] == [(2, ["G1_DEVICE"])] * 2
    assert last == "3130 +b G1"
    assert [row["overlap_blocks"] for row in run.rows("decisions")] == [0, 0, 0, 0]


@pytest.mark.parametrize("index", INDEXES)
def test_c6_a_store_that_failed_is_not_published(index: str, tmp_path: Path) -> None:
    full = faults(tmp_path, 'kind = "tier_full"\ntier = "g2"\nat_ms = 0\nuntil_ms = 900')
    for events in (PER_TIER, DEDUPE):
        run = replay(asked(tmp_path, "ab"), tmp_path / events, index, events, full)
        assert of("a", run) == ["130 +a G1", "1130 -a G1"]
        assert run.report.meta.kvbm["edges"]["g2"]["failed_writes"] == 2


@pytest.mark.parametrize("index", INDEXES)
def test_a_tier_that_is_lost_takes_along_what_no_other_tier_has(index: str, tmp_path: Path) -> None:
    """a is in host memory alone, b on the device too."""
    down = faults(tmp_path, 'kind = "tier_down"\ntier = "g2"\nat_ms = 1500')
    trace = asked(tmp_path, "abc")
    assert told(replay(trace, tmp_path / DEDUPE, index, DEDUPE, down)) == [
        "130 +a G1", "1130 +b G1", "1500 -a G1", "2130 -b G1", "2130 +c G1",
    ]  # fmt: skip
    each = told(replay(trace, tmp_path / PER_TIER, index, PER_TIER, down))
    assert "1500 clear G2" in each
    assert "2130 -b G1" in each
    on_disk = replay(trace, tmp_path / "disk", index, DEDUPE, down, *DISK)
    assert told(on_disk) == ["130 +a G1", "1130 +b G1", "2130 +c G1"], "the disk has both"


@pytest.mark.parametrize("index", INDEXES)
def test_what_all_workers_share_is_published_by_nobody_who_names_no_tier(index: str, tmp_path: Path) -> None:
    remote = ("workers.kvbm.remote=true", "workers.kvbm.remote_offload=presence")
    trace = asked(tmp_path, "abcd")
    assert any(line.endswith("+a G4") for line in told(replay(trace, tmp_path / PER_TIER, index, PER_TIER, *remote)))
    run = replay(trace, tmp_path / DEDUPE, index, DEDUPE, *remote)
    assert of("a", run) == ["130 +a G1", "2140 -a G1"]
    assert run.report.meta.kvbm["edges"]["g4"]["stored"] == 8


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_is_lost_comes_back_by_what_was_published(index: str, tmp_path: Path) -> None:
    """b is on the device, a in host memory; that is one run of each, told at once, and a is found where it lies."""
    lost = faults(tmp_path, 'kind = "index_restart"\nat_ms = 1500')
    trace = asked(tmp_path, "aba")
    run = replay(trace, tmp_path / "run", index, DEDUPE, lost)
    assert hits(run) == {"lookups": 6, "g2": 2, "miss_absent": 4}
    assert [row["overlap_blocks"] for row in run.rows("decisions")] == [0, 0, 2], "two blocks, as if on the device"
    each = replay(trace, tmp_path / "each", index, PER_TIER, lost)
    assert [row["overlap_blocks"] for row in each.rows("decisions")] == [0, 0, 0]


def test_found_is_the_same_whatever_is_published_where_nobody_listens(tmp_path: Path) -> None:
    trace = asked(tmp_path, "abcabdeab")
    common = (*HOST, *DISK, "workers.kvbm.disk_cache_tokens=448", "router.mode=round-robin", "allow_no_effect=true")
    runs = [
        toy(trace, tmp_path / events, *common, f"workers.kvbm.events={events}", key_tokens=64, workers=2)
        for events in (PER_TIER, DEDUPE)
    ]
    assert len({json.dumps(hits(run), sort_keys=True) for run in runs}) == 1
    assert runs[0].report.meta.kvbm == runs[1].report.meta.kvbm
    assert runs[0].ms("ttft_s") == runs[1].ms("ttft_s")


def test_groups_that_share_a_tier_publish_alike(tmp_path: Path) -> None:
    config = tmp_path / "two.toml"
    group = '[[workers]]\nname = "{0}"\n[workers.kvbm]\nremote = true\nevents = "{1}"\n'
    config.write_text(group.format("a", "per_tier") + group.format("b", "dedupe") + '[router]\nmode = "kv"\n')
    with pytest.raises(ConfigError, match=r"kvbm\.events: groups that share a tier \(kvbm\.remote\) say a = per_tier"):
        run(asked(tmp_path, "a"), tmp_path / "run", config_file=config)


def test_decode_workers_that_say_nothing_have_nothing_to_say_in_one_account(tmp_path: Path) -> None:
    config = tmp_path / "legs.toml"
    group = '[[workers]]\nname = "{0}"\nrole = "{0}"\n[workers.kvbm]\ncpu_cache_gb = 100\nevents = "dedupe"\n'
    text = group.format("prefill") + group.format("decode") + '[router]\nmode = "kv"\n[disaggregation]\nconditional = '
    config.write_text(text + '"off"\n')
    with pytest.raises(ConfigError, match=r"decode\.kvbm\.events has no effect: disaggregation\.conditional"):
        run(asked(tmp_path, "a"), tmp_path / "off", config_file=config)
    config.write_text(text + '"isl"\n')
    assert run(asked(tmp_path, "ab"), tmp_path / "isl", "trace.hash_block_tokens=64", config_file=config).report
