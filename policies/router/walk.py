"""How far down a block path each worker reaches, or each rank: one walk over the path's pieces answers for all.

Both the prefix index (what workers have cached) and the books (what they work on) are asked this way. `ends` maps a
branch to how far each place reaches in it, counted from the start of the prompt; who is in a branch at all has it
from its start.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.ids import Place

Ends = dict[Branch, dict[Place, int]]


def depths(ends: Mapping[Branch, Mapping[Place, int]], path: BlockPath) -> dict[Place, int]:
    """Leading blocks of `path` that each place has; those that have none are left out.

    Costs one look-up per piece, and stops at the first piece that nobody is in.
    """
    pieces = path.pieces
    here = ends.get(pieces[0][0]) if pieces else None
    if here is None:
        return {}
    lo = pieces[0][1]
    found = {place: reached if reached < lo else lo for place, reached in here.items()}
    for branch, end in pieces[1:]:
        here = ends.get(branch)
        if here is None:
            break
        for place, reached in here.items():
            if found.get(place) == lo:  # it has everything before this piece
                found[place] = reached if reached < end else end
        lo = end
    return found
