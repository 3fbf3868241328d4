"""What block managers did, in lines for a person: where prompts were found, what moved between tiers, what went wrong.

Words and sums only; the figures are those of `RunMeta.kvbm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from reports import text

TIERS: Final = {"g1": "device", "g2": "host memory", "g3": "disk", "g4": "remote store"}
_MISSES: Final = {
    "absent": "nobody had",
    "hole": "behind a gap",
    "no_room": "without room",
    "slower": "faster to compute",
    "failed": "read in vain",
    "last_token": "of the last token",
}
_TROUBLES: Final = ("failed_reads", "failed_writes", "dropped", "skipped")

Counts = Mapping[str, int]


def tier_lines(kvbm: Mapping[str, object]) -> Iterator[str]:
    """One line of look-ups, one of misses, one for each tier."""
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


def _edge(edge: Counts) -> str:
    line = (
        f"{text.large(edge.get('stored_bytes', 0))}B down in {text.counted(edge.get('batches', 0), 'transfer')}, "
        f"{text.large(edge.get('loaded_bytes', 0))}B up, {text.count(edge.get('evicted', 0))} blocks evicted"
    )
    troubles = [f"{text.count(edge[name])} {name.replace('_', ' ')}" for name in _TROUBLES if edge.get(name)]
    return f"{line}; {', '.join(troubles)}" if troubles else line


def _counts(value: object) -> Counts:
    return {name: n for name, n in value.items() if isinstance(n, int)} if isinstance(value, Mapping) else {}


def _share(blocks: int, of: int) -> str:
    return text.share(blocks / of if of else None)
