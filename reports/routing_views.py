"""What the router did, in words and rows: for the terminal and the page alike. It computes no figure of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from policies.router.refusals import REFUSALS
from reports import text

if TYPE_CHECKING:
    from reports.report import EndFigures, Report
    from reports.told import CandidateFigures, DecisionFigures, ExplainedFigures, OracleFigures, OracleSample

ENDS_SHOWN: Final = 5


def end_line(end: EndFigures) -> str:
    """How many ended so, with their share, what they are counted as, and what they were like."""
    parts = [text.share(end.share)]
    if (counted := _counted_as(end)) is not None:
        parts.append(f"counted as {counted}")
    if end.prompt_tokens_mean is not None:
        parts.append(f"prompts of {text.figures(end.prompt_tokens_mean)} tokens")
    if end.first_s is not None:
        until = f" to {text.time(end.last_s)}" if end.last_s != end.first_s else ""
        parts.append(f"arrived {text.time(end.first_s)}{until}")
    if end.retry_after_mean_s is not None:
        parts.append(f"told to come again after {text.time(end.retry_after_mean_s)} on average")
    return f"{text.count(end.requests)} x {end.reason} ({', '.join(parts)})"


def _counted_as(end: EndFigures) -> str | None:
    kind = REFUSALS.get(end.code or "")
    return None if kind is None else kind.counted.value.replace("_", " ")


END_COLUMNS: Final = ("status", "counted by", "requests", "share", "prompt tokens, mean", "arrived", "reason")


def end_rows(report: Report) -> list[list[str]]:
    """Rows of the table of requests that did not complete."""
    return [
        [
            end.status,
            f"{end.code} ({counted})" if (counted := _counted_as(end)) is not None else end.code or "",
            text.count(end.requests),
            text.share(end.share),
            text.figures(end.prompt_tokens_mean),
            "" if end.first_s is None else f"{text.time(end.first_s)} to {text.time(end.last_s)}",
            end.reason,
        ]
        for end in report.ends
    ]


def cache_line(report: Report) -> str:
    """The hit rate, and how much of what could be reached it is."""
    line = f"hit rate {text.share(report.hit_rate)}"
    bound = report.hit_bound
    if bound is not None and bound.upper_bound is not None:
        line += f" of tokens; {text.share(bound.reached)} of blocks, upper bound {text.share(bound.upper_bound)}"
        line += " (endless cache for the whole cluster)"
    return line


def share_lines(report: Report) -> Iterator[str]:
    """How evenly each role was used; fairness of requests is said with the workers where there is one role."""
    for one in report.shares:
        if one.requests_share is None or one.tokens_share is None:
            continue
        several = len(report.shares) > 1
        fairness = f" (fairness {text.figures(one.requests_fairness)})" if several else ""
        yield (
            f"{one.role + ': ' if several else ''}of requests {_range(one.requests_share)} each{fairness}, of tokens "
            f"{_range(one.tokens_share)} (fairness {text.figures(one.tokens_fairness)})"
        )


def _range(ends: tuple[float, float]) -> str:
    return f"{text.share(ends[0])} to {text.share(ends[1])}"


def routing_lines(report: Report) -> Iterator[str]:
    """What the decisions came to; nothing for a mode that weighs nothing.

    Cached blocks are told of where the trace says what prompts share.
    """
    routing = report.routing
    if routing is None:
        return
    if routing.effectiveness is not None and report.meta.hash_known:
        yield (
            f"{text.counted(routing.decisions, 'decision')}; workers differed in cached blocks in "
            f"{text.share(routing.effectiveness)} of them"
        )
    if routing.non_max_overlap:
        share = routing.non_max_overlap / routing.decisions if routing.decisions else None
        tokens = "" if routing.overlap_lost_tokens is None else f" ({text.large(routing.overlap_lost_tokens)} tokens)"
        yield (
            f"{text.count(routing.non_max_overlap)} ({text.share(share)}) went to less than the longest overlap: "
            f"{text.large(routing.overlap_lost_blocks)} blocks{tokens} lost"
        )
    if routing.explained is not None:
        yield regret_line(routing.explained)
    if routing.oracle is not None:
        yield oracle_line(routing.oracle)


def regret_line(explained: ExplainedFigures) -> str:
    """Cost regret over all decisions whose terms were recorded."""
    if not explained.not_cheapest:
        return f"cost regret 0: each of {text.count(explained.decisions)} decisions took a cheapest worker"
    regret = explained.regret_blocks
    return (
        f"cost regret: mean {text.figures(regret.mean)} blocks, p95 {text.figures(regret.p95)}, longest "
        f"{text.figures(regret.max)}; {text.count(explained.not_cheapest)} of {text.count(explained.decisions)} "
        "decisions did not take the cheapest worker"
    )


def oracle_line(oracle: OracleFigures) -> str:
    """Regret in hindsight, and of how many decisions."""
    if not oracle.decisions:
        return "oracle regret: no decision of the sample could be told"
    regret = oracle.regret_s
    left_out = f", {text.count(oracle.left_out)} left out" if oracle.left_out else ""
    return (
        f"oracle regret (TTFT, {text.counted(oracle.decisions, 'decision')}, one in {oracle.every}{left_out}): "
        f"mean {text.time(regret.mean)}, p95 {text.time(regret.p95)}, longest {text.time(regret.max)}; "
        f"{text.share(oracle.best_chosen / oracle.decisions)} chose the best worker"
    )


# --- decision by decision ---------------------------------------------------------------------------------------------

DECISION_COLUMNS: Final = (
    "request", "decided at", "TTFT", "rule", "cost regret, blocks", "chosen", "runner-up", "difference",
)  # fmt: skip
DECISION_WORDS: Final = (5, 6, 7)
"""Columns of words."""


def decision_row(one: DecisionFigures, names: Mapping[int, str]) -> list[str]:
    """One decision: who was chosen and who was next, with their terms, and what told them apart."""
    return [
        one.request_id or f"row {one.row}",
        text.time(one.at_s),
        text.time(one.ttft_s),
        one.rule,
        text.figures(one.regret_blocks),
        terms(one.chosen, names),
        "nobody else could be chosen" if one.runner_up is None else terms(one.runner_up, names),
        "" if one.runner_up is None else difference(one.chosen, one.runner_up),
    ]


def terms(one: CandidateFigures, names: Mapping[int, str]) -> str:
    """A worker with the terms of its cost."""
    return (
        f"{names.get(one.worker_id, f'worker {one.worker_id}')}: cost {text.figures(one.cost, 4)}; "
        f"prompt {text.figures(one.prefill_blocks, 4)} - credit {text.figures(one.credit_blocks, 4)}, "
        f"decode {text.figures(one.decode_blocks, 4)}, {text.count(one.active_requests)} open, "
        f"{text.count(one.overlap_blocks)} cached"
    )


def difference(chosen: CandidateFigures, other: CandidateFigures) -> str:
    """The chosen one against the runner-up, term by term; what is equal is left out."""
    pairs = (
        ("cost", chosen.cost - other.cost),
        ("prompt", chosen.prefill_blocks - other.prefill_blocks),
        ("credit", chosen.credit_blocks - other.credit_blocks),
        ("decode", chosen.decode_blocks - other.decode_blocks),
        ("open", chosen.active_requests - other.active_requests),
        ("cached", chosen.overlap_blocks - other.overlap_blocks),
    )
    told = [f"{what} {_signed(value)}" for what, value in pairs if value]
    return ", ".join(told) or "none: all terms are equal"


def _signed(value: float) -> str:
    if isinstance(value, int):
        return f"{value:+,}"
    return f"{'+' if value > 0 else ''}{text.figures(value, 4)}"


ORACLE_COLUMNS: Final = ("request", "decided at", "chosen", "TTFT there", "best", "TTFT there", "oracle regret")


def oracle_row(one: OracleSample, names: Mapping[int, str]) -> list[str]:
    """One decision in hindsight."""
    return [
        f"row {one.row}",
        text.time(one.at_s),
        names.get(one.worker_id, f"worker {one.worker_id}"),
        text.time(one.ttft_s),
        names.get(one.best_worker_id, f"worker {one.best_worker_id}"),
        text.time(one.best_ttft_s),
        text.time(one.ttft_s - one.best_ttft_s),
    ]


def decision_tables(report: Report) -> Iterator[dict[str, object]]:
    """Titled tables of single decisions for the page; an empty one is left out."""
    routing = report.routing
    if routing is None:
        return
    names = {worker.worker_id: worker.name for worker in report.workers}
    if routing.explained is not None:
        for title, found in (
            ("The decisions with the largest cost regret", routing.explained.most_regretted),
            (
                "Where the requests that waited longest for their first token were sent, and why",
                routing.explained.slowest,
            ),
        ):
            if found:
                rows = [decision_row(one, names) for one in found]
                yield {"title": title, "columns": DECISION_COLUMNS, "rows": rows, "words": DECISION_WORDS}
    if routing.oracle is not None and routing.oracle.worst:
        rows = [oracle_row(one, names) for one in routing.oracle.worst]
        title = "The decisions of the sample that cost most in hindsight"
        yield {"title": title, "columns": ORACLE_COLUMNS, "rows": rows, "words": ()}
