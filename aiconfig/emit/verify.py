"""What compares a running deployment with its prediction: one program for all, and the prediction as data.

The program is `verify_deployment.py`, written unchanged as verify.py; it runs the deployment's own bench.sh.
"""

from __future__ import annotations

import json
from pathlib import Path

from aiconfig.emit.bench import SHOWN, bench_files, requests
from aiconfig.emit.plan import Plan
from aiconfig.estimate import Band
from policies.errors import ConfigError
from policies.frozen import frozen

NO_BAND = 0.25
"""How far a figure may be off where no band was measured: our choice, said in the table."""
PROGRAM = Path(__file__).parent / "verify_deployment.py"


@frozen
class Client:
    """How a client is told to write its figures (its words before the file), and how it names the end-to-end time."""

    save: tuple[str, ...]
    e2e: str


VLLM = Client(save=("--save-result", "--result-filename"), e2e="e2el")
SGLANG = Client(save=("--output-file",), e2e="e2e_latency")


def verify_files(plan: Plan) -> dict[str, str]:
    """The program, what it compares with, and the benchmark that it runs."""
    data = {
        "deployment": plan.candidate.name,
        "figures": predicted_rows(plan),
        "load": str(plan.load),
        "requests": requests(plan),
        "save": list(_client(plan).save),
    }
    program = PROGRAM.read_text(encoding="utf-8")
    return {"verify.py": program, "predicted.json": json.dumps(data, indent=1) + "\n", **bench_files(plan)}


def predicted_rows(plan: Plan) -> list[dict[str, str | float]]:
    """What is compared: the name for people, the key in the client's file, the predicted value, its band, and what
    measurements have beside it."""
    estimate = plan.estimate
    if estimate is None:
        raise ConfigError("verify.py compares with a prediction, and none was given")
    rows = [_row("requests/s", "request_throughput", estimate.requests_per_s, NO_BAND)]
    rows.append(_row("output tokens/s", "output_throughput", estimate.output_tokens_per_s, NO_BAND))
    for metric, statistics in SHOWN:
        band = estimate.bands.get(metric)
        allowed, outside_s = _allowed(band), band.outside_s if band is not None else 0.0
        told = _client(plan).e2e if metric == "e2e" else metric
        for statistic in statistics:
            value = estimate.value(metric, statistic)
            if value is not None:
                name = "median" if statistic == "p50" else statistic
                rows.append(
                    _row(f"{metric} {statistic} in ms", f"{name}_{told}_ms", 1e3 * value, allowed, 1e3 * outside_s)
                )
    return rows


def _client(plan: Plan) -> Client:
    return SGLANG if plan.engine == "sglang" else VLLM


def _allowed(band: Band | None) -> float:
    """What nine in ten predictions are within; where that is not known, our choice, or what half of them are within."""
    if band is None:
        return NO_BAND
    return band.wide if band.wide is not None else max(NO_BAND, band.typical)


def _row(name: str, key: str, value: float, band: float, outside: float = 0.0) -> dict[str, str | float]:
    return {"name": name, "key": key, "value": float(f"{value:.6g}"), "band": band, "outside": float(f"{outside:.3g}")}
