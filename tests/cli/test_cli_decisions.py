"""`twin explain`, and what a run says of its router, on a case that a person can check by hand.

Two workers, blocks of 64 tokens, 1 ms a prompt token, 10 ms a decode step. Three requests with one prompt of 640 tokens
(10 blocks) at 0, 5 and 10 s, and one of another prompt at 15 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SETS = (
    "--workers", "2", "--router", "kv", "--block-size", "64", "--hash-block-tokens", "64", "--latency", "fixed",
    "--set", "workers.latency.prefill_s_per_token=0.001", "--set", "workers.latency.decode_s=0.01",
    "--set", "router.tie_break=lowest_id",
)  # fmt: skip


def rows(path: Path, requests: list[tuple[float, list[int]]], **more: object) -> Path:
    lines = [
        {"timestamp": at_ms, "input_length": 64 * len(ids), "output_length": 2, "hash_ids": ids} | more
        for at_ms, ids in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def four(tmp_path: Path) -> Path:
    same, other = list(range(10)), list(range(100, 110))
    return rows(tmp_path / "four.jsonl", [(0, same), (5000, same), (10_000, same), (15_000, other)])


def told(twin: Any, run: Path, *asked: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(twin("explain", run, *asked, "--json").out)
    return found


def test_a_decision_is_told_with_its_terms_and_its_runner_up(twin, four: Path, tmp_path: Path) -> None:
    """The second request: 10 blocks of prompt less 9 cached (its last token is computed), 10 of decode: 11 and 20."""
    run = tmp_path / "run"
    assert twin("replay", four, *SETS, "--explain", "--no-html", "--out", run).code == 0
    shown = twin("explain", run, "1")
    assert shown.code == 0
    assert shown.out.splitlines() == [
        "request 1, row 1: decided at 5.00 s, to pool-0 (mode kv, rule min)",
        "  reason     cost 11.00, 9 blocks cached, 0 open",
        "  came to    TTFT 64.0 ms",
        "  runner-up  pool-1; the chosen one against it: cost -9.000, credit +9.000",
        "  regret     0 blocks above the cheapest; 0 blocks of overlap less than the longest",
        "     worker   cost  prompt  credit  decode  open  cached",
        "  >  pool-0  11.00   10.00   9.000   10.00     0       9",
        "     pool-1  20.00   10.00       0   10.00     0       0",
    ]
    first, second = told(twin, run, "0", "1")
    assert [(one["worker_id"], one["rule"], one["runner_up"]) for one in (first, second)] == [
        (0, "tie", 1), (0, "min", 1),
    ]  # fmt: skip
    assert [[c["cost"] for c in one["candidates"]] for one in (first, second)] == [[20.0, 20.0], [11.0, 20.0]]
    assert (second["regret_blocks"], second["overlap_lost_blocks"], second["ttft_s"]) == (0.0, 0, pytest.approx(0.064))


def test_the_slowest_are_told_when_nobody_is_asked_for(twin, four: Path, tmp_path: Path) -> None:
    twin("replay", four, *SETS, "--explain", "--no-html", "--out", tmp_path / "run")
    *slow, last = [one["row"] for one in told(twin, tmp_path / "run")]
    assert (sorted(slow), last) == ([0, 3], 1), "640, 640 and 64 ms"


def test_who_waits_in_the_router_has_no_terms_to_record(twin, tmp_path: Path) -> None:
    """Four prompts at one instant: two workers take one each, two wait."""
    trace = rows(tmp_path / "busy.jsonl", [(0, [n]) for n in range(4)])
    run, queue = tmp_path / "run", ("--set", "router.queue.prefill_busy_tokens=10")
    assert twin("replay", trace, *SETS, *queue, "--explain", "--no-html", "--out", run).code == 0
    waits, goes = twin("explain", run, "3").out.split("\n\n")
    assert "to nobody yet" in waits
    assert "terms      none: no worker was chosen" in waits
    assert "runner-up" in goes


def test_without_terms_it_says_how_to_get_them_and_strange_names_are_refused(twin, four: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    twin("replay", four, *SETS, "--no-html", "--out", run)
    assert "terms      not recorded; `twin replay ... --explain` records them" in twin("explain", run, "1").out
    ended = twin("explain", run, "1", "nobody", "77")
    assert (ended.code, ended.out) == (2, "")
    assert "no request has the id or the row nobody, 77" in ended.err


def test_a_worker_that_was_left_out_says_why_and_a_pin_may_cost(twin, four: Path, tmp_path: Path) -> None:
    drain = tmp_path / "drain.toml"
    drain.write_text('version = 1\n[[faults]]\nat_ms = 4000\nkind = "drain"\nworker = "pool-0"\n')
    run = tmp_path / "run"
    twin("replay", four, *SETS, "--explain", "--no-html", "--faults", drain, "--out", run)
    (second,) = told(twin, run, "1")
    assert [(c["worker_id"], c["why_not"]) for c in second["candidates"]] == [(0, "draining"), (1, None)]
    assert second["runner_up"] is None
    assert "nobody else could be chosen" in twin("explain", run, "1").out


def test_a_run_says_of_its_router_what_can_be_counted_by_hand(twin, four: Path, tmp_path: Path) -> None:
    """Of 40 blocks, 18 were computed before (9 each of two prompts); all of them were found: 0.45 reached of 0.45.

    Of four decisions, the second and the third differed in overlap. All of the first prompt went to worker 0, the other
    to worker 1 or 0: that worker has nothing open either, so the tie goes to worker 0 too: shares 4 and 0, Jain 1/2.
    """
    run = tmp_path / "run"
    ended = twin("replay", four, *SETS, "--explain", "--out", run)
    report = json.loads((run / "report.json").read_text())
    assert (report["hit_bound"]["upper_bound"], report["hit_bound"]["reached"]) == (18 / 40, 18 / 40)
    assert (report["hit_bound"]["ideal_blocks"], report["hit_bound"]["prompt_blocks"]) == (18, 40)
    routing = report["routing"]
    assert (routing["decisions"], routing["effectiveness"], routing["non_max_overlap"]) == (4, 0.5, 0)
    assert routing["explained"]["regret_blocks"]["max"] == 0.0
    assert (routing["oracle"]["decisions"], routing["oracle"]["best_chosen"]) == (4, 4)
    (shares,) = report["shares"]
    assert (shares["requests_share"], shares["requests_fairness"]) == ([0.0, 1.0], 0.5)
    words = " ".join(ended.out.split())
    assert "upper bound 45.0 %" in words
    assert "cost regret 0: each of 4 decisions took a cheapest worker" in words
    assert "workers differed in cached blocks in 50.0 % of them" in words
    assert "runner-up" in (run / "report.html").read_text()


def test_who_was_shed_and_why(twin, tmp_path: Path) -> None:
    """Ten at once on two workers of one running and two waiting each: six go, four are refused."""
    burst = rows(tmp_path / "burst.jsonl", [(0, [n]) for n in range(10)])
    busy = ("--set", "router.busy.engine_running=1", "--set", "router.busy.engine_queue=2")
    ended = twin("replay", burst, *SETS, *busy, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (shed,) = report["ends"]
    assert (shed["status"], shed["code"], shed["requests"], shed["share"]) == ("rejected", "engine_limit", 4, 0.4)
    assert "4 x engine_limit" in " ".join(ended.out.split())
    assert "counted as overload" in " ".join(ended.out.split())
    assert "engine_limit (overload)" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(("requests", "warned"), [(99, False), (100, True)])
def test_a_router_that_never_had_a_choice_is_pointed_out_after_100_decisions(
    requests: int, warned: bool, twin, tmp_path: Path
) -> None:
    trace = rows(tmp_path / "apart.jsonl", [(100 * n, [10 * n, 10 * n + 1]) for n in range(requests)])
    ended = twin("replay", trace, *SETS, "--no-html", "--out", tmp_path / "run")
    said = "routing effectiveness 0" in " ".join((ended.out + ended.err).split())
    assert said is warned


def test_hits_by_tier_and_bytes_moved_are_drawn(twin, tmp_path: Path) -> None:
    """Of 9 blocks, the two of the first prompt come back from host memory at the end: 16.8 MB up."""
    prompts = ([1, 2], [3, 4], [5, 6], [1, 2, 7])
    trace = rows(tmp_path / "tiers.jsonl", [(1000 * n, ids) for n, ids in enumerate(prompts)])
    tier = ("cpu_cache_tokens=1024", "block_bytes=8388608", "cpu_trigger=on_evict", "cpu_latency_s=0")
    sets = [part for text in tier for part in ("--set", f"workers.kvbm.{text}")]
    run = tmp_path / "run"
    ended = twin("replay", trace, *SETS, *sets, "--workers", "1", "--kv-blocks", "3", "--out", run)
    assert ended.code == 0, ended.err
    hits = json.loads((run / "report.json").read_text())["meta"]["kvbm"]["hits"]
    assert (hits["lookups"], hits["g2"]) == (9, 2)
    page = (run / "report.html").read_text()
    assert "Hit rate by tier" in page
    assert "16.8 MB" in page
