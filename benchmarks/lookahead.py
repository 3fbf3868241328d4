"""How long the twin takes to answer a planner's question, and how far its small model is from the full simulation.

The answer is of one worker's share of the demand, with step costs on a straight line (`twin.ahead`). It is set beside
replays of Poisson demand (Azure lengths) on so many workers: attainment of TTFT 500 ms and ITL 50 ms, and the 95th
percentiles. The time is of a question of 12 plans, 3 paths and 2 seeds over 5 minutes with 64 workers.

    python benchmarks/lookahead.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import show

from policies.cluster.ids import Role
from policies.cluster.traffic import Lengths
from policies.cluster.twin_asks import AskTwin, Plan, PlanStep, RoleCount, RoleState, Scenario, Snapshot
from policies.planner.asking import inner
from policies.planner.settings import PlannerSettings
from traces.convert import write_table
from traces.synth import SynthOptions, synthesise
from twin.ahead.answer import answer
from twin.config import Config
from twin.config_read import load
from twin.planning import planner_settings
from twin.replay import replay
from twin.wiring import build_cluster

SLA = "ttft=500ms,itl=50ms"


def question(settings: PlannerSettings, counts: range, rate_rps: float, lengths: tuple[Lengths, ...]) -> AskTwin:
    """Every count as a plan, from that count, with nothing under way; the step cost is that of the settings."""
    (pool,) = settings.pools
    cost = pool.prior
    assert cost is not None
    busy = counts[len(counts) // 2]
    state = RoleState(
        role=Role.MIXED,
        group=pool.group,
        ready=busy,
        pending=0,
        draining=0,
        queued_prefill_tokens=0.0,
        queued_decode_kv_tokens=0.0,
        running_decode_kv_tokens=0.0,
        running_decode_requests=0.0,
        base_s=cost.base_s,
        per_x_s=cost.per_x_s,
        per_kv_s=cost.per_kv_s,
    )
    return AskTwin(
        reason="measured",
        query_id=0,
        key="",
        snapshot=Snapshot(taken_s=0.0, roles=(state,), hit_rate=0.0, accept_length=1.0, isl=1500.0, osl=150.0),
        plans=tuple(
            Plan(name=str(n), steps=(PlanStep(after_s=0.0, counts=(RoleCount(role=Role.MIXED, workers=n),)),))
            for n in counts
        ),
        scenarios=tuple(
            Scenario(name=name, interval_s=60.0, arrivals=(60 * rate_rps,) * 5, lengths=lengths, hit_rate=0.0)
            for name in ("p50", "p90", "bootstrap")
        ),
        seeds=(0, 1),
        horizon_s=300.0,
        deadline_s=30.0,
    )


def configured(path: Path, workers: int) -> Config:
    return load(flags={"TRACE": str(path), "--workers": workers, "--sla": SLA, "--planner": "throughput"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="2,4,6,8", help="requests/s of each worker, with commas")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=300)
    args = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        for each in (float(rate) for rate in args.rates.split(",")):
            rate_rps = each * args.workers
            path = Path(folder) / f"{each:g}.parquet"
            drawn = SynthOptions(seed=7, duration_s=float(args.seconds), rate_rps=rate_rps, lengths="azure")
            table = synthesise("poisson", drawn)
            write_table(table, path)
            config = configured(path, args.workers)
            settings = inner(planner_settings(config, build_cluster(config).groups))
            report = replay(
                load(flags={"TRACE": str(path), "--workers": args.workers, "--sla": SLA}),
                out=Path(folder) / "run",
                html=False,
            ).report
            lengths = tuple(
                Lengths(isl=isl, osl=osl)
                for isl, osl in zip(*(table.column(n).to_pylist() for n in ("isl", "osl")), strict=True)
            )
            asked = question(settings, range(args.workers, args.workers + 1), rate_rps, lengths)
            said = answer(asked, settings)
            mean = sum(one.attainment for one in said) / len(said)
            assert report.sla is not None
            ttft, tpot = report.latency.ttft_s.p95, report.latency.tpot_s.p95
            rows.append(
                {
                    "requests_s_each": each,
                    "attainment": {"replay": _round(report.sla.attainment), "asked": _round(mean)},
                    "ttft_p95_ms": {"replay": _ms(ttft), "asked": _ms(_mean(one.ttft_p95_s for one in said))},
                    "tpot_p95_ms": {"replay": _ms(tpot), "asked": _ms(_mean(one.itl_p95_s for one in said))},
                }
            )
        large = question(settings, range(58, 70), 64 * 2.0, lengths[:128])
        began_s = time.process_time()
        answer(large, settings)
        took_s = time.process_time() - began_s
    show("look-ahead", {"runs": rows, "question_of_72_runs_64_workers_5_min_cpu_s": round(took_s, 2)})


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


if __name__ == "__main__":
    main()
