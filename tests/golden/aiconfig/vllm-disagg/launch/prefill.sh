#!/usr/bin/env bash
# vLLM 0.32.0, prefill worker of vllm-disagg-P2xtp2-h200_sxm-fp8-kvfp8-b64-t8192+D1xtp4-h200_sxm-fp8-kvfp8-b256-t8192: 2 x h200_sxm
# aiconfig: role=prefill replicas=2 gpu=h200_sxm model=qwen3-32b weights=fp8 kv=fp8 version=0.32.0
# Start 2 of these, each with GPUs of its own (CUDA_VISIBLE_DEVICES) and a PORT of its own on a shared host.
set -euo pipefail
# Where other workers fetch KV: an address that they reach, and a port of its own for each worker of a host.
export VLLM_NIXL_SIDE_CHANNEL_HOST="${NIXL_HOST:-127.0.0.1}"
export VLLM_NIXL_SIDE_CHANNEL_PORT="${NIXL_PORT:-5600}"
command=(
  vllm serve Qwen/Qwen3-32B                                                    # default: the public checkpoint of qwen3-32b
  --tensor-parallel-size 2                                                     # search
  --quantization fp8                                                           # search
  --kv-cache-dtype fp8                                                         # search
  --max-model-len 4564                                                         # workload: 4000 + 500 + 64 of margin
  --max-num-seqs 64                                                            # search
  --max-num-batched-tokens 8192                                                # search
  --gpu-memory-utilization 0.9                                                 # default
  --enable-prefix-caching                                                      # default
  --enable-chunked-prefill                                                     # default
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'  # default
)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
