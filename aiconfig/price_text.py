"""A priced deployment for the terminal: figures in milliseconds, then as much detail as was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiconfig import words
from aiconfig.bands import band_of
from aiconfig.breakdown import PoolBreakdown
from aiconfig.price import Price
from reports import text

DETAILS: Final = ("time", "memory", "provenance")
METRICS: Final = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "E2E"))
STATISTICS: Final = ("mean", "p50", "p95", "p99")


def price_text(price: Price, details: tuple[str, ...]) -> str:
    """The whole text; `details` are names of `DETAILS`."""
    blocks = [_head(price), _figures(price), _rates(price)]
    blocks += [_time(price.pools)] if "time" in details else []
    blocks += [_memory(price)] if "memory" in details else []
    blocks += [_provenance(price)] if "provenance" in details else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(price: Price) -> Iterator[str]:
    judged = words.limits_line(price.judgement)
    yield (
        f"{words.deployment(price.candidate)} on {words.gpus(price.candidate)} at {price.load}"
        f"{': ' if judged else ''}{judged}"
    )
    yield f"name  {price.candidate.name}"


def _figures(price: Price) -> Iterator[str]:
    simulated = price.simulated
    yield f"{'ms':<5}{'closed form':>12}" + (
        "".join(f"{name:>11}" for name in STATISTICS) + "   simulated" if simulated else ""
    )
    for metric, label in METRICS:
        cells = f"{label:<5}{words.ms(price.closed.value(metric, 'mean')):>12}"
        if simulated is not None:
            cells += "".join(f"{words.ms(simulated.value(metric, statistic)):>11}" for statistic in STATISTICS)
        band = band_of(price.estimate, metric)
        yield cells + (f"   {words.band(band)}" if band is not None else "")


def _rates(price: Price) -> Iterator[str]:
    best = price.estimate
    yield (
        f"throughput  {text.figures(best.requests_per_s)} requests/s, {text.figures(best.output_tokens_per_s)} output "
        f"tokens/s, {text.figures(best.tokens_per_s_per_gpu)} for each of the {price.candidate.gpus} GPUs in use, "
        f"{text.figures(best.tokens_per_s_per_user)} for each user"
    )
    yield f"KV          peak {text.share(best.kv_share)}; full at {price.fit.users:,} users"
    yield f"bound       {best.bound}"
    for line in words.band_lines(best):
        yield f"error       {line}"
    for note in best.notes:
        yield f"note        {note}"


def _time(pools: tuple[PoolBreakdown, ...]) -> Iterator[str]:
    for pool in pools:
        for step in pool.steps:
            yield f"{pool.role} {pool.label}: {step.what}, {text.time(step.total_s)}"
            for term, seconds in step.terms.items():
                if seconds:
                    yield f"  {words.ms(seconds):>9} ms  {seconds / step.total_s:>6.1%}  {term}"


def _memory(price: Price) -> Iterator[str]:
    for pool in price.pools:
        memory = pool.memory
        yield f"{pool.role} {pool.label}: {memory.total_gib:.1f} GiB on each GPU, the tightest of them"
        yield f"  {memory.weights_gib:>8.2f} GiB  weights"
        kept = f"{memory.kv_tokens:,} tokens and {memory.users:,} requests for each worker"
        yield f"  {memory.kv_gib:>8.2f} GiB  KV: {kept}"
        yield f"  {memory.other_gib:>8.2f} GiB  activations, graphs, and what the engine leaves free"


def _provenance(price: Price) -> Iterator[str]:
    told = [line for pool in price.pools for line in (pool.provenance, *pool.notes)]
    for line in dict.fromkeys(told):
        yield f"latency     {line}"
