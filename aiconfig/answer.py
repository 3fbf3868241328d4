"""The answer of a search for the terminal: the best first, then why, then what else there is to know.

Nothing is computed here and nothing is printed: lines go to whoever asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from aiconfig import words
from aiconfig.candidate import MODES
from aiconfig.gain_text import gain_lines
from aiconfig.judge import Judgement
from aiconfig.outcome import Scored
from aiconfig.plot_text import Dot, scatter
from aiconfig.reasons import REASONS
from aiconfig.result import Result, objective_of
from reports import text

if TYPE_CHECKING:
    pass

WIDTH: Final = 120
"""Columns of the table where the terminal is not wider."""


def answer_text(
    result: Result,
    *,
    folder: str | None,
    colour: bool = False,
    width: int = WIDTH,
    plot: bool = False,
    explain: bool = False,
) -> str:
    """The whole answer; `folder` is where the files of the search are, if any were written. With `explain` there is a
    candidate for each reason."""
    blocks = [
        "\n".join(headline(result)),
        _table(result, colour, width),
        "\n".join(side_by_side(result)),
        "\n".join(gain_lines(result.request, result.gains, result.found)),
        "\n".join(_plot(result)) if plot else "",
        "\n".join(_sensitivity(result)),
        "\n".join(_left_out(result, explain)),
        "\n".join(_provenance(result)),
        "\n".join(_next(result, folder)),
    ]
    return "\n\n".join(block for block in blocks if block)


# ---------------------------------------------------------------- the best, or the nearest


def headline(result: Result) -> Iterator[str]:
    """What to deploy and whether it keeps the limits; if nothing does, what comes nearest and what would help."""
    best = result.best
    if best is not None:
        yield f"best  {_first(best, result)}"
        yield f"name  {best.candidate.name}"
        if result.soft and not best.judgement.kept:
            yield "limits are soft: this is the smallest violation, not a deployment that keeps them"
        return
    if not result.complete and not result.found and not result.counts.scored:
        yield "not known  the search was stopped before anything was looked at; give it more time"
        return
    if result.request.sla is None:
        yield "no deployment fits; the reasons are below"
        return
    yield from _nothing(result)


def _first(one: Scored, result: Result) -> str:
    judged = words.limits_line(one.judgement) or "no limits were given"
    return (
        f"{words.deployment(one.candidate)} on {words.gpus(one.candidate)} at {one.load}: {judged}; "
        f"{words.figure(one.estimate, result.request)}"
    )


def _nothing(result: Result) -> Iterator[str]:
    assert result.request.sla is not None
    limits = ", ".join(str(slo) for slo in result.request.sla.slos)
    unjudged = not result.simulated and any(one.judgement.verdict == "not judged" for one in result.found)
    if result.nearest is None and unjudged:
        first = result.found[0]
        yield f"not known  nothing was simulated, so nothing is known to keep {limits}; best by means:"
        yield f"  {words.deployment(first.candidate)} on {words.gpus(first.candidate)} at {first.load}: " + "; ".join(
            words.limit_line(limit) for limit in first.screening.limits
        ).replace("p95 ", "mean against p95 ")
        return
    yield f"none  no deployment meets {limits}"
    if result.nearest is None:
        return
    miss = result.nearest.scored
    judgement = _known(miss)
    binding = judgement.binding
    over = f": {words.limit_line(binding)}" if binding is not None else ""
    yield f"nearest  {words.deployment(miss.candidate)} on {words.gpus(miss.candidate)} at {miss.load}{over}"
    yield f"name  {miss.candidate.name}"
    if not result.nearest.changes:
        yield "no single change that was tried (formats, prompts, load, GPUs, limits) makes it keep them"
        return
    yield "any one of these makes it keep them (each was evaluated):"
    for change in result.nearest.changes:
        yield f"  {change.text}  ({change.estimate.level})"


def _known(one: Scored) -> Judgement:
    """The verdict, or where it is not one yet, the comparison of means."""
    return one.screening if one.judgement.verdict == "not judged" else one.judgement


# ---------------------------------------------------------------- tables


def _table(result: Result, colour: bool, width: int) -> str:
    from rich.table import Table

    from reports.tables import rendered

    shown = result.found[: result.request.top]
    if not shown:
        return ""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for at, name in enumerate(columns(result)):
        table.add_column(name, justify="left" if at in (1, 2, 3) else "right", overflow="fold")
    for row in rows(result):
        table.add_row(*row)
    return rendered(table, colour, width) + f"\n{_footnote(result)}"


def columns(result: Result) -> list[str]:
    """Headers of the table."""
    sla, first = result.request.sla, result.found[0].estimate
    ttft, tpot = (words.statistic_of(sla, metric, first) for metric in ("ttft", "tpot"))
    objective = objective_of(result.request)
    extra = [] if objective.name == "throughput-per-gpu" else [objective.unit]
    return [
        "", "deployment", "load", "limits", f"TTFT {ttft} ms", f"TPOT {tpot} ms", "tok/s/user", "tok/s/GPU", *extra,
        "KV", "band %", "bound",
    ]  # fmt: skip


def rows(result: Result) -> list[list[str]]:
    """A row for each of the first candidates."""
    return [_row(place, one, result) for place, one in enumerate(result.found[: result.request.top], start=1)]


def _row(place: int, one: Scored, result: Result) -> list[str]:
    request, estimate = result.request, one.estimate
    latencies = (
        words.ms(estimate.value(metric, words.statistic_of(request.sla, metric, estimate)))
        for metric in ("ttft", "tpot")
    )
    objective = objective_of(request)
    extra = [] if objective.name == "throughput-per-gpu" else [words.figure(estimate, request).split()[0]]
    return [
        str(place),
        words.deployment(one.candidate),
        str(one.load),
        one.judgement.verdict if one.judgement.limits else "none",
        *latencies,
        text.figures(estimate.tokens_per_s_per_user),
        text.figures(words.per_gpu(estimate, request)),
        *extra,
        text.share(estimate.kv_share),
        words.bands_cell(estimate),
        estimate.bound,
    ]


def _footnote(result: Result) -> str:
    level = "simulated" if result.simulated else "by the closed form (means, not judged on percentiles)"
    objective = objective_of(result.request)
    more = len(result.found) - result.request.top
    rest = f"; {more} more in candidates.parquet" if more > 0 else ""
    return (
        f"figures are {level}; tok/s/GPU counts the {result.request.gpus} GPUs of the budget; band: half of the errors "
        f"of TTFT / TPOT\nbest by {objective.name}: {objective.definition} (denominator: {objective.denominator}){rest}"
    )


def side_by_side(result: Result) -> Iterator[str]:
    """The best of each mode, one line each, where both were looked at."""
    found = [(mode, result.best_of(mode)) for mode in MODES if mode in result.request.modes]
    if len(found) < 2:
        return
    for mode, one in found:
        if one is None:
            yield f"best {mode:<7} none"
            continue
        estimate, sla = one.estimate, result.request.sla
        ttft, tpot = (words.statistic_of(sla, metric, estimate) for metric in ("ttft", "tpot"))
        latencies = (
            f"TTFT {ttft} {text.time(estimate.value('ttft', ttft))}, "
            f"TPOT {tpot} {text.time(estimate.value('tpot', tpot))}"
        )
        yield (
            f"best {mode:<7} {words.deployment(one.candidate)} at {one.load}: {one.judgement.verdict}, {latencies}, "
            f"{text.figures(words.per_gpu(estimate, result.request))} tok/s/GPU"
        )


# ---------------------------------------------------------------- plot


def _plot(result: Result) -> list[str]:
    """Tokens a second for each user against those for each GPU; the front, the first ones by their place."""
    dots = []
    places = {one.candidate.name: str(at) for at, one in enumerate(result.found[: result.request.top], start=1)}
    for one in reversed(result.found):
        per_user = one.estimate.tokens_per_s_per_user
        if per_user is None:
            continue
        name = one.candidate.name
        mark = places.get(name) or ("o" if name in result.front else "." if not one.distance else "x")
        dots.append(Dot(per_user, words.per_gpu(one.estimate, result.request), mark[-1]))
    lines = scatter(dots, "tok/s/user", "tok/s/GPU")
    return [*lines, "1.. place in the table, o on the front, . dominated, x beyond a limit"] if lines else []


# ---------------------------------------------------------------- the rest


def _sensitivity(result: Result) -> Iterator[str]:
    if not result.variations:
        return
    yield "if the demand is not what was asked for, the first of these:"
    width = max(len(one.name) for one in result.variations)
    for one in result.variations:
        if one.estimate is None or one.judgement is None:
            yield f"  {one.name:<{width}}  cannot take it"
            continue
        judged = words.limits_line(one.judgement) or "no limits"
        yield (
            f"  {one.name:<{width}}  {judged}; {text.figures(words.per_gpu(one.estimate, result.request))} tok/s/GPU "
            f"({one.estimate.level})"
        )


def _left_out(result: Result, explain: bool) -> Iterator[str]:
    counts = result.counts
    examples = {one.reason: one for one in result.examples} if explain else {}
    yield (
        f"looked at  {counts.legal:,} legal deployments, {counts.scored:,} estimated by the closed form, "
        f"{counts.simulated:,} simulated"
    )
    for reason, count in counts.reasons.items():
        yield f"  {count:>7,}  {reason}: {REASONS[reason]}"
        if reason in examples:
            yield f"           e.g. {examples[reason].line()}"


def _provenance(result: Result) -> Iterator[str]:
    for line in result.provenance:
        yield f"latency  {line}"
    for line in words.band_lines(result.found[0].estimate) if result.found else ():
        yield f"error    {line}"
    for note in result.notes:
        yield f"note     {note}"


def _next(result: Result, folder: str | None) -> Iterator[str]:
    if folder is None:
        return
    checks = []
    if result.best is not None and result.simulated:
        checks.append(f"twin replay --config {folder}/best.toml     (gives the same figures)")
    if result.best is not None:
        checks.append(f"{folder}/verify.py                     (measures the real thing and compares)")
    for at, check in enumerate(checks):
        yield f"{'' if at else 'verify':<9}{check}"
    yield f"files    {folder}"
