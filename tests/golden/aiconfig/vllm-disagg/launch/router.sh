#!/usr/bin/env bash
# Router in front of prefill and decode workers. Names like prefill-0 stand for the addresses of your workers.
# vLLM itself brings none; this one is of the vLLM project: pip install vllm-router
set -euo pipefail
command=(
  vllm-router
  --vllm-pd-disaggregation
  --policy round_robin             # as was predicted
  --prefill http://prefill-0:8000
  --prefill http://prefill-1:8000
  --decode http://decode-0:8000
)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
