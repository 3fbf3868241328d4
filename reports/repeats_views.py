"""Live repeats and their twin for people: the table of errors beside the live spread, in the terminal or as Markdown.

It shows what reports/repeats.py found and computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports import text
from reports.compare_views import plain_table
from reports.plots import Say
from reports.repeats import CLOSE, JUDGED, Fidelity, Figure, is_close
from reports.tables import WIDTH, rendered

COLUMNS = ("", "live mean", "live min", "live max", "twin", "error", "")
HOST = "contention for cores between engines, frontend and load generator, but for its mean in the fitted step times"
"""What a twin of a live run does not model, beside what its own report says."""


def fidelity_text(found: Fidelity, *, colour: bool = False, width: int = WIDTH) -> str:
    """The comparison in at most `width` columns."""
    head = [f"live  {', '.join(found.live)}", f"twin  {found.twin}", *(f"      {line}" for line in found.latency)]
    head += [f"note: {note}" for note in found.notes]
    table = rendered(plain_table(COLUMNS, [row(one) for one in found.figures]), colour, width)
    return "\n\n".join(("\n".join(head), table, "\n".join(closing(found))))


def fidelity_markdown(found: Fidelity) -> str:
    """The same table, with what follows from it as a list."""
    lines = [" | ".join(cells) for cells in (COLUMNS, ["---"] * len(COLUMNS), *map(row, found.figures))]
    return "\n".join(
        [*(f"| {line} |" for line in lines), "", *(f"* {line}" for line in (*found.notes, *closing(found)))]
    )


def row(one: Figure) -> list[str]:
    """One line of the table."""
    say: Say = {"s": text.time, "share": text.share, "count": text.count, "rate": text.figures}[one.unit]
    values = [text.NA if value is None else say(value) for value in (one.live, one.low, one.high, one.twin)]
    return [one.name, *values, "" if one.error is None else text.change(one.error), verdict(one)]


def verdict(one: Figure) -> str:
    """What the error means beside the spread; nothing where one of them is not known."""
    if one.inside is None or one.unit == "count":
        return ""
    if one.inside:
        return "not distinguishable"
    return "outside the spread"


def closing(found: Fidelity) -> Iterator[str]:
    """What the table comes to, and what it rests on."""
    yield f"{text.counted(found.rows, 'request')} compared, {text.counted(len(found.live), 'live run')}"
    yield f"sent to the same worker as live: {_shares(found.same_worker)}" + (
        f"; live runs among themselves: {_shares(found.live_same_worker)}" if found.live_same_worker else ""
    )
    part = found.e2e_part
    if part is not None:
        yield (
            f"the difference of mean E2E is {text.time(part.ttft_s)} before the first token (queue, prompt, way to the "
            f"engine) and {text.time(part.decode_s)} after it (decode)"
        )
    if found.close is not None:
        missed = [name for name in JUDGED if not is_close(found.figure(name))]
        told = f"missed by {', '.join(missed)}" if missed else "held"
        yield f"means of TTFT, ITL and E2E within the larger of {CLOSE:.0%} and the live spread: {told}"
    for what in (HOST, *found.not_modelled):
        yield f"not modelled: {what}"


def _shares(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return text.share(low) if low == high else f"{text.share(low)} to {text.share(high)}"
