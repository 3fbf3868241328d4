"""How much of a trace's prompts an endless, shared prefix cache would have held: the ideal to measure routers against.

Content is a tree of hash ids. Two prompts share exactly the tokens of the ids that they have in common from the start,
and of a last id that only one of them fills, the shorter part.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixTree:
    """Every prompt seen so far. Memory grows with the distinct ids, in their places; time with the ids looked up."""

    def __init__(self, id_tokens: int) -> None:
        self._id_tokens = id_tokens
        self._nodes: dict[tuple[int, int], int] = {}
        self._reach = [0]
        """Per node the token, counted from the start of the prompt, up to which some prompt has filled it."""

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, ids: Sequence[int], isl: int) -> int:
        """Take in a prompt; how many of its tokens, from the start, were known before."""
        size, nodes, reach = self._id_tokens, self._nodes, self._reach
        node = known = end = 0
        matching = True
        for each in ids[: -(-isl // size)]:
            end += size
            upto = end if end < isl else isl
            child = nodes.get((node, each))
            if child is None:
                child = len(reach)
                nodes[(node, each)] = child
                reach.append(upto)
                matching = False
            else:
                if matching:
                    known = reach[child] if reach[child] < upto else upto
                    matching = known == end
                if reach[child] < upto:
                    reach[child] = upto
            node = child
        return known
