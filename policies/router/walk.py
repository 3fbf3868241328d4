"""How far down a block path each worker reaches: one walk over the path's pieces answers for all workers.

Both the prefix index (what workers have cached) and the books (what they work on) are asked this way. `ends` maps a
branch to how far each worker reaches in it, counted from the start of the prompt; who is in a branch at all has it
from its start.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.ids import WorkerId

Ends = dict[Branch, dict[WorkerId, int]]


def depths(ends: Mapping[Branch, Mapping[WorkerId, int]], path: BlockPath) -> dict[WorkerId, int]:
    """Leading blocks of `path` that each worker has; workers that have none are left out.

    Costs one look-up per piece, and stops at the first piece that nobody is in.
    """
    pieces = path.pieces
    here = ends.get(pieces[0][0]) if pieces else None
    if here is None:
        return {}
    lo = pieces[0][1]
    found = {worker_id: reached if reached < lo else lo for worker_id, reached in here.items()}
    for branch, end in pieces[1:]:
        here = ends.get(branch)
        if here is None:
            break
        for worker_id, reached in here.items():
            if found.get(worker_id) == lo:  # it has everything before this piece
                found[worker_id] = reached if reached < end else end
        lo = end
    return found
