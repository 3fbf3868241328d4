"""Worker groups in the report: time held, energy, money and goodput per GPU, by hand and by their laws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders_reports import Ask, Toy, meta_of, run_toy

from reports.build import GroupMeta, PowerMeta, Report, RunMeta, WorkerMeta, build_report
from reports.html import write_html
from reports.sla import parse_sla
from reports.tables import report_text

TOY = Toy(workers=2, max_seqs=1)
ASKS = [Ask(0.0, 100, 11), Ask(0.0, 50, 1), Ask(1.0, 100, 11), Ask(1.8, 100, 11)]  # rows 0, 2 on worker 0
POWER = PowerMeta(
    tdp_w=700, token_multiply_s=0.0005, step_read_s=0.005, ctx_token_read_s=0, experts_read_s=0, expert_missed=1
)


def worker(worker_id: int, group: str, gpus: int, **given: float) -> WorkerMeta:
    return WorkerMeta(worker_id=worker_id, name=f"{group}-0", group=group, gpus=gpus, **given)  # type: ignore[arg-type]


@pytest.fixture
def report(tmp_path: Path):
    """Two toy workers: `a` with 2 GPUs at 3 USD/h and known power, `b` with 4 and neither; it runs to 2.0 s."""

    def make(*, sla: str | None = "ttft=200ms", **held: float) -> Report:
        run = run_toy(tmp_path / "run", ASKS, TOY)
        meta: RunMeta = replace(
            meta_of(TOY),
            workers=(worker(0, "a", 2, **held), worker(1, "b", 4)),
            groups=(GroupMeta(name="a", gpu="x", usd_per_hour=3.0, power=POWER), GroupMeta(name="b", gpu="y")),
            gpus=6,
        )
        return build_report(run.folder, meta, None if sla is None else parse_sla(sla))

    return make


def test_gpus_are_held_for_the_whole_run(report) -> None:
    a, b = report().groups
    assert (a.gpu_s, b.gpu_s) == (pytest.approx(4.0), pytest.approx(8.0))
    assert (a.requests, b.requests, a.output_tokens, b.output_tokens) == (2, 2, 22, 12)
    assert (a.good, b.good) == (2, 2)
    assert (a.goodput_rps_per_gpu, b.goodput_rps_per_gpu) == (pytest.approx(0.5), pytest.approx(0.25))
    assert (a.cost_usd, b.cost_usd) == (pytest.approx(4 / 3600 * 3), None)


def test_starting_and_draining_are_paid_for(report) -> None:
    """W1 of the planner's table, shorter: ordered before it serves, stopped after its last request."""
    whole = report(held_from_s=0.5, held_until_s=1.5)
    a = whole.groups[0]
    assert a.gpu_s == pytest.approx(2.0)
    assert a.goodput_rps_per_gpu == pytest.approx(1.0)
    assert whole.gpu_s == pytest.approx(10.0)
    assert whole.sla is not None
    assert whole.sla.goodput_rps_per_gpu == pytest.approx(4 / 10)
    assert whole.throughput.requests_per_s_per_gpu == pytest.approx(4 / 10)
    assert report(held_from_s=-100.0, held_until_s=100.0).groups[0].gpu_s == pytest.approx(4.0), "within the run"


def test_energy_is_idle_power_and_what_steps_add(report) -> None:
    """Two prompts of 100 tokens (100 ms steps: 0.05 s of multiplying, 0.6 x 0.005 of reading) and 20 decode steps of
    10 ms (0.0005 s, 0.6 x 0.005): 2 x 0.05 + 20 x 0.003 = 0.16 s at full power of 2 GPUs, 2 s at a quarter of it.
    """
    a, b = report().groups
    assert a.energy_j == pytest.approx(2 * 700 * (0.25 * 2.0 + 0.75 * 0.16))
    assert b.energy_j is None


def test_without_limits_there_is_no_goodput(report) -> None:
    assert {(group.good, group.goodput_rps_per_gpu) for group in report(sla=None).groups} == {(None, None)}


def test_groups_add_up_to_the_run(report) -> None:
    whole = report()
    assert sum(group.gpu_s for group in whole.groups) == pytest.approx(whole.gpu_s)
    assert sum(group.good for group in whole.groups) == whole.sla.good
    assert sum(group.output_tokens for group in whole.groups) == sum(w.output_tokens for w in whole.workers)
    assert Report.from_json(whole.to_json()) == whole


def test_tables_name_estimates_as_such(report, tmp_path: Path) -> None:
    whole = report()
    shown = " ".join(report_text(whole, path="p").split())
    assert "a: 1 mixed worker on 2 x x; 2 requests" in shown
    assert "kWh (estimate)" in shown
    assert "0.00333 USD" in shown
    page = write_html(tmp_path / "run", whole).read_text(encoding="utf-8")
    assert "Worker groups" in page
    assert "kWh (estimate)" in page
    assert "goodput per GPU, requests/s" in page


def test_prefill_groups_answer_nobody(tmp_path: Path) -> None:
    run = run_toy(tmp_path / "run", ASKS, TOY)
    meta = replace(
        meta_of(TOY),
        workers=(worker(0, "a", 1), worker(1, "b", 1)),
        groups=(GroupMeta(name="a", gpu="x", role="prefill"), GroupMeta(name="b", gpu="x", role="decode")),
    )
    a, b = build_report(run.folder, meta, parse_sla("ttft=1s")).groups
    assert (a.good, a.goodput_rps_per_gpu) == (None, None)
    assert b.good == 2
