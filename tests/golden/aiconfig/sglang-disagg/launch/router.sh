#!/usr/bin/env bash
# Router in front of prefill and decode workers. Names like prefill-0 stand for the addresses of your workers.
set -euo pipefail
command=(
  python3 -m sglang_router.launch_router
  --pd-disaggregation
  --policy round_robin                    # as was predicted
  --prefill http://prefill-0:8000 8998
  --prefill http://prefill-1:8000 8998
  --decode http://decode-0:8000
)
exec "${command[@]}" --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" "$@"
