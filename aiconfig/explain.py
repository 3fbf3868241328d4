"""Why a candidate is in the answer or not, in words: its reason with the numbers compared, its figures, its terms."""

from __future__ import annotations

from collections.abc import Iterator

from aiconfig import words
from aiconfig.breakdown import breakdown
from aiconfig.lookup import Looked
from aiconfig.outcome import Scored
from aiconfig.reasons import REASONS
from aiconfig.result import Result
from reports import text


def explain_lines(result: Result, looked: Looked) -> Iterator[str]:
    """Lines for people."""
    yield looked.candidate.name
    yield f"{words.deployment(looked.candidate)} on {words.gpus(looked.candidate)}"
    yield from _fate(result, looked)
    one = looked.scored
    if one is None:
        return
    yield ""
    yield from _figures(result, one)
    yield ""
    yield from _terms(result, one)


def _fate(result: Result, looked: Looked) -> Iterator[str]:
    if looked.place is not None:
        best = " (the best)" if looked.scored is result.best else ""
        fronted = ", on the front" if looked.candidate.name in result.front else ""
        yield f"place {looked.place} of {len(result.found)} in the answer{best}{fronted}"
    why = looked.left_out
    if why is None:
        if looked.place is None:
            yield "not looked at by this search: what follows is what the closed form says of it"
        return
    yield f"left out: {why.reason}, {REASONS[why.reason]}"
    if why.needs is not None and why.has is not None:
        unit = f" {why.unit}" if why.unit else ""
        yield f"  needs {why.needs:.6g}{unit}, has {why.has:.6g}{unit}"
    if why.detail:
        yield f"  {why.detail}"
    if why.reason == "dominated" and looked.scored is not None:
        yield from _dominated(result, looked.scored)


def _dominated(result: Result, one: Scored) -> Iterator[str]:
    """Who is at least as good by the closed form."""
    per_user = one.closed.tokens_per_s_per_user or 0.0
    for other in result.found:
        faster = (other.closed.tokens_per_s_per_user or 0.0) >= per_user
        if faster and other.closed.output_tokens_per_s >= one.closed.output_tokens_per_s:
            yield (
                f"  by {other.candidate.name}: {_pair(other)} against {_pair(one)} here (closed form, each at its load)"
            )
            return


def _pair(one: Scored) -> str:
    rates = text.figures(one.closed.output_tokens_per_s)
    return f"{rates} tok/s and {text.figures(one.closed.tokens_per_s_per_user)} tok/s/user"


def _figures(result: Result, one: Scored) -> Iterator[str]:
    estimate = one.estimate
    runs = f", {one.runs} runs" if one.runs else ""
    yield f"at {one.load} ({estimate.level}{runs}): {words.figure(estimate, result.request)}"
    judgement = one.screening if one.judgement.verdict == "not judged" else one.judgement
    hint = " (means: no verdict)" if judgement is not one.judgement else ""
    for limit in judgement.limits:
        yield f"  {words.limit_line(limit)}{hint}"
    for metric in ("ttft", "tpot", "e2e"):
        named = (f"{name} {text.time(estimate.value(metric, name))}" for name in ("mean", "p50", "p95", "p99")
                 if estimate.value(metric, name) is not None)  # fmt: skip
        yield f"  {metric.upper():<5}{', '.join(named)}; closed form {text.time(one.closed.value(metric, 'mean'))}"
    yield f"  {text.figures(estimate.requests_per_s)} requests/s, {text.figures(estimate.output_tokens_per_s)} tok/s"
    yield f"  {words.kv_line(one)}; bound: {estimate.bound}"
    for line in words.band_lines(estimate):
        yield f"  error: {line}"
    for note in estimate.notes:
        yield f"  note: {note}"


def _terms(result: Result, one: Scored) -> Iterator[str]:
    request = result.request
    for pool in breakdown(one.candidate, request.workload, one.fit, one.estimate, request.physics):
        memory = pool.memory
        yield (
            f"{pool.role} {pool.label}: {memory.weights_gib:.1f} GiB of weights and {memory.kv_gib:.1f} GiB of KV "
            f"on each of its GPUs, which have {memory.total_gib:.1f}"
        )
        for step in pool.steps:
            terms = ", ".join(
                f"{term} {text.time(seconds)}"
                for term, seconds in sorted(step.terms.items(), key=lambda item: -item[1])
                if seconds
            )
            yield f"  {step.what}: {text.time(step.total_s)} = {terms}"


def compare_lines(result: Result, a: Looked, b: Looked) -> Iterator[str]:
    """Two candidates side by side, with the change from the first to the second."""
    yield f"a  {a.candidate.name}"
    yield f"b  {b.candidate.name}"
    yield ""
    for side, looked in (("a", a), ("b", b)):
        for line in _fate(result, looked):
            yield f"{side}: {line.strip()}"
    one, other = a.scored, b.scored
    if one is None or other is None:
        return
    yield ""
    yield f"{'':<24}{'a':>22}{'b':>22}{'change':>12}"
    for label, mine, others in _rows(result, one, other):
        change = text.change(others / mine - 1.0) if mine and others is not None and mine is not None else ""
        yield f"{label:<24}{text.figures(mine):>22}{text.figures(others):>22}{change:>12}"
    for label, left, right in (
        ("load", str(one.load), str(other.load)),
        ("level", one.estimate.level, other.estimate.level),
        ("limits", one.judgement.verdict, other.judgement.verdict),
        ("bound", one.estimate.bound, other.estimate.bound),
    ):
        yield f"{label:<24}{left:>22}{right:>22}{'' if left == right else 'differs':>12}"


def _rows(result: Result, a: Scored, b: Scored) -> Iterator[tuple[str, float | None, float | None]]:
    request = result.request
    same = a.estimate.level == b.estimate.level
    for metric in ("ttft", "tpot", "e2e"):
        for name in ("mean", "p50", "p95", "p99"):
            values = [one.estimate.value(metric, name) for one in (a, b)]
            if (same or name == "mean") and values[0] is not None:
                yield f"{metric.upper()} {name}, ms", *(None if v is None else v * 1e3 for v in values)  # type: ignore[misc]
    yield "tok/s/user", a.estimate.tokens_per_s_per_user, b.estimate.tokens_per_s_per_user
    yield "tok/s/GPU bought", words.per_gpu(a.estimate, request), words.per_gpu(b.estimate, request)
    yield "output tok/s", a.estimate.output_tokens_per_s, b.estimate.output_tokens_per_s
    yield "GPUs in use", float(a.candidate.gpus), float(b.candidate.gpus)
    yield "KV peak, %", 100.0 * a.estimate.kv_share, 100.0 * b.estimate.kv_share
    yield "KV full at users", float(a.fit.users), float(b.fit.users)
