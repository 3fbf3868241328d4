"""What KV tiers did, in lines for a person and as bars: where prompts were found, what moved, what went wrong.

Words and sums only; the figures are those of `RunMeta` (`kvbm`, `tiers`, `moved_bytes`). A run without tiers below its
devices gets none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from reports import text
from reports.report import Report

if TYPE_CHECKING:
    from reports.bars import Bars

TIERS: Final = {"g1": "device", "g2": "host memory", "g3": "disk", "g4": "remote store"}
PEERS: Final = "other workers"
_MISSES: Final = {
    "absent": "nobody had",
    "hole": "behind a gap",
    "no_room": "without room",
    "slower": "faster to compute",
    "failed": "read in vain",
    "last_token": "of the last token",
}
_TROUBLES: Final = ("failed_reads", "failed_writes", "dropped", "skipped")

_COLOURS: Final = {"g1": 0, "g2": 2, "g3": 1, "g4": 3}
_BOUND_COLOUR: Final = 5
_PEERS_COLOUR: Final = 4

Counts = Mapping[str, int]


def tier_lines(kvbm: Mapping[str, object]) -> Iterator[str]:
    """One line of look-ups, one of misses, one for each tier and for other workers' host memory."""
    hits = _counts(kvbm.get("hits"))
    if not hits:
        return
    looked = hits.get("lookups", 0)
    found = [f"{_share(hits[tier], looked)} in {name}" for tier, name in TIERS.items() if hits.get(tier)]
    yield f"found {', '.join(found) or 'nothing'} of {text.count(looked)} blocks (first admissions)"
    misses = [
        f"{_share(hits[f'miss_{why}'], looked)} {words}" for why, words in _MISSES.items() if hits.get(f"miss_{why}")
    ]
    if misses:
        yield f"computed: {', '.join(misses)}"
    edges = kvbm.get("edges")
    for tier, edge in edges.items() if isinstance(edges, Mapping) else ():
        yield f"{TIERS.get(tier, tier)}: {_edge(_counts(edge))}"
    peers = _counts(kvbm.get("peers"))
    if peers:
        yield f"{PEERS}: {_read(peers)}"
    asked = _counts(kvbm.get("registry"))
    if asked:
        late = f", {text.count(asked.get('late', 0))} without an answer in time" if asked.get("late") else ""
        yield f"registry: {text.counted(asked.get('asked', 0), 'look-up')}{late}"
    fetched = _counts(kvbm.get("prefetch"))
    if fetched:
        figures = (text.count(fetched.get(name, 0)) for name in ("fetched", "used", "wasted"))
        yield "fetched ahead: {} blocks, {} used, {} in vain".format(*figures)


def tier_bars(report: Report) -> Iterator[Bars]:
    """Where prompt blocks were found, and how many bytes went down and came up; nothing for a run without tiers."""
    found = report.meta.tiers
    if report.meta.kvbm or any(found.get(f"{tier}_hit_blocks") for tier in TIERS if tier != "g1"):
        if found.get("lookup_blocks"):
            yield _hit_bars(report)
        moved = list(_moved(report))
        if any(n for _, n, _ in moved):
            yield _moved_bars(moved)


def _hit_bars(report: Report) -> Bars:
    """The hit rate in blocks, in one bar of a part for each tier; below it what an endless cache would have had."""
    from reports.bars import Bars, Part, Row

    found, edges = report.meta.tiers, _edges(report)
    looked = found["lookup_blocks"]
    blocks = {tier: found.get(f"{tier}_hit_blocks", 0) for tier in TIERS}
    parts = [
        Part(label=name, value=blocks[tier] / looked, colour=_COLOURS[tier], says=_share(blocks[tier], looked))
        for tier, name in TIERS.items()
        if blocks[tier] or tier == "g1" or tier in edges
    ]
    rows = [Row(label="found", parts=parts, says=_share(sum(blocks.values()), looked))]
    bound = report.hit_bound.upper_bound if report.hit_bound else None
    if bound is not None:
        says = text.share(bound)
        part = Part(label="endless cache", value=bound, colour=_BOUND_COLOUR, says=says)
        rows.append(Row(label="upper bound", parts=[part], says=says))
    return Bars(
        title="Hit rate by tier",
        note=f"share of {text.count(looked)} full prompt blocks, at first admissions; the frame is all of them",
        rows=rows,
        full=1.0,
        legend=[(f"{part.label} {part.says}", part.colour) for part in parts],
    )


def _moved(report: Report) -> Iterator[tuple[str, int, int]]:
    """What went down to each tier and came up from it, and from other workers: label, bytes, colour."""
    edges = _edges(report)
    for tier, edge in edges.items():
        name, colour = TIERS.get(tier, tier), _COLOURS.get(tier, _BOUND_COLOUR)
        yield f"down to {name}", edge.get("stored_bytes", 0), colour
        yield f"up from {name}", edge.get("loaded_bytes", 0), colour
    peers = _counts(report.meta.kvbm.get("peers"))
    if peers:
        yield f"up from {PEERS}", peers.get("loaded_bytes", 0), _PEERS_COLOUR
    if not edges:  # a plain host tier of the engine: loads are known where they cross a link, what goes down is not
        yield f"up from {TIERS['g2']}", report.meta.moved_bytes.get("host", 0), _COLOURS["g2"]


def _moved_bars(moved: Sequence[tuple[str, int, int]]) -> Bars:
    from reports.bars import Bars, Part, Row

    return Bars(
        title="Bytes moved between tiers",
        note="down: stored in a tier; up: loaded from it to a device, read in vain included",
        rows=[
            Row(label=label, parts=[Part(label=label, value=n, colour=colour, says=_bytes(n))], says=_bytes(n))
            for label, n, colour in moved
        ],
        full=max(n for _, n, _ in moved),
    )


def _bytes(n: int) -> str:
    return f"{text.large(n)}B" if n >= 1000 else f"{n} B"


def _edges(report: Report) -> dict[str, Counts]:
    edges = report.meta.kvbm.get("edges")
    return {tier: _counts(edge) for tier, edge in edges.items()} if isinstance(edges, Mapping) else {}


def _edge(edge: Counts) -> str:
    line = (
        f"{text.large(edge.get('stored_bytes', 0))}B down in {text.counted(edge.get('batches', 0), 'transfer')}, "
        f"{text.large(edge.get('loaded_bytes', 0))}B up, {text.count(edge.get('evicted', 0))} blocks evicted"
    )
    troubles = [f"{text.count(edge[name])} {name.replace('_', ' ')}" for name in _TROUBLES if edge.get(name)]
    return f"{line}; {', '.join(troubles)}" if troubles else line


def _read(peers: Counts) -> str:
    """What came from host memory of other workers."""
    line = f"{text.large(peers.get('loaded_bytes', 0))}B up in {text.counted(peers.get('loaded', 0), 'block')}"
    failed = peers.get("failed_reads", 0)
    return f"{line}; {text.count(failed)} failed reads" if failed else line


def _counts(value: object) -> Counts:
    return {name: n for name, n in value.items() if isinstance(n, int)} if isinstance(value, Mapping) else {}


def _share(blocks: int, of: int) -> str:
    return text.share(blocks / of if of else None)
