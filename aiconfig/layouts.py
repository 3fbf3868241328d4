"""Ways to spread a model over the GPUs of a worker, and workers over a budget: all of them, legal or not, in order."""

from __future__ import annotations

from math import gcd
from typing import Final

from aiconfig.request import SearchRequest
from twin.perf.layout import Layout

LARGEST_TP: Final = 64
STAGES: Final = (1, 2, 4)
UNIT_WORKERS: Final = 8
"""Prefill and decode workers of the smallest group that a ratio is made of; larger ones are multiples of it."""


def layouts_of(request: SearchRequest, engine: str) -> tuple[Layout, ...]:
    """Layouts to look at, legal or not, in order: those that could be within reach of the fast links, and for
    mixture-of-experts models attention data parallelism over as many GPUs as there are."""
    domain = min(LARGEST_TP, request.gpu_of("mixed").domain_gpus)
    moe = request.find_model().experts is not None
    found = []
    for tp in _powers(domain):
        for dp in _powers(max(domain, request.gpus) // tp) if moe else (1,):
            for ep in _expert_splits(engine, tp * dp) if moe else (1,):
                found += [Layout(tp=tp, pp=pp, dp=dp, ep=ep) for pp in STAGES]
    return tuple(found)


def _expert_splits(engine: str, ranks: int) -> tuple[int, ...]:
    return tuple(sorted({1, ranks})) if engine == "vllm" else _powers(ranks)


def ratios(gpus: int, prefill_gpus: int, decode_gpus: int) -> list[tuple[int, int]]:
    """Numbers of (prefill, decode) workers within the budget: multiples of units of up to 8 + 8, in order."""
    found = []
    for p in range(1, UNIT_WORKERS + 1):
        for d in range(1, UNIT_WORKERS + 1):
            if gcd(p, d) == 1:
                unit = p * prefill_gpus + d * decode_gpus
                found += [(p * k, d * k) for k in range(1, gpus // unit + 1)]
    return sorted(found)


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(largest.bit_length())) if largest else ()
