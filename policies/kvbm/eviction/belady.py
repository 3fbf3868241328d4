"""The best that any eviction could do, knowing the future: a bound for comparison, never a policy to run with.

Belady's rule: whoever is used again latest, or never, makes room; what is asked for and will be used later than
everything that is here is not kept at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush


def most_hits(requests: Sequence[Sequence[Hashable]], capacity: int) -> int:
    """Blocks found, summed over requests, with `capacity` blocks; no other order of eviction finds more.

    A request looks for all its blocks and brings in those that it did not find. Costs O(n log n) for n blocks.
    """
    never = len(requests)
    uses: dict[Hashable, list[int]] = {}
    for at in range(len(requests) - 1, -1, -1):
        for block in dict.fromkeys(requests[at]):
            uses.setdefault(block, []).append(at)
    held: dict[Hashable, int] = {}  # by next use
    latest: list[tuple[int, int, Hashable]] = []
    hits = pushed = 0
    for request in requests:
        wanted = dict.fromkeys(request)
        hits += sum(block in held for block in wanted)
        for block in wanted:
            times = uses[block]
            times.pop()
            after = times[-1] if times else never
            if after == never:
                held.pop(block, None)
                continue
            held[block] = after
            pushed += 1
            heappush(latest, (-after, pushed, block))
        while len(held) > capacity:
            after, _, block = heappop(latest)
            if held.get(block) == -after:
                del held[block]
    return hits
