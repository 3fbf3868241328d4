#!/usr/bin/env bash
# vLLM 0.32.0, mixed worker of vllm-agg-2xtp2-h200_sxm-fp8-kvfp8-b64-t8192: 2 x h200_sxm
# aiconfig: role=mixed replicas=2 gpu=h200_sxm model=llama-3.1-8b weights=fp8 kv=fp8 version=0.32.0
# Start 2 of these, each with GPUs of its own (CUDA_VISIBLE_DEVICES) and a PORT of its own on a shared host.
# Put a load balancer in front that spreads requests evenly: that is what was predicted.
set -euo pipefail
command=(
  vllm serve meta-llama/Llama-3.1-8B-Instruct  # default: the public checkpoint of llama-3.1-8b
  --tensor-parallel-size 2                     # search
  --quantization fp8                           # search
  --kv-cache-dtype fp8                         # search
  --max-model-len 4564                         # workload: 4000 + 500 + 64 of margin
  --max-num-seqs 64                            # search
  --max-num-batched-tokens 8192                # search
  --gpu-memory-utilization 0.9                 # default
  --enable-prefix-caching                      # default
  --enable-chunked-prefill                     # default
)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
