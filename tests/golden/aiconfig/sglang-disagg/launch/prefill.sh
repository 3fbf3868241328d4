#!/usr/bin/env bash
# SGLang 0.5.23, prefill worker of sglang-disagg-P2xtp2-h200_sxm-fp8-kvfp8-b64-t8192+D1xtp4-h200_sxm-fp8-kvfp8-b256-t8192: 2 x h200_sxm
# aiconfig: role=prefill replicas=2 gpu=h200_sxm model=qwen3-32b weights=fp8 kv=fp8 version=0.5.23
# Start 2 of these, each with GPUs of its own (CUDA_VISIBLE_DEVICES) and a PORT of its own on a shared host.
set -euo pipefail
command=(
  python3 -m sglang.launch_server
  --model-path Qwen/Qwen3-32B             # default: the public checkpoint of qwen3-32b
  --tp-size 2                             # search
  --quantization fp8                      # search
  --kv-cache-dtype fp8_e4m3               # search
  --context-length 4564                   # workload: 4000 + 500 + 64 of margin
  --max-running-requests 64               # search
  --chunked-prefill-size 8192             # search
  --max-prefill-tokens 16384              # default
  --mem-fraction-static 0.88              # default
  --schedule-policy fcfs                  # default
  --schedule-conservativeness 1.0         # default
  --disaggregation-mode prefill           # search
  --disaggregation-transfer-backend nixl  # default
  --disaggregation-bootstrap-port 8998    # default
)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
