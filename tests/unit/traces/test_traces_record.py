"""A journal read as a trace: arrivals, lengths and content as observed, sessions that wait again, and what never ended.

Journals are written by the journal's own code, so a change of its form is noticed here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from policies.cluster.blocks import ContentTree
from policies.cluster.events import (
    Event,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WorkerUp,
)
from policies.cluster.ids import BlockHash, RequestId, Role, WorkerId
from policies.cluster.journal import Header, Journal
from traces.errors import TraceError
from traces.load import ReadOptions, Trace, open_trace
from traces.stats import describe

WORKER = WorkerId(0)
HEADER = Header(versions={}, config={}, seed=0, policies=())


def up(block_size: int = 16) -> WorkerUp:
    return WorkerUp(
        at_s=0.0, worker_id=WORKER, name="w0", role=Role.MIXED, block_size=block_size, total_blocks=100,
        max_batched_tokens=8192, max_num_seqs=256,
    )  # fmt: skip


def arrived(at_s: float, name: str, isl: int = 40, **more: object) -> RequestArrived:
    return RequestArrived(at_s=at_s, request_id=RequestId(name), isl=isl, **more)  # type: ignore[arg-type]


def finished(at_s: float, name: str, output_tokens: int = 5) -> RequestFinished:
    return RequestFinished(at_s=at_s, request_id=RequestId(name), worker_id=WORKER, output_tokens=output_tokens)


def journal(path: Path, events: Sequence[Event]) -> Path:
    with path.open("w") as file:
        log = Journal(file.write, HEADER)
        for event in events:
            log.note(event, ())
        log.flush()
    return path


def rows(trace: Trace) -> list[dict[str, object]]:
    return [row for batch in trace for row in batch.to_pylist()]


def test_arrivals_and_lengths_are_those_observed(tmp_path: Path) -> None:
    path = journal(
        tmp_path / "journal.jsonl",
        [
            up(),
            arrived(2.5, "a", isl=7, max_tokens=9, priority=2, lora="l"),
            arrived(3.0, "b"),
            finished(3.5, "b", 4),
            finished(9.0, "a", 3),
        ],
    )
    trace = open_trace(path)
    assert (trace.info.format, trace.info.time_unit, trace.info.hash_block_tokens) == ("journal", "s", 16)
    found = rows(trace)
    assert [(row["request_id"], row["arrival_s"], row["isl"], row["osl"]) for row in found] == [
        ("a", 0.0, 7, 3), ("b", 0.5, 40, 4),
    ]  # fmt: skip
    assert [found[0][name] for name in ("max_tokens", "priority", "lora", "hash_ids")] == [9, 2, "l", None]


@pytest.mark.parametrize("batch_rows", [1, 3, 1000])
def test_content_shares_what_the_run_shared(tmp_path: Path, batch_rows: int) -> None:
    """Prompts of keys of 16 tokens each, in blocks of 16: the journal keeps which blocks are the same."""
    tree = ContentTree(key_tokens=16, block_size=16)
    prompts = [([1, 2, 3], 48), ([1, 2, 9], 40), ([1, 2, 3, 4], 64), ([5], 10), ([1, 2, 3], 48)]
    paths = [tree.path(keys, isl) for keys, isl in prompts]
    events: list[Event] = [up()]
    for i, ((_, isl), blocks) in enumerate(zip(prompts, paths, strict=True)):
        events += [arrived(float(i), str(i), isl, blocks=blocks), finished(i + 0.5, str(i))]
    trace = open_trace(journal(tmp_path / "journal.jsonl", events))
    ids = [row["hash_ids"] for batch in trace.batches(batch_rows) for row in batch.to_pylist()]
    assert [len(each) for each in ids] == [3, 3, 4, 1, 3]
    shared = [[sum(1 for x, y in zip(a, b, strict=False) if x == y) for b in ids] for a in ids]
    assert shared == [[3, 2, 3, 0, 3], [2, 3, 2, 0, 2], [3, 2, 4, 0, 3], [0, 0, 0, 1, 0], [3, 2, 3, 0, 3]]
    assert describe(tmp_path / "journal.jsonl").hit_rate_tokens == pytest.approx((32 + 48 + 0 + 47) / 210)


def test_content_that_the_run_has_forgotten_is_known_again_by_its_hashes(tmp_path: Path) -> None:
    """Nobody holds the first prompt when the second comes: a new branch, and the same blocks in the engine."""
    hashes = (BlockHash(7), BlockHash(2**64 - 5))
    events: list[Event] = [up()]
    for number, local in enumerate((hashes, (*hashes, BlockHash(9)), None)):
        tree = ContentTree(key_tokens=16, block_size=16)
        for _ in range(number):
            tree.private()  # so that no number comes twice
        isl = 32 if local is None else 16 * len(local)
        path = tree.path([1, 2, 3], isl)
        events += [
            arrived(float(number), str(number), isl, blocks=path, local_hashes=local),
            finished(number + 0.5, str(number)),
        ]
    first, second, third = (row["hash_ids"] for row in rows(open_trace(journal(tmp_path / "journal.jsonl", events))))
    assert first == second[:2] == [7, -5]
    assert second[2] == 9
    assert not {*third} & {*second}


def test_a_later_turn_waits_for_its_answer_again(tmp_path: Path) -> None:
    path = journal(
        tmp_path / "journal.jsonl",
        [
            arrived(0.0, "a", session_id="s"),
            finished(2.0, "a"),
            arrived(5.0, "b", session_id="s"),
            arrived(6.0, "c", session_id="s"),
            finished(7.0, "b"),
            finished(8.0, "c"),
        ],
    )
    found = rows(open_trace(path))
    # c came while b was still running, so it waited for nothing
    assert [(row["arrival_s"], row["delay_s"]) for row in found] == [(0.0, None), (None, 3.0), (6.0, None)]


def test_what_has_no_output_length_is_left_out_and_counted(tmp_path: Path) -> None:
    path = journal(
        tmp_path / "journal.jsonl",
        [
            *(arrived(float(i), name) for i, name in enumerate(("ok", "no", "cut", "lost", "open"))),
            finished(6.0, "ok"),
            RequestRejected(at_s=6.0, request_id=RequestId("no"), reason="full"),
            RequestCancelled(at_s=6.5, request_id=RequestId("cut"), worker_id=WORKER, output_tokens=2),
            RequestFailed(at_s=7.0, request_id=RequestId("lost"), reason="lost", output_tokens=0),
        ],
    )
    trace = open_trace(path)
    assert [(row["request_id"], row["osl"]) for row in rows(trace)] == [("ok", 5), ("cut", 2)]
    assert trace.skipped == {"no output tokens": 2, "not ended in the journal": 1}
    assert trace.remarks == {"cancelled, with the output delivered until then": 1}
    kept = open_trace(path, ReadOptions(default_osl=99))
    assert [(row["request_id"], row["osl"]) for row in rows(kept)] == [
        ("ok", 5), ("no", 99), ("cut", 2), ("lost", 99), ("open", 99),
    ]  # fmt: skip


def test_a_turn_after_one_that_is_left_out_keeps_its_time(tmp_path: Path) -> None:
    path = journal(
        tmp_path / "journal.jsonl",
        [
            arrived(0.0, "x"),
            arrived(0.0, "a", session_id="s"),
            RequestRejected(at_s=1.0, request_id=RequestId("a"), reason="full"),
            arrived(5.0, "b", session_id="s"),
            finished(6.0, "x"),
            finished(7.0, "b"),
        ],
    )
    assert [(row["arrival_s"], row["delay_s"]) for row in rows(open_trace(path))] == [(0.0, None), (5.0, None)]


def test_workers_of_different_block_sizes_leave_the_content_unknown(tmp_path: Path) -> None:
    path = journal(tmp_path / "journal.jsonl", [up(16), up(64), arrived(0.0, "a"), finished(1.0, "a")])
    info = open_trace(path).info
    assert info.hash_block_tokens is None
    assert "hash_ids" not in info.columns


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = journal(tmp_path / "journal.jsonl", [up(), arrived(0.0, "a"), finished(1.0, "a")])
    with path.open("a") as file:
        file.write('{"seq": 3, "event": {"type": "RequestArr')
    with pytest.raises(TraceError, match=r"journal\.jsonl:5: not JSON"):
        rows(open_trace(path))
    assert len(rows(open_trace(path, ReadOptions(on_bad_row="skip")))) == 1


def test_blocks_that_were_never_defined_are_named(tmp_path: Path) -> None:
    path = journal(tmp_path / "journal.jsonl", [up(), finished(9.0, "none")])
    blocks = {"pieces": [["17", 2]], "blocks": 2}
    event = {"type": "RequestArrived", "at_s": 0.0, "request_id": "a", "isl": 40, "blocks": blocks}
    end = {"type": "RequestFinished", "at_s": 1.0, "request_id": "a", "worker_id": 0, "output_tokens": 1}
    with path.open("a") as file:
        file.writelines(json.dumps({"seq": 9, "event": each, "actions": []}) + "\n" for each in (event, end))
    with pytest.raises(TraceError, match=r"journal\.jsonl:4: blocks cannot be followed"):
        rows(open_trace(path))


def test_a_journal_without_requests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a header but no row"):
        rows(open_trace(journal(tmp_path / "journal.jsonl", [up()])))
