"""What the index counts: odd events, and how much there is.

Whatever is dropped, refused or repeated is counted here, in blocks; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(slots=True)
class Counts:
    """What was odd, in blocks: `orphans` stored before their parents, `adopted` later, `orphans_dropped` beyond the
    cap; `duplicate_stores`; `unknown_removals`; `ext_conflicts`, ids that came to name another block;
    `unknown_parents`, refused (cascade only); `ghosts_dropped`. `misplaced` are stores whose stated place contradicts
    their parent.
    """

    orphans: int = 0
    adopted: int = 0
    orphans_dropped: int = 0
    duplicate_stores: int = 0
    unknown_removals: int = 0
    ext_conflicts: int = 0
    unknown_parents: int = 0
    ghosts_dropped: int = 0
    misplaced: int = 0

    def table(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Sizes(NamedTuple):
    """Block ids of a rank (or of all), by state."""

    resident: int
    ghosts: int
    orphans: int
