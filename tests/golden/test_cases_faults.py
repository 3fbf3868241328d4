"""Acceptance cases C10, C21 and C22, and the tables of migrations and cancellations that stand behind them.

Each test names its case or its line of the table. Times are exact to 0.001 ms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cases_legs import HELD, config_file, watch
from toy import CASES, Run, toy
from toy import run as replayed

from twin.drill import longest_gap_s


def _scenario(folder: Path, **content: Any) -> Path:
    path = folder / "scenario.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _timeline(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))["timeline"]
    return found


# ---------------------------------------------------------------- C10


@pytest.mark.parametrize("limit", [0, 1])
def test_c10_a_dead_worker_gets_nothing_more(limit: int, tmp_path: Path) -> None:
    sets = [f"faults.path={CASES / 'c10_faults.json'}", f"resilience.migration_limit={limit}"]
    run = toy("c10_rr.jsonl", tmp_path / "run", *sets, serial=False, workers=3)
    sent = [(row["row"], row["worker_id"]) for row in run.rows("decisions")]
    first = [(row, worker) for row, worker in sent if row < 3]
    assert first[:3] == [(0, 0), (1, 1), (2, 2)]
    assert all(row["worker_id"] != 1 for row in run.rows("decisions") if row["at_s"] > 0.25)
    assert all(row["worker_id"] != 1 or row["at_s"] < 0.25 for row in run.rows("decisions"))
    status = run.requests("status")
    assert status == ["completed", "completed" if limit else "failed", *["completed"] * 5]
    made = run.requests("output_tokens")
    assert made == [100, 100 if limit else 14, *[100] * 5], "14 tokens by 250 ms, and never a short answer"
    later = [worker for row, worker in sent if row >= 3]
    assert sorted(later) == [0, 0, 2, 2]
    if not limit:
        assert "worker_lost" in run.requests("reason")[1]
    assert run.requests("migrations") == [0, limit, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------- C21


def test_c21_migration_loses_and_repeats_nothing(tmp_path: Path) -> None:
    run = toy("c21_migrate.jsonl", tmp_path / "run", f"faults.path={CASES / 'c21_faults.json'}", workers=2)
    assert run.ms("ttft_s") == [100]
    assert run.ms("last_token_s") == [392]
    assert run.requests("tpot_s") == [pytest.approx(0.01536842, abs=5e-9)]
    assert run.requests("output_tokens") == [20], "as many tokens as were asked for: none lost, none twice"
    assert run.requests("isl") == [100], "the client's prompt, not the 107 tokens that were computed again"
    assert run.requests("migrations") == [1]
    assert longest_gap_s(run.folder) == pytest.approx(0.112)
    again = [row for row in run.rows("steps") if row["worker_id"] == 1 and row["prefill_tokens"]]
    assert [(row["prefill_tokens"], row["start_s"], row["end_s"]) for row in again] == [(107, 0.165, 0.272)]
    assert run.report.counts.completed == 1
    (entry,) = _timeline(run)
    assert (entry["interrupted"], entry["tokens_carried"], entry["outcomes"]) == (1, 7, {"completed": 1})


_LINES = {
    "A1 nothing happens": ([], {}, (100, 290, 10, 10, 0)),
    "A2 dies at 165": ([("W0", 165)], {}, (100, 392, 15.36842, 112, 1)),
    "A3 known after 50 ms": ([("W0", 165)], {"detection_delay_ms": 50}, (100, 442, 18, 162, 1)),
    "A4 known by its lease": ([("W0", 165)], {"detect": "lease"}, (100, 10_392, 541.68421, 10_112, 1)),
    "A5 dies in its prefill": ([("W0", 55)], {}, (155, 345, 10, 10, 1)),
    "A6 the next one dies too": ([("W0", 165), ("W1", 300)], {}, (100, 500, 21.05263, 118, 2)),
    "A10 dies before the last token": ([("W0", 285)], {}, (100, 404, 16, 124, 1)),
    "A11 dies after the last token": ([("W0", 290.000001)], {}, (100, 290, 10, 10, 0)),
    "A12 as long as is allowed": ([("W0", 165)], {"migration_max_seq_len": 107}, (100, 392, 15.36842, 112, 1)),
}


_TOKEN_8_MS = {
    "A1 nothing happens": 170,
    "A2 dies at 165": 272,
    "A3 known after 50 ms": 322,
    "A4 known by its lease": 10_272,
    "A5 dies in its prefill": 225,
    "A6 the next one dies too": 272,
    "A10 dies before the last token": 170,
    "A11 dies after the last token": 170,
    "A12 as long as is allowed": 272,
}


@pytest.mark.parametrize("line", _LINES)
def test_migration_table_the_eighth_token(line: str, tmp_path: Path) -> None:
    """Step by step: the first token of an attempt comes with its prompt, each other one with a decode step."""
    deaths, more, _ = _LINES[line]
    run = _migrate(tmp_path, deaths, dict(more), limit=3, leap=False)
    ends = [row["end_s"] for row in run.rows("steps") if row["kind"] == "step"]
    assert len(ends) == 20, "a step that a death cut short gave no token"
    assert round(ends[7] * 1e3, 3) == _TOKEN_8_MS[line]


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
@pytest.mark.parametrize("line", _LINES)
def test_migration_table(line: str, leap: bool, tmp_path: Path) -> None:
    deaths, more, (ttft_ms, last_ms, itl_ms, gap_ms, migrations) = _LINES[line]
    run = _migrate(tmp_path, deaths, dict(more), limit=3, leap=leap)
    assert run.requests("status") == ["completed"]
    assert run.ms("ttft_s") == [ttft_ms]
    assert run.ms("last_token_s") == [last_ms]
    assert run.requests("tpot_s") == [pytest.approx(itl_ms / 1e3, abs=5e-9)]
    assert longest_gap_s(run.folder) * 1e3 == pytest.approx(gap_ms)
    assert run.requests("output_tokens") == [20]
    assert run.requests("migrations") == [migrations]


_FAILURES = {
    "A7 the limit is used up": ([("W0", 165), ("W1", 300)], {}, 1, "migration_limit", 10, 300),
    "A8 migration is off": ([("W0", 165)], {}, 0, "worker_lost", 7, 165),
    "A12 too long": ([("W0", 165)], {"migration_max_seq_len": 106}, 3, "migration_max_seq_len", 7, 165),
}


@pytest.mark.parametrize("line", _FAILURES)
def test_migration_that_is_not_made_ends_in_a_failure(line: str, tmp_path: Path) -> None:
    deaths, more, limit, code, delivered, failed_ms = _FAILURES[line]
    run = _migrate(tmp_path, deaths, dict(more), limit=limit, journal=True)
    lines = (run.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    events = [json.loads(line)["event"] for line in lines]
    assert [round(e["at_s"] * 1e3, 3) for e in events if e["type"] == "RequestFailed"] == [failed_ms]
    assert run.requests("status") == ["failed"]
    assert run.requests("reason")[0].startswith(f"{code}: ")
    assert run.requests("output_tokens") == [delivered], "what the client got; not a short success"
    assert run.ms("ttft_s") == [100]
    assert run.requests("e2e_s") == [None]


def test_a9_the_carried_prefix_may_be_cached_where_it_goes(tmp_path: Path) -> None:
    trace = tmp_path / "warm.jsonl"
    prompt = list(range(180, 187))
    rows = [(0, 96, 1, [*prompt[:6], 999]), (0, 100, 1, prompt), (1000, 100, 20, prompt)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": keys}) + "\n"
            for t, i, o, keys in rows
        ),
        encoding="utf-8",
    )
    # row 2 goes to W0, which has the prompt too: what counts here is W1
    scenario = _scenario(tmp_path, workers=["W0", "W1"], migration_limit=1, faults=[_down("W0", 1069)])
    run = toy(trace, tmp_path / "run", f"faults.path={scenario}", workers=2)
    assert [row["worker_id"] for row in run.rows("decisions")] == [0, 1, 0, 1]
    # 4 tokens are left to compute on W0: first token at 1004, the 7th at 1064; W1 computes 107 - 96 = 11
    assert run.ms("first_token_s")[2] == 1004
    again = [row for row in run.rows("steps") if row["worker_id"] == 1 and row["start_s"] > 1]
    assert (again[0]["prefill_tokens"], again[0]["start_s"], again[0]["end_s"]) == (11, 1.069, 1.08)
    assert longest_gap_s(run.folder) == pytest.approx(0.016)
    assert run.ms("last_token_s")[2] == 1080 + 120


def test_a14_the_client_leaves_while_its_request_migrates(tmp_path: Path) -> None:
    scenario = _scenario(
        tmp_path,
        workers=["W0", "W1"],
        migration_limit=3,
        detection_delay_ms=50,
        faults=[_down("W0", 165)],
        client_disconnects=[{"at_ms": 200, "row": 0}],
    )
    run = toy("c21_migrate.jsonl", tmp_path / "run", f"faults.path={scenario}", workers=2)
    assert run.requests("status") == ["cancelled"]
    assert run.ms("ttft_s") == [100]
    assert run.requests("output_tokens") == [7]
    assert all(row["worker_id"] == 0 for row in run.rows("steps")), "W1 is never charged"
    assert len(run.rows("decisions")) == 1


def _down(worker: str, at_ms: float, **more: Any) -> dict[str, Any]:
    return {"at_ms": at_ms, "kind": "worker_down", "worker": worker, **more}


def _migrate(folder: Path, deaths: list[tuple[str, float]], more: dict[str, Any], *, limit: int, **options: Any) -> Run:
    detect = {"detect": more.pop("detect")} if "detect" in more else {}
    scenario = _scenario(
        folder,
        workers=["W0", "W1", "W2"],
        migration_limit=limit,
        faults=[_down(worker, at_ms, **detect) for worker, at_ms in deaths],
        expect=[{"invariants": "all"}],
        **more,
    )
    # after W0 is lost, the second turn would go to W2; least-loaded with the lowest id takes W1
    sets = [f"faults.path={scenario}", "router.mode=least-loaded", "router.tie_break=lowest_id"]
    return toy("c21_migrate.jsonl", folder / "run", *sets, workers=3, **options)


# ---------------------------------------------------------------- C22


def _cancel(folder: Path, leaves: list[dict[str, Any]], **options: Any) -> Run:
    scenario = _scenario(folder, client_disconnects=leaves, expect=[{"invariants": "all"}])
    return toy("c22_cancel.jsonl", folder / "run", f"faults.path={scenario}", **options)


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_c22_when_the_client_leaves_the_engine_stops(leap: bool, tmp_path: Path) -> None:
    faults = f"faults.path={CASES / 'c22_faults.json'}"
    run = toy("c22_cancel.jsonl", tmp_path / "run", faults, leap=leap)
    assert run.requests("status") == ["cancelled", "completed"]
    assert run.ms("ttft_s")[1] == 360, "the step that runs at 305 ends at 310, then 100 ms of prefill"
    assert run.requests("output_tokens") == [21, 1]
    assert run.report.latency.ttft_s.count == 1, "the cancelled request is in no latency figure"
    assert (run.report.counts.cancelled, run.report.counts.failed) == (1, 0)
    last = run.rows("steps")[-1]
    assert (last["running"], last["waiting"]) == (1, 0)
    assert run.rows("steps")[-1]["end_s"] == 0.41


_WHOLE: dict[str, object] = {"max_num_seqs": 1}
_CHUNKS: dict[str, object] = {
    "max_num_seqs": 1,
    "chunked_prefill": "true",
    "exclusive_prefill": "false",
    "max_num_batched_tokens": 20,
}


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
@pytest.mark.parametrize(
    ("prefill", "stops_ms"), [(_WHOLE, 100), (_CHUNKS, 60)], ids=["in one step", "in chunks of 20 ms"]
)
def test_c22_in_a_split_deployment_the_prefill_worker_stops_too(
    prefill: dict[str, object], stops_ms: float, leap: bool, tmp_path: Path
) -> None:
    """The client leaves at 45 ms, in the prefill: its step ends, and the second request is next."""
    looks = (44, stops_ms + 99, stops_ms + 101)
    seen = watch(
        "c22_cancel.jsonl", tmp_path, prefill=prefill, decode={}, table=HELD, looks_ms=looks, leaves=(0, 45), leap=leap
    )
    assert seen.status == {0: "cancelled", 1: "completed"}
    assert seen.latency_ms(1) == stops_ms + 100 - 50
    assert seen.made[0] == 0
    first, second, last = (seen.blocks[at_ms] for at_ms in looks)
    assert first[0] > 0
    assert second == (7, 0), "only the second request's"
    assert last == (0, 0)
    assert all(row[0] == 0 for row in seen.steps), "the decode worker never runs"
    assert seen.blocks[float("inf")] == (0, 0)


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_c22_in_a_split_deployment_the_decode_worker_stops(leap: bool, tmp_path: Path) -> None:
    looks = (304, 311)
    seen = watch(
        "c22_cancel.jsonl",
        tmp_path,
        prefill={"max_num_seqs": 1},
        decode={},
        table=HELD,
        looks_ms=looks,
        leaves=(0, 305),
        leap=leap,
    )
    assert seen.status == {0: "cancelled", 1: "completed"}
    assert seen.made[0] == 21
    assert seen.latency_ms(1) == 150
    before, after = (seen.blocks[at_ms] for at_ms in looks)
    assert before[0] == 0
    assert before[1] > 0
    assert after == (0, 0)
    assert seen.blocks[float("inf")] == (0, 0)


def test_b2_a_client_that_stays_keeps_the_engine(tmp_path: Path) -> None:
    run = toy("c22_cancel.jsonl", tmp_path / "run")
    assert run.ms("ttft_s")[1] == 10_140


def test_b3_leaving_in_the_prefill_frees_the_engine_at_the_end_of_the_step(tmp_path: Path) -> None:
    run = _cancel(tmp_path, [{"at_ms": 40, "row": 0}])
    assert run.requests("output_tokens") == [0, 1]
    assert run.ms("ttft_s") == [None, 150]


def test_b4_leaving_the_queue_changes_nothing_for_others(tmp_path: Path) -> None:
    run = _cancel(tmp_path, [{"at_ms": 200, "row": 1}])
    assert run.requests("status") == ["completed", "cancelled"]
    assert run.requests("admit_s")[1] is None
    assert run.ms("last_token_s") == [10_090, None]


def test_b7_leaving_after_the_last_token_is_no_cancellation(tmp_path: Path) -> None:
    with_it = _cancel(tmp_path, [{"at_ms": 10_091, "row": 0}])
    assert with_it.requests("status") == ["completed", "completed"]
    told = json.loads((with_it.folder / "faults.json").read_text(encoding="utf-8"))
    assert told["never_applied"] == [
        "client_disconnects[0]: client_disconnect at 10.091 s was never applied: the request had ended"
    ]


# ---------------------------------------------------------------- partitions of a split deployment

SLOW_WIRE = "kv_bytes_per_token = 1000000\nbandwidth_gb_per_s = 1.0"
"""The KV of a prompt of 100 tokens takes 100 ms: computed at 100, moved at 200, tokens from 210 to 400."""

_PARTITIONS = {
    "nothing happens": ([], SLOW_WIRE, (210, 400, 0)),
    "a transfer breaks off and is made again": ([{"between": ["prefill", "decode"]}], SLOW_WIRE, (410, 600, 0)),
    "its KV is held under a lease": (
        [{"between": ["prefill-0", ["decode-0"]]}],
        f"{SLOW_WIRE}\nlease_s = 0.1",
        (410, 600, 1),  # sent again at 250, 4 tokens to compute, sent at 300
    ),
    "the decode worker is cut off": ([{"worker": "decode-0", "detect": "silent"}], SLOW_WIRE, (410, 600, 0)),
    "the prefill worker is cut off": ([{"role": "prefill"}], SLOW_WIRE, (410, 600, 0)),
    "the prompt is computed meanwhile": (
        [{"worker": "prefill-0", "at_ms": 50, "until_ms": 150}], SLOW_WIRE, (260, 450, 0),
    ),
    "the answer begins meanwhile": (
        [{"worker": "decode-0", "at_ms": 205, "until_ms": 255}], SLOW_WIRE, (255, 400, 0),
    ),
    "the answer ends meanwhile": ([{"worker": "decode-0", "at_ms": 255, "until_ms": 900}], SLOW_WIRE, (210, 900, 0)),
    "taken for lost": (  # at 150: without a prefill worker it runs whole where it decodes, from then on
        [{"worker": "prefill-0", "at_ms": 120, "until_ms": 320, "detection_delay_ms": 30}], SLOW_WIRE, (250, 440, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
@pytest.mark.parametrize("line", _PARTITIONS)
def test_partitions_of_a_split_deployment(line: str, leap: bool, tmp_path: Path) -> None:
    faults, table, (ttft_ms, last_ms, migrations) = _PARTITIONS[line]
    run = _parted(tmp_path, faults, table, limit=1, leap=leap)
    assert run.requests("status") == ["completed"]
    assert run.ms("ttft_s") == [ttft_ms]
    assert run.ms("last_token_s") == [last_ms]
    assert run.requests("migrations") == [migrations]
    assert run.requests("output_tokens") == [20]


def test_a_hand_off_whose_lease_ends_in_a_partition_fails_without_migration(tmp_path: Path) -> None:
    run = _parted(tmp_path, [{"between": ["prefill", "decode"]}], f"{SLOW_WIRE}\nlease_s = 0.1", limit=0)
    assert run.requests("status") == ["failed"]
    assert "its KV could not be fetched within the lease of 0.1 s" in run.requests("reason")[0]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"between": ["prefill", "decode"]}, "stuck: partition between prefill and decode lasts to the end of the run"),
        ({"worker": "decode-0", "detect": "silent"}, "stuck: worker decode-0 is cut off to the end of the run"),
    ],
)
def test_a_partition_that_lasts_fails_what_waits_for_its_end(fault: dict[str, Any], says: str, tmp_path: Path) -> None:
    """The lease of 60 s is over before the end in the first case only if nobody could fetch: the peer has none."""
    run = _parted(tmp_path, [{"until_ms": None, **fault}], SLOW_WIRE, limit=0, compat="dynamo-1.6.1")
    assert run.requests("reason") == [says]


def _parted(
    folder: Path, faults: list[dict[str, Any]], table: str, *, limit: int, leap: bool = True, **more: Any
) -> Run:
    usual = {"at_ms": 150, "until_ms": 300, "kind": "partition"}
    entries = [{key: value for key, value in (usual | fault).items() if value is not None} for fault in faults]
    scenario = _scenario(folder, migration_limit=limit, faults=entries, expect=[{"invariants": "all"}])
    file = config_file(folder, prefill={}, decode={}, table=table)
    sets = [f"faults.path={scenario}", *(f'{key}="{value}"' for key, value in more.items())]
    return replayed(CASES / "c21_migrate.jsonl", folder / "run", *sets, config_file=file, leap=leap)
