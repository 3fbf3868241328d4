#!/usr/bin/env bash
# TensorRT-LLM 1.2.1, mixed worker of trtllm-agg-1xtp1/dp16/ep16-h200_sxm-fp8-kvfp8-b64-t8192-mtp1: 16 x h200_sxm on 2 hosts
# aiconfig: role=mixed replicas=1 gpu=h200_sxm model=deepseek-v3 weights=fp8 kv=fp8 version=1.2.1
# Start it once, within a Slurm allocation of 2 hosts: srun starts its ranks there.
set -euo pipefail
command=(
  trtllm-serve deepseek-ai/DeepSeek-V3  # default: the public checkpoint of deepseek-v3
  --backend pytorch                     # default
  --tp_size 16                          # search
  --pp_size 1                           # search
  --ep_size 16                          # search
  --max_batch_size 64                   # search
  --max_num_tokens 8192                 # search
  --max_seq_len 4564                    # workload: 4000 + 500 + 64 of margin
)
command+=(--extra_llm_api_options "$(dirname "${BASH_SOURCE[0]}")/mixed.yml")
exec srun -N 2 --ntasks-per-node 8 --mpi=pmix trtllm-llmapi-launch "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
