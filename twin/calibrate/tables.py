"""Errors by slice as text, and as lines of a Markdown table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twin.calibrate.bands import Metrics
from twin.calibrate.errors import Errors

COLUMNS = ("rows", "mean", "median", "bias", "p90", "<=10%", "<=20%", "<=50%", "coverage")


def text_table(found: Mapping[str, Metrics], tpot: str = "TPOT") -> str:
    """For a terminal: TPOT (or what else `tpot` says) and TTFT one below the other in each slice, in percent."""
    first = "slice"
    width = max(len(first), *(len(name) for name in found))
    lines = [f"{first:{width}}  time {' '.join(f'{name:>8}' for name in COLUMNS)}"]
    for name, metrics in found.items():
        for metric, errors in ((tpot, metrics.tpot), ("TTFT", metrics.ttft)):
            if errors is not None:
                lines.append(f"{name:{width}}  {metric} {' '.join(f'{cell:>8}' for cell in _cells(errors))}")
                name = ""
    return "\n".join(lines)


def markdown_table(found: Mapping[str, Metrics]) -> str:
    """For a document."""
    heads = [
        f"{metric} {name}"
        for metric in ("TPOT", "TTFT")
        for name in ("rows", "mean / median", "bias", "p90", "≤ 10 / 20 / 50 %")
    ]
    lines = [f"| slice | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, metrics in found.items():
        cells = [cell for errors in (metrics.tpot, metrics.ttft) for cell in _short(errors)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(errors: Errors) -> Iterator[str]:
    yield f"{errors.rows:,}"
    for share in (errors.mape, errors.median, errors.bias, errors.p90):
        yield f"{100 * share:.1f}"
    for share in (*errors.within, errors.coverage):
        yield f"{100 * share:.0f}"


def _short(errors: Errors | None) -> Iterator[str]:
    if errors is None:
        yield from ("–",) * 5
        return
    yield f"{errors.rows:,}"
    yield f"{100 * errors.mape:.1f} / {100 * errors.median:.1f}"
    yield f"{100 * errors.bias:+.1f}"
    yield f"{100 * errors.p90:.1f}"
    yield " / ".join(f"{100 * share:.0f}" for share in errors.within)
