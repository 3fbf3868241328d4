"""The benchmark of a deployment at the load that was predicted for it, and what it should print.

Lengths are those of the workload: uniform between a share of the longest and the longest. The client is vLLM's for
vLLM and TensorRT-LLM (they answer the same API) and SGLang's for SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiconfig.emit.launch import array
from aiconfig.emit.plan import DEFAULT, PORT, Plan
from aiconfig.emit.worker import Words
from aiconfig.emit.yamltext import one_line
from aiconfig.estimate import Band, Estimate
from policies.errors import ConfigError

REQUESTS_PER_USER = 10
LEAST_REQUESTS = 200
"""As a simulation plays them (workload.py)."""
VLLM_PROGRAM = ("vllm", "bench", "serve")
SGLANG_PROGRAM = ("python3", "-m", "sglang.bench_serving")
SHOWN = (("ttft", ("mean", "p50", "p95", "p99")), ("tpot", ("mean", "p50", "p95", "p99")), ("e2e", ("mean", "p95")))


def bench_files(plan: Plan) -> dict[str, str]:
    """The script that measures."""
    lines = ["#!/usr/bin/env bash", *(f"# {one_line(line)}".rstrip() for line in _head(plan))]
    lines += ["set -euo pipefail", *array("command", program(plan), tuple(words(plan)))]
    lines.append(f'exec "${{command[@]}}" --base-url "${{1:-http://127.0.0.1:{PORT}}}" "${{@:2}}"')
    return {"bench.sh": "\n".join(lines) + "\n"}


def program(plan: Plan) -> tuple[str, ...]:
    """The client."""
    return SGLANG_PROGRAM if plan.engine == "sglang" else VLLM_PROGRAM


def words(plan: Plan) -> Iterator[Words]:
    """The client's arguments, without the address."""
    yield Words(key="model", words=("--model", plan.loads), origin=plan.loads_origin)
    yield from _sglang_lengths(plan) if plan.engine == "sglang" else _vllm_lengths(plan)
    own = "workload" if plan.workload.requests is not None else DEFAULT
    yield Words(key="requests", words=("--num-prompts", str(requests(plan))), origin=own)
    load = plan.load
    if load is None:
        raise ConfigError("a benchmark needs the load that was predicted (users or requests a second)")
    origin = f"sla: the largest load that keeps {plan.sla}" if plan.sla else "load asked for"
    if load.users is not None:
        yield Words(key="users", words=("--max-concurrency", str(load.users)), origin=origin)
    else:
        yield Words(key="rate", words=("--request-rate", f"{load.rps:.6g}"), origin=origin)
    yield Words(key="seed", words=("--seed", str(plan.workload.seed)), origin="workload")


def requests(plan: Plan) -> int:
    """How many requests are sent."""
    if plan.workload.requests is not None:
        return plan.workload.requests
    users = plan.load.users if plan.load and plan.load.users else 0
    return max(LEAST_REQUESTS, REQUESTS_PER_USER * users)


def _vllm_lengths(plan: Plan) -> Iterator[Words]:
    """vLLM draws evenly between (1 - r) and (1 + r) times a length; the shared prefix comes on top of it."""
    load = plan.workload
    yield Words(key="backend", words=("--backend", "vllm"), origin=DEFAULT)
    yield Words(key="dataset", words=("--dataset-name", "random"), origin=DEFAULT)
    ratio = (1.0 - load.min_ratio) / (1.0 + load.min_ratio)
    isl = max(1, round(load.mean_isl) - load.prefix_tokens)
    yield Words(key="isl", words=("--random-input-len", str(isl)), origin="workload")
    yield Words(key="osl", words=("--random-output-len", str(round(load.mean_osl))), origin="workload")
    yield Words(key="ratio", words=("--random-range-ratio", f"{ratio:.6g}"), origin="workload")
    if load.prefix_tokens:
        yield Words(key="prefix", words=("--random-prefix-len", str(load.prefix_tokens)), origin="workload")
    yield Words(key="eos", words=("--ignore-eos",), origin=DEFAULT)
    yield Words(key="metrics", words=("--percentile-metrics", "ttft,tpot,itl,e2el"), origin=DEFAULT)
    yield Words(key="percentiles", words=("--metric-percentiles", "50,90,95,99"), origin=DEFAULT)


def _sglang_lengths(plan: Plan) -> Iterator[Words]:
    """SGLang draws evenly between r times a length and the length. The API is OpenAI's: what stands in front of workers
    (Dynamo, llm-d) does not answer SGLang's own."""
    load = plan.workload
    yield Words(key="backend", words=("--backend", "sglang-oai"), origin=DEFAULT)
    if load.prefix_tokens:
        shared, own = str(load.prefix_tokens), str(load.isl - load.prefix_tokens)
        yield Words(key="dataset", words=("--dataset-name", "generated-shared-prefix"), origin=DEFAULT)
        yield Words(key="groups", words=("--gsp-num-groups", "1"), origin="workload")
        yield Words(key="group", words=("--gsp-prompts-per-group", str(requests(plan))), origin="workload")
        yield Words(key="prefix", words=("--gsp-system-prompt-len", shared), origin="workload")
        yield Words(key="isl", words=("--gsp-question-len", own), origin="workload")
        yield Words(key="osl", words=("--gsp-output-len", str(load.osl)), origin="workload")
        return
    yield Words(key="dataset", words=("--dataset-name", "random-ids"), origin=DEFAULT)
    yield Words(key="isl", words=("--random-input-len", str(load.isl)), origin="workload")
    yield Words(key="osl", words=("--random-output-len", str(load.osl)), origin="workload")
    yield Words(key="ratio", words=("--random-range-ratio", f"{load.min_ratio:.6g}"), origin="workload")


def _head(plan: Plan) -> Iterator[str]:
    yield f"Benchmark of {plan.candidate.name} at {plan.load}: bench.sh [URL [FURTHER FLAGS]]"
    if plan.workload.trace is not None:
        yield f"note: the search used {plan.workload.trace}; this sends random requests of its mean lengths"
    if plan.engine != "sglang" and plan.workload.min_ratio < 1.0 and plan.workload.prefix_tokens:
        yield "note: this client draws the length of a prompt without its shared prefix"
    if plan.engine == "sglang" and plan.workload.min_ratio < 1.0 and plan.workload.prefix_tokens:
        yield "note: this client has no lengths that vary behind a shared prefix; all are the longest"
    yield from expected(plan.estimate)


def expected(estimate: Estimate | None) -> Iterator[str]:
    """What the benchmark should print, if the prediction holds."""
    if estimate is None:
        yield "No prediction was given, so there is nothing to compare with."
        return
    yield f"It should print about this ({estimate.level}, predicted, not measured):"
    yield f"  requests/s {estimate.requests_per_s:.4g}, output tokens/s {estimate.output_tokens_per_s:.5g}"
    for metric, statistics in SHOWN:
        known = [(name, estimate.value(metric, name)) for name in statistics]
        shown = ", ".join(f"{name} {1e3 * value:.4g}" for name, value in known if value is not None)
        if shown:
            yield f"  {metric} in ms: {shown}{_within(estimate.bands.get(metric))}"


def _within(band: Band | None) -> str:
    if band is None:
        return ""
    nine_in_ten = "" if band.wide is None else f", nine in ten within {band.wide:.0%}"
    return f" (half of the predictions are within {band.typical:.0%}{nine_in_ten}: {band.level})"
