#!/usr/bin/env bash
# Benchmark of sglang-disagg-P2xtp2-h200_sxm-fp8-kvfp8-b64-t8192+D1xtp4-h200_sxm-fp8-kvfp8-b256-t8192 at 32 users: bench.sh [URL [FURTHER FLAGS]]
# It should print about this (simulated, predicted, not measured):
# requests/s 3, output tokens/s 1350
# ttft in ms: mean 250, p50 200, p95 500, p99 750 (half of the predictions are within 10%, nine in ten within 30%: this engine and GPU)
# tpot in ms: mean 20, p50 19, p95 30
# e2e in ms: mean 1e+04, p95 1.5e+04
set -euo pipefail
command=(
  python3 -m sglang.bench_serving
  --model Qwen/Qwen3-32B           # default: the public checkpoint of qwen3-32b
  --backend sglang-oai             # default
  --dataset-name random-ids        # default
  --random-input-len 4000          # workload
  --random-output-len 500          # workload
  --random-range-ratio 0.8         # workload
  --num-prompts 320                # default
  --max-concurrency 32             # sla: the largest load that keeps p95:ttft<1s, tpot=30ms
  --seed 0                         # workload
)
exec "${command[@]}" --base-url "${1:-http://127.0.0.1:8000}" "${@:2}"
