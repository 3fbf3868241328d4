"""What a report says of the router: shares, ends by code, terms and runner-up, regret, the upper bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders_reports import SERIAL, meta_of, request_row

from reports import metrics
from reports.build import build_report
from reports.explained import MOST_TOLD
from reports.html import write_html
from reports.record import RunWriter, finish_run
from reports.report import Report, RunMeta
from reports.tables import report_text
from reports.told import OracleMeta, OracleSample

TWO = replace(SERIAL, workers=2)


def candidate(worker_id: int, cost: float | None, overlap: int = 0, why_not: str | None = None) -> dict[str, object]:
    return {
        "worker_id": worker_id, "in_flight": 3, "cost": cost, "overlap_blocks": overlap, "prefill_blocks": 10.0,
        "credit_blocks": float(overlap), "decode_blocks": 4.0, "active_prefill_tokens": 64, "active_requests": 2,
        "why_not": why_not,
    }  # fmt: skip


def decided(
    row: int, chosen: int, *candidates: dict[str, object], rule: str = "softmax", mode: str = "kv"
) -> tuple[object, ...]:
    shown = json.dumps(candidates) if candidates else None
    return (float(row), row, f"r{row}", chosen, mode, rule, 0, "why", shown)


def run(
    folder: Path,
    requests: list[tuple[object, ...]],
    decisions: Sequence[tuple[object, ...]] = (),
    **meta: object,
) -> Report:
    writer = RunWriter(folder)
    writer.requests = dict(enumerate(requests))  # type: ignore[assignment]
    writer.decisions += decisions  # type: ignore[arg-type]
    writer.close()
    finish_run(folder, complete=True, cpu_s=0.0, wall_s=0.0)
    described: RunMeta = replace(meta_of(TWO, hash_known=True), **meta)  # type: ignore[arg-type]
    return build_report(folder, described)


# ---------------------------------------------------------------- definitions


def test_overlap_lost_is_never_negative() -> None:
    assert metrics.overlap_lost(3, [8, 3]) == 5
    assert metrics.overlap_lost(8, [3]) == 0
    assert metrics.overlap_lost(0, []) == 0


def test_cost_regret_is_over_the_cheapest() -> None:
    assert metrics.cost_regret(14.0, [14.0, 10.0, 11.0]) == 4.0
    assert metrics.cost_regret(10.0, [14.0, 10.0]) == 0.0


def test_shares_of_nothing_are_undefined() -> None:
    assert metrics.share_range(np.zeros(3)) is None
    assert metrics.share_range(np.array([1.0, 3.0])) == (0.25, 0.75)
    assert metrics.routing_effectiveness(0, 0) is None
    assert metrics.upper_bound_hit_rate(0, 0) is None


def test_the_worked_example_of_the_upper_bound_is_two_in_five() -> None:
    assert metrics.upper_bound_hit_rate(0 + 2 + 3 + 0 + 3, 5 * 4) == pytest.approx(0.40)


# ---------------------------------------------------------------- shares and ends


def test_shares_are_by_requests_and_by_tokens(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        [request_row(0, worker_id=0), request_row(1, worker_id=0), request_row(2, worker_id=0),
         request_row(3, worker_id=1, isl=705)],
    )  # fmt: skip
    (share,) = report.shares
    assert (share.role, share.workers, share.requests_share) == ("mixed", 2, (0.25, 0.75))
    assert share.requests_fairness == pytest.approx(16 / (2 * 10))
    tokens = np.array([3 * (100 + 5), 705 + 5])
    assert share.tokens_share == pytest.approx((tokens.min() / tokens.sum(), tokens.max() / tokens.sum()))
    assert share.tokens_fairness == pytest.approx(tokens.sum() ** 2 / (2 * (tokens**2).sum()))


def test_roles_are_not_compared_with_each_other(tmp_path: Path) -> None:
    meta = meta_of(replace(SERIAL, workers=4))
    roles = ["prefill", "prefill", "decode", "decode"]
    workers = tuple(replace(worker, role=role) for worker, role in zip(meta.workers, roles, strict=True))
    rows = [request_row(row, prefill_worker_id=0, worker_id=2 + row % 2) for row in range(4)]
    shares = {one.role: one for one in run(tmp_path, rows, workers=workers).shares}
    assert shares["prefill"].requests_share == (0.0, 1.0)
    assert shares["decode"].requests_share == (0.5, 0.5)


def test_one_worker_has_no_shares(tmp_path: Path) -> None:
    assert run(tmp_path, [request_row(0)], workers=meta_of(SERIAL).workers).shares == ()


def refused(row: int, reason: str, status: str = "rejected", **changes: object) -> tuple[object, ...]:
    nothing = dict.fromkeys(("admit_s", "first_token_s", "last_token_s", "worker_id", "cached_tokens"))
    return request_row(row, status, reason=reason, output_tokens=0, **nothing, **changes)


def test_ends_are_told_by_code_with_share_and_who_they_were(tmp_path: Path) -> None:
    busy = [refused(row, f"all_busy: worker {row} of 4 is busy", isl=100 * (row + 1)) for row in (0, 1, 2)]
    report = run(
        tmp_path,
        [*busy, refused(3, "prompt of 9 tokens needs 4 blocks"), refused(4, "worker_lost: gone", "failed"),
         request_row(5), request_row(6), request_row(7)],
    )  # fmt: skip
    first, *others = report.ends
    assert (first.status, first.code, first.requests, first.share) == ("rejected", "all_busy", 3, 3 / 8)
    assert (first.prompt_tokens_mean, first.first_s, first.last_s) == (200.0, 0.0, 2.0)
    assert first.reason == "all_busy: worker 0 of 4 is busy (and like it)"
    assert {(end.status, end.code, end.requests) for end in others} == {
        ("rejected", "engine", 1), ("failed", "worker_lost", 1)
    }  # fmt: skip
    assert sum(end.requests for end in report.ends) == 8 - report.counts.completed
    assert sum(report.counts.reasons.values()) == 5
    shown = report_text(report, path="x")
    assert "3 x all_busy: worker 0 of 4 is busy (and like it) (37.5 %, counted as overload" in " ".join(shown.split())


def test_one_reason_under_two_ends_is_two_entries(tmp_path: Path) -> None:
    report = run(tmp_path, [refused(0, "no_endpoints: none"), refused(1, "no_endpoints: none", "failed")])
    assert [(end.status, end.requests) for end in report.ends] == [("failed", 1), ("rejected", 1)]
    assert report.counts.reasons == {"no_endpoints: none": 2}


# ---------------------------------------------------------------- the upper bound


def test_the_bound_stands_beside_what_was_reached_in_the_same_unit(tmp_path: Path) -> None:
    rows = [request_row(0, isl=70, cached_tokens=32), request_row(1, isl=64, cached_tokens=0)]
    report = run(tmp_path, rows, ideal={"prompt_blocks": 8, "hit_blocks": 5})
    bound = report.hit_bound
    assert bound is not None
    assert (bound.reached, bound.upper_bound) == (2 / 8, 5 / 8)
    assert "25.0 % of blocks, upper bound 62.5 %" in report_text(report, path="x")


def test_without_hash_ids_there_is_no_bound(tmp_path: Path) -> None:
    report = run(tmp_path, [request_row(0)], ideal={"prompt_blocks": 8, "hit_blocks": 5}, hash_known=False)
    assert report.hit_bound is None
    assert "upper bound" not in report_text(report, path="x")


# ---------------------------------------------------------------- the router's own counters


def test_counters_become_effectiveness_and_overlap_lost(tmp_path: Path) -> None:
    counters = {"decisions": 200, "overlap_differs": 50, "non_max_overlap": 10, "overlap_lost_blocks": 40}
    report = run(tmp_path, [request_row(0)], routing=counters)
    routing = report.routing
    assert routing is not None
    assert (routing.effectiveness, routing.non_max_overlap, routing.overlap_lost_tokens) == (0.25, 10, 640)
    shown = report_text(report, path="x")
    assert "200 decisions; workers differed in cached blocks in 25.0 % of them" in shown
    assert "10 (5.0 %) went to less than the longest overlap" in shown


def test_with_legs_the_prefill_router_is_the_one_that_looks_at_caches(tmp_path: Path) -> None:
    counters = {
        "prefill_decisions": 10,
        "prefill_overlap_differs": 5,
        "decode_decisions": 10,
        "decode_overlap_differs": 0,
    }
    routing = run(tmp_path, [request_row(0)], routing=counters).routing
    assert routing is not None
    assert (routing.decisions, routing.effectiveness) == (10, 0.5)


def test_a_mode_that_looks_at_no_cache_says_nothing_of_it(tmp_path: Path) -> None:
    report = run(tmp_path, [request_row(0)], routing={"decisions": 3})
    assert report.routing is not None
    assert report.routing.effectiveness is None
    assert "routing " not in report_text(report, path="x")


# ---------------------------------------------------------------- term by term


def explained(folder: Path, decisions: list[tuple[object, ...]], **meta: object) -> Report:
    rows = [request_row(row, worker_id=row % 2) for row in range(len(decisions))]
    routing = {"decisions": len(decisions), "overlap_differs": 1}
    return run(folder, rows, decisions, routing=routing, explained=True, **meta)


def test_regret_and_runner_up_come_from_the_eligible_workers_alone(tmp_path: Path) -> None:
    report = explained(
        tmp_path,
        [
            decided(0, 1, candidate(0, 10.0, 2), candidate(1, 14.0, 6), candidate(2, 1.0, 9, why_not="draining")),
            decided(1, 0, candidate(0, 3.0), candidate(1, 5.0), rule="min"),
            decided(2, 0, candidate(0, 7.0), rule="min"),
        ],
    )
    assert report.routing is not None
    told = report.routing.explained
    assert told is not None
    assert (told.decisions, told.not_cheapest, told.regret_blocks.max) == (3, 1, 4.0)
    assert told.regret_blocks.mean == pytest.approx(4 / 3)
    (worst,) = told.most_regretted
    assert (worst.request_id, worst.rule, worst.regret_blocks, worst.overlap_lost_blocks) == ("r0", "softmax", 4.0, 0)
    assert (worst.chosen.worker_id, worst.chosen.credit_blocks) == (1, 6.0)
    assert worst.runner_up is not None
    assert worst.runner_up.worker_id == 0
    by_row = {one.row: one for one in told.slowest}
    assert by_row[2].runner_up is None
    assert by_row[1].runner_up is not None
    assert by_row[1].runner_up.cost == 5.0


def test_only_the_most_regretted_are_told_whatever_their_order(tmp_path: Path) -> None:
    regrets = [(7 * row) % 31 for row in range(31)]
    decisions = [decided(row, 1, candidate(0, 1.0), candidate(1, 1.0 + regret)) for row, regret in enumerate(regrets)]
    report = explained(tmp_path, decisions)
    assert report.routing is not None
    told = report.routing.explained
    assert told is not None
    assert [one.regret_blocks for one in told.most_regretted] == sorted(map(float, regrets), reverse=True)[:MOST_TOLD]
    assert told.not_cheapest == 30


def test_modes_without_costs_have_nothing_to_explain(tmp_path: Path) -> None:
    report = explained(tmp_path, [decided(0, 0, candidate(0, None), candidate(1, None), mode="random")])
    assert report.routing is not None
    assert report.routing.explained is None


def test_the_page_shows_terms_runner_up_and_difference(tmp_path: Path) -> None:
    report = explained(tmp_path, [decided(0, 1, candidate(0, 10.0, 2), candidate(1, 14.0, 6))])
    page = " ".join(write_html(tmp_path, report).read_text(encoding="utf-8").split())
    assert "The decisions with the largest cost regret" in page
    assert "pool-1: cost 14.00; prompt 10.00 - credit 6.000, decode 4.000, 2 open, 6 cached" in page
    assert "cost +4.000, credit +4.000, cached +4" in page
    assert "cost regret: mean 4.00 blocks" in page


def test_hindsight_is_told_with_the_size_of_its_sample(tmp_path: Path) -> None:
    samples = (
        OracleSample(row=0, at_s=0.0, worker_id=0, ttft_s=0.5, best_worker_id=1, best_ttft_s=0.2),
        OracleSample(row=1, at_s=1.0, worker_id=1, ttft_s=0.1, best_worker_id=1, best_ttft_s=0.1),
    )
    report = explained(
        tmp_path,
        [decided(0, 1, candidate(0, 1.0), candidate(1, 1.0)), decided(1, 1, candidate(0, 1.0), candidate(1, 1.0))],
        oracle=OracleMeta(every=7, samples=samples, left_out=1),
    )
    assert report.routing is not None
    oracle = report.routing.oracle
    assert oracle is not None
    assert (oracle.decisions, oracle.best_chosen, oracle.left_out, oracle.worst) == (2, 1, 1, samples[:1])
    assert oracle.regret_s.mean == pytest.approx(0.15)
    shown = " ".join(report_text(report, path="x").split())
    assert "oracle regret (TTFT, 2 decisions, one in 7, 1 left out): mean 150 ms" in shown
    assert Report.from_json(report.to_json()) == report
