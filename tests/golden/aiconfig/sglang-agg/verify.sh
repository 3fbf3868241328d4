#!/usr/bin/env bash
# Measures sglang-agg-2xtp2-h200_sxm-fp8-kvfp8-b64-t8192 and compares with its prediction.
# verify.sh [URL]   exit 0: all within the band; 3: something is not; 2: nothing could be measured
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
if ! curl --fail --silent --show-error --max-time 30 --output "$out/health" "$url/health"; then
  echo "verify: nothing answers at $url/health; start the deployment (launch/ or k8s/) first" >&2
  exit 2
fi
command=(
  python3 -m sglang.bench_serving
  --model Qwen/Qwen3-32B           # default: the public checkpoint of qwen3-32b
  --backend sglang                 # default
  --dataset-name random-ids        # default
  --random-input-len 4000          # workload
  --random-output-len 500          # workload
  --random-range-ratio 0.8         # workload
  --num-prompts 320                # default
  --max-concurrency 32             # sla: the largest load that keeps p95:ttft<1s, tpot=30ms
  --seed 0                         # workload
)
"${command[@]}" --base-url "$url" --output-file "$out/measured.json" || exit 2
cat > "$out/predicted.json" <<'PREDICTED'
[
{"band": 0.25, "key": "request_throughput", "name": "requests/s", "value": 3.0},
{"band": 0.25, "key": "output_throughput", "name": "output tokens/s", "value": 1350.0},
{"band": 0.3, "key": "mean_ttft_ms", "name": "ttft mean in ms", "value": 250.0},
{"band": 0.3, "key": "median_ttft_ms", "name": "ttft p50 in ms", "value": 200.0},
{"band": 0.3, "key": "p95_ttft_ms", "name": "ttft p95 in ms", "value": 500.0},
{"band": 0.3, "key": "p99_ttft_ms", "name": "ttft p99 in ms", "value": 750.0},
{"band": 0.25, "key": "mean_tpot_ms", "name": "tpot mean in ms", "value": 20.0},
{"band": 0.25, "key": "median_tpot_ms", "name": "tpot p50 in ms", "value": 19.0},
{"band": 0.25, "key": "p95_tpot_ms", "name": "tpot p95 in ms", "value": 30.0},
{"band": 0.25, "key": "mean_e2e_latency_ms", "name": "e2e mean in ms", "value": 10000.0},
{"band": 0.25, "key": "p95_e2e_latency_ms", "name": "e2e p95 in ms", "value": 15000.0}
]
PREDICTED
cat > "$out/compare.py" <<'COMPARE'
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
COMPARE
python3 "$out/compare.py" "$out/predicted.json" "$out/measured.json"
