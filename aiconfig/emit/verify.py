"""verify.sh: measures a running deployment with the benchmark and compares with the prediction.

It exits 0 if all figures are within the band of the prediction, 3 if one is not, 2 if nothing could be measured.
"""

from __future__ import annotations

import json

from aiconfig.emit.bench import SHOWN, program, words
from aiconfig.emit.launch import array
from aiconfig.emit.plan import PORT, Plan
from aiconfig.emit.yamltext import one_line
from aiconfig.estimate import Band
from policies.errors import ConfigError

NO_BAND = 0.25
"""How far a figure may be off where no band was measured: our choice, said in the table."""
CLIENT_NAMES = {"e2e": {"vllm": "e2el", "sglang": "e2e_latency"}}

COMPARISON = r"""
import json, sys
predicted = json.load(open(sys.argv[1], encoding="utf-8"))
lines = [line for line in open(sys.argv[2], encoding="utf-8") if line.strip()]
measured = json.loads(lines[-1]) if len(lines) > 1 and lines[-1].startswith("{") else json.loads("".join(lines))
missed = compared = 0
print(f"{'':28}{'predicted':>12}{'measured':>12}{'error':>9}{'band':>8}")
for row in predicted:
    value = measured.get(row["key"])
    if not isinstance(value, (int, float)) or value <= 0:
        print(f"{row['name']:28}{row['value']:12.4g}{'not told':>12}")
        continue
    error = row["value"] / value - 1.0
    compared += 1
    inside = abs(error) <= row["band"]
    missed += not inside
    shown = f"{row['name']:28}{row['value']:12.4g}{value:12.4g}{error:+9.1%}{row['band']:8.0%}"
    print(shown + ("" if inside else "  outside"))
if not compared:
    print("verify: the client's file has none of the predicted figures", file=sys.stderr)
    sys.exit(2)
print(f"{compared - missed} of {compared} figures within the band of the prediction")
sys.exit(3 if missed else 0)
"""


def verify_files(plan: Plan) -> dict[str, str]:
    """The script that measures and compares."""
    lines = ["#!/usr/bin/env bash", f"# Measures {one_line(plan.candidate.name)} and compares with its prediction."]
    lines += [
        "# verify.sh [URL]   exit 0: all within the band; 3: something is not; 2: nothing could be measured",
        "set -euo pipefail",
        f'url="${{1:-http://127.0.0.1:{PORT}}}"',
        'out="$(mktemp -d)"',
        "trap 'rm -rf \"$out\"' EXIT",
        'if ! curl --fail --silent --show-error --max-time 30 --output "$out/health" "$url/health"; then',
        '  echo "verify: nothing answers at $url/health; start the deployment (launch/ or k8s/) first" >&2',
        "  exit 2",
        "fi",
        *array("command", program(plan), tuple(words(plan))),
    ]
    saved = "$out/measured.json"
    if plan.engine == "sglang":
        lines.append(f'"${{command[@]}}" --base-url "$url" --output-file "{saved}" || exit 2')
    else:
        result = '--save-result --result-dir "$out" --result-filename measured.json'
        lines.append(f'"${{command[@]}}" --base-url "$url" {result} || exit 2')
    rows = [json.dumps(row, sort_keys=True) for row in predicted_rows(plan)]
    table = "[\n" + ",\n".join(rows) + "\n]"
    lines += ["cat > \"$out/predicted.json\" <<'PREDICTED'", table, "PREDICTED"]
    lines += ["cat > \"$out/compare.py\" <<'COMPARE'", COMPARISON.strip(), "COMPARE"]
    lines.append(f'python3 "$out/compare.py" "$out/predicted.json" "{saved}"')
    return {"verify.sh": "\n".join(lines) + "\n"}


def predicted_rows(plan: Plan) -> list[dict[str, str | float]]:
    """What is compared: the name for people, the key in the client's file, the predicted value and its band."""
    estimate = plan.estimate
    if estimate is None:
        raise ConfigError("verify.sh compares with a prediction, and none was given")
    rows = [_row("requests/s", "request_throughput", estimate.requests_per_s, NO_BAND)]
    rows.append(_row("output tokens/s", "output_throughput", estimate.output_tokens_per_s, NO_BAND))
    client = "sglang" if plan.engine == "sglang" else "vllm"
    for metric, statistics in SHOWN:
        band = estimate.bands.get(metric)
        for statistic in statistics:
            value = estimate.value(metric, statistic)
            if value is not None:
                told = CLIENT_NAMES.get(metric, {}).get(client, metric)
                name = "median" if statistic == "p50" else statistic
                rows.append(_row(f"{metric} {statistic} in ms", f"{name}_{told}_ms", 1e3 * value, _allowed(band)))
    return rows


def _allowed(band: Band | None) -> float:
    """What nine in ten predictions are within; where that is not known, our choice, or what half of them are within."""
    if band is None:
        return NO_BAND
    return band.wide if band.wide is not None else max(NO_BAND, band.typical)


def _row(name: str, key: str, value: float, band: float) -> dict[str, str | float]:
    return {"name": name, "key": key, "value": float(f"{value:.6g}"), "band": band}
