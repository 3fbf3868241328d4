#!/usr/bin/env bash
# SGLang 0.5.23, mixed worker of sglang-agg-1xtp1/dp16/ep16-h200_sxm-fp8-kvfp8-b64-t8192-mtp1: 16 x h200_sxm on 2 hosts
# aiconfig: role=mixed replicas=1 gpu=h200_sxm model=deepseek-v3 weights=fp8 kv=fp8 version=0.5.23
# Start it on each of the 2 hosts, NODE_RANK 0 to 1 and LEADER the address of rank 0.
set -euo pipefail
command=(
  python3 -m sglang.launch_server
  --model-path deepseek-ai/DeepSeek-V3  # default: the public checkpoint of deepseek-v3
  --tp-size 16                          # search
  --attn-dp-size 16                     # search
  --ep-size 16                          # search
  --kv-cache-dtype fp8_e4m3             # search
  --context-length 4564                 # workload: 4000 + 500 + 64 of margin
  --max-running-requests 1024           # search, of 16 ranks together
  --chunked-prefill-size 131072         # search, of 16 ranks together
  --max-prefill-tokens 16384            # default
  --mem-fraction-static 0.88            # default
  --schedule-policy fcfs                # default
  --schedule-conservativeness 1.0       # default
  --speculative-algorithm NEXTN         # search
  --speculative-num-steps 1             # search
  --speculative-eagle-topk 1            # default
  --speculative-num-draft-tokens 2      # search
)
: "${NODE_RANK:?0 to 1}" "${LEADER:?address of the host with rank 0}"
command+=(--nnodes 2 --node-rank "$NODE_RANK" --dist-init-addr "$LEADER:20000")
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
