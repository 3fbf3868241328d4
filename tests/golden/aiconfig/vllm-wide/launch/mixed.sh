#!/usr/bin/env bash
# vLLM 0.32.0, mixed worker of vllm-agg-1xtp1/dp16/ep16-h200_sxm-fp8-kvfp8-b64-t8192-mtp1: 16 x h200_sxm on 2 hosts
# aiconfig: role=mixed replicas=1 gpu=h200_sxm model=deepseek-v3 weights=fp8 kv=fp8 version=0.32.0
# Start it on each of the 2 hosts, NODE_RANK 0 to 1 and LEADER the address of rank 0.
set -euo pipefail
command=(
  vllm serve '/models/deepseek v3'                                    # given
  --tensor-parallel-size 1                                            # search
  --data-parallel-size 16                                             # search
  --enable-expert-parallel                                            # search
  --kv-cache-dtype fp8                                                # search
  --max-model-len 4564                                                # workload: 4000 + 500 + 64 of margin
  --max-num-seqs 64                                                   # search
  --max-num-batched-tokens 8192                                       # search
  --gpu-memory-utilization 0.9                                        # default
  --enable-prefix-caching                                             # default
  --enable-chunked-prefill                                            # default
  --speculative-config '{"method":"mtp","num_speculative_tokens":1}'  # search
)
: "${NODE_RANK:?0 to 1}" "${LEADER:?address of the host with rank 0}"
command+=(--data-parallel-size-local 8 --data-parallel-address "$LEADER" --data-parallel-start-rank "$((NODE_RANK * 8))")
[ "$NODE_RANK" = 0 ] || command+=(--headless)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
