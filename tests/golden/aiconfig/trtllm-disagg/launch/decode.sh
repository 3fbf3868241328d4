#!/usr/bin/env bash
# TensorRT-LLM 1.5, decode worker of trtllm-disagg-P2xtp2-h200_sxm-fp8-kvfp8-b64-t8192+D1xtp4-h200_sxm-fp8-kvfp8-b256-t8192: 4 x h200_sxm
# aiconfig: role=decode replicas=1 gpu=h200_sxm model=qwen3-32b weights=fp8 kv=fp8 version=1.5
# note: trtllm 1.5 is not covered by the table of flags (1.0.0 to 1.2.1): these are the flags of 1.2.1, the nearest; check them against its --help
# note: Qwen/Qwen3-32B has its weights in bf16; fp8 was chosen, which needs another checkpoint (--checkpoint)
set -euo pipefail
command=(
  trtllm-serve Qwen/Qwen3-32B  # default: the public checkpoint of qwen3-32b
  --backend pytorch            # default
  --tp_size 4                  # search
  --pp_size 1                  # search
  --max_batch_size 256         # search
  --max_num_tokens 8192        # search
  --max_seq_len 4564           # workload: 4000 + 500 + 64 of margin
)
command+=(--extra_llm_api_options "$(dirname "${BASH_SOURCE[0]}")/decode.yml")
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
