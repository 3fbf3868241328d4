"""Acceptance cases: small situations that a person can check by hand, with the figures that must come out.

Each test names its case. Times are exact to 0.001 ms. C02 and C04 are in tests of the reports; C09's cost terms are
here, its formula is in tests of the router.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import toy

# ---------------------------------------------------------------- C01


def test_c01_ttft_includes_the_wait_in_the_queue(tmp_path: Path) -> None:
    run = toy("c01_burst3.jsonl", tmp_path / "run")
    assert run.ms("ttft_s") == [100, 300, 500]
    assert run.ms("e2e_s") == [200, 400, 600]
    assert run.ms("queue_wait_s") == [0, 200, 400]
    assert run.ms("tpot_s") == [10, 10, 10]
    ttft = run.report.latency.ttft_s
    assert (ttft.mean, ttft.p50, ttft.p90, ttft.p99) == pytest.approx((0.3, 0.3, 0.46, 0.496))
    assert run.report.makespan_s == pytest.approx(0.6)
    assert run.report.throughput.requests_per_s == pytest.approx(5)
    assert run.report.throughput.output_tokens_per_s == pytest.approx(55)


# ---------------------------------------------------------------- C03


def test_c03_a_quiet_minute_stays_in_the_duration(tmp_path: Path) -> None:
    run = toy("c03_gap60s.jsonl", tmp_path / "run")
    assert run.ms("ttft_s") == [100, 100]
    assert run.report.makespan_s == pytest.approx(60.2)
    assert run.report.throughput.requests_per_s == pytest.approx(0.033223, abs=5e-7)
    assert run.report.throughput.output_tokens_per_s == pytest.approx(0.365449, abs=5e-7)
    assert run.report.busy_share == pytest.approx(0.0066445, abs=5e-8)


def test_c03_a_quiet_week_costs_no_computing(tmp_path: Path) -> None:
    run = toy("c03_gap7d.jsonl", tmp_path / "run")
    assert len(run.rows("steps")) <= 8, "two prompts, two answers: a clock that ticks would have thousands"
    assert len(run.rows("samples")) <= 10
    assert run.ms("ttft_s") == [100, 100]
    assert run.report.makespan_s == pytest.approx(604_800.2)
    assert run.report.throughput.requests_per_s == pytest.approx(3.306877e-6, rel=1e-6)


# ---------------------------------------------------------------- C05


@pytest.mark.parametrize(
    "name", ["c05_azure_crlf.csv", "c05_azure_tz.csv", "c05_azure_names.parquet", "c05_plain.parquet"]
)
def test_c05_azure_files_load_as_published(name: str, tmp_path: Path) -> None:
    run = toy(name, tmp_path / "run")
    assert run.ms("arrival_s") == [0, 250, 1000]
    assert sum(run.requests("isl")) == 300
    assert sum(run.requests("output_tokens")) == 33
    assert run.ms("ttft_s") == [100, 100, 100]
    assert run.report.makespan_s == pytest.approx(1.2, abs=1e-6)
    assert run.report.hit_rate is None, "no hash ids: a hit rate means nothing"


# ---------------------------------------------------------------- C06, C13


def test_c06_tokens_per_hash_id_are_not_the_engines_block_size(tmp_path: Path) -> None:
    run = toy("c06_mooncake512.jsonl", tmp_path / "run", "workers.engine.block_size=64", key_tokens=512)
    assert run.ms("ttft_s") == [1024, 512]
    assert run.requests("cached_tokens") == [0, 1024]
    assert run.report.hit_rate == pytest.approx(0.40)


def test_c13_a_fully_cached_prompt_still_computes_something(tmp_path: Path) -> None:
    run = toy("c13_fullhit.jsonl", tmp_path / "run", "workers.engine.block_size=64", key_tokens=64)
    assert run.ms("ttft_s") == [128, 64]
    assert run.requests("cached_tokens") == [0, 64]


# ---------------------------------------------------------------- C07


@pytest.mark.parametrize(("decode_s", "second_ms", "end_s"), [(0.01, 250, 0.45), (0.02, 350, 0.65)])
def test_c07_later_turns_wait_for_the_earlier_answer(
    decode_s: float, second_ms: int, end_s: float, tmp_path: Path
) -> None:
    run = toy("c07_session.jsonl", tmp_path / "run", f"workers.latency.decode_s={decode_s}")
    assert run.ms("arrival_s") == [0, second_ms]
    assert run.ms("ttft_s") == [100, 100]
    assert run.report.makespan_s == pytest.approx(end_s)


# ---------------------------------------------------------------- C08


@pytest.mark.parametrize(
    ("speedup", "ttft_ms", "end_s"), [(1, [100, 100, 100], 1.0), (4, [100, 200, 300], 0.6), (0.5, [100, 100, 100], 1.8)]
)
def test_c08_arrival_speed_up_changes_arrivals_only(
    speedup: float, ttft_ms: list, end_s: float, tmp_path: Path
) -> None:
    run = toy("c08_arrivals.jsonl", tmp_path / "run", f"trace.speedup={speedup}")
    assert run.ms("ttft_s") == ttft_ms
    assert run.ms("tpot_s") == [10, 10, 10]
    assert run.report.makespan_s == pytest.approx(end_s)


def test_c08_at_most_two_in_flight(tmp_path: Path) -> None:
    run = toy("c08_four.jsonl", tmp_path / "run", "trace.arrivals=closed", "trace.concurrency=2")
    assert run.ms("ttft_s") == [100, 300, 300, 300]
    assert run.report.makespan_s == pytest.approx(0.8)
    spans = list(zip(run.requests("arrival_s"), run.requests("last_token_s"), strict=True))
    for start_s, _ in spans:
        assert sum(a <= start_s < b for a, b in spans) <= 2


# ---------------------------------------------------------------- C14


def test_c14_what_can_never_fit_is_refused_not_retried(tmp_path: Path) -> None:
    run = toy("c14_oversize.jsonl", tmp_path / "run", "workers.engine.kv_blocks=10")
    assert run.requests("status") == ["rejected", "completed", "failed"]
    first, _, third = run.requests("reason")
    assert "13" in first
    assert "10" in first
    assert run.ms("ttft_s")[1] == 48
    assert run.ms("e2e_s")[1] == 88
    assert run.requests("output_tokens")[2] <= 11, "160 tokens fit, 150 are the prompt's: the 11th output is the last"
    assert "kv pool exhausted" in third
    counts = run.report.counts
    assert counts.completed + counts.rejected + counts.failed == 3
    assert counts.open == 0


# ---------------------------------------------------------------- C09


def test_c09_the_same_state_gives_the_same_choice_and_shows_its_terms(tmp_path: Path) -> None:
    """Through the whole replay: two requests with one prompt; the second goes where its blocks are, and says why."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 640, "output_length": 2, "hash_ids": list(range(10))}
        for at in (0, 5000, 10000)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("router.mode=kv", "workers.engine.block_size=64")
    first = toy(trace, tmp_path / "a", *sets, workers=3, key_tokens=64, explain=True)
    chosen = first.requests("worker_id")
    assert len(set(chosen)) == 1, "a warm prompt stays where it is warm"
    for row in first.rows("decisions"):
        candidates = json.loads(row["candidates"])
        assert [c["worker_id"] for c in candidates] == [0, 1, 2]
        cost = {c["worker_id"]: c["cost"] for c in candidates}
        assert cost[row["worker_id"]] == min(cost.values())
    warm = json.loads(first.rows("decisions")[1]["candidates"])
    assert {c["worker_id"]: (c["overlap_blocks"], c["cost"]) for c in warm} == {
        w: (9, 10 - 9 + 10) if w == chosen[0] else (0, 10 + 10) for w in range(3)
    }, "10 prompt blocks less 9 cached (the last token is computed), plus 10 blocks of decode"
    for n in range(3):
        assert toy(trace, tmp_path / f"again{n}", *sets, workers=3, key_tokens=64).requests("worker_id") == chosen
