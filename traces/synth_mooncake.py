"""Demand in the shape of Mooncake's conversation trace: sessions that re-send what was said and append to it.

Every request shares one system block; a follow-up keeps a prefix of its parent's blocks. Requests stand on a 3 s grid,
as in the recording. A session is drawn whole before the next, so a draw is a prefix of any longer one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from traces.draw import Fit, Floats, Ints, Lengths, Quantiles, Stream, fit, one_class
from traces.rows import IdLists

SPAN_S = 2700.0
HASH_BLOCK_TOKENS = 512

_MINUTE_S = 60.0
_WARM_UP_S = 600.0
"""Until then some of what looks like first turns are later turns of sessions from before the recording."""

_SYSTEM_BLOCK = 0
_KEPT_BLOCKS = 2
"""A follow-up shares more than the system block with its parent: the fit would have taken it for a first turn else."""

_CONTEXT_BLOCKS = 250
"""128,000 tokens; the longest recorded prompt has 244 blocks."""


class Requests(NamedTuple):
    """Requests in order of arrival; ids count up from 0 in order of first appearance."""

    arrival_s: Floats
    isl: Ints
    osl: Ints
    ids: IdLists


class Turn(NamedTuple):
    """One request of a session, with ids in the order in which they were drawn."""

    arrival_s: float
    isl: int
    osl: int
    ids: list[int]


def draw_mooncake(duration_s: float, seed: int) -> Requests:
    """Sessions that begin within `duration_s`, cut there."""
    turns = [
        turn for turn in _Sessions(fit("mooncake_conversation"), seed).turns(duration_s) if turn.arrival_s < duration_s
    ]
    turns.sort(key=lambda turn: turn.arrival_s)
    lengths = np.array([len(turn.ids) for turn in turns], np.int64)
    drawn = np.array([each for turn in turns for each in turn.ids], np.int64)
    return Requests(
        np.array([turn.arrival_s for turn in turns]),
        np.array([turn.isl for turn in turns], np.int64),
        np.array([turn.osl for turn in turns], np.int64),
        IdLists(np.concatenate([[0], np.cumsum(lengths)]), _renumbered(drawn)),
    )


def _renumbered(ids: Ints) -> Ints:
    """Ids counted up in order of first appearance."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


class _ByBlocks:
    """Output lengths by number of prompt blocks."""

    def __init__(self, figures: Fit) -> None:
        self._edges: list[int] = figures["edges"]
        self._tables = [Lengths(table) for table in figures["tables"]]

    def one(self, blocks: int, u: float) -> int:
        return self._tables[one_class(self._edges, blocks)].one(u)


class _Sessions:
    """Draws sessions one after the other, in order of their first request."""

    def __init__(self, figures: Fit, seed: int) -> None:
        root, follow = figures["root"], figures["followup"]
        self._minute_counts: list[int] = root["minute_counts"]
        self._tick_s: float = figures["tick_s"]
        self._early_isl, self._isl = Lengths(root["isl_first_600s"]), Lengths(root["isl"])
        self._root_osl, self._osl = _ByBlocks(root["osl_by_blocks"]), _ByBlocks(follow["osl_by_blocks"])
        self._p_edges = follow["p_block_edges"]
        self._p_early, self._p_root = follow["p_after_root_first_600s"], follow["p_after_root"]
        self._p_turn: list[float] = follow["p_after_followup_by_turn"]
        self._lag = Quantiles(follow["lag_s"])
        self._dropped: list[float] = np.cumsum([follow["blocks_dropped"][key] for key in "0123"]).tolist()
        self._kept = Quantiles(follow["rollback3_keep_ratio"])
        self._new_edges = follow["new_blocks"]["parent_block_edges"]
        self._new = [Quantiles(table) for table in follow["new_blocks"]["tables"]]
        self._fill = Quantiles(figures["last_block_fill_quantiles_101"])
        self._minutes = Stream(seed, "mooncake.minutes")
        self._starts = Stream(seed, "mooncake.starts")
        self._chance = Stream(seed, "mooncake.turns")
        self._next_id = _SYSTEM_BLOCK + 1

    def turns(self, duration_s: float) -> Iterator[Turn]:
        """Every turn of every session that begins before `duration_s`, session by session."""
        for minute in range(int(-(-duration_s // _MINUTE_S))):
            count = self._roots_in(minute)
            for start in np.sort(self._starts.uniform(count)).tolist():
                at_s = self._snap((minute + start) * _MINUTE_S - self._tick_s / 2)
                if at_s < duration_s:
                    yield from self._session(at_s)

    def _roots_in(self, minute: int) -> int:
        """As recorded, and beyond the recording as in one of its minutes, drawn at random."""
        counts = self._minute_counts
        if minute >= len(counts):
            return counts[int(self._minutes.one() * len(counts))]
        return counts[minute]

    def _session(self, at_s: float) -> Iterator[Turn]:
        early = at_s < _WARM_UP_S
        chance = self._chance.one
        isl = (self._early_isl if early else self._isl).one(chance())
        ids = [_SYSTEM_BLOCK, *self._fresh(-(-isl // HASH_BLOCK_TOKENS) - 1)]
        yield Turn(at_s, isl, self._root_osl.one(len(ids), chance()), ids)
        p_again = (self._p_early if early else self._p_root)[one_class(self._p_edges, len(ids))]
        turn = 0
        while chance() < p_again:
            at_s = self._snap(at_s + self._lag.one(chance()))
            ids = self._follow_up(ids)
            isl = (len(ids) - 1) * HASH_BLOCK_TOKENS + max(1, round(self._fill.one(chance())))
            yield Turn(at_s, isl, self._osl.one(len(ids), chance()), ids)
            p_again = self._p_turn[min(turn, len(self._p_turn) - 1)]
            turn += 1

    def _follow_up(self, parent: list[int]) -> list[int]:
        """A prefix of the parent's blocks and new ones behind it."""
        chance = self._chance.one
        dropped = min(bisect_right(self._dropped, chance()), 3)
        kept = len(parent) - dropped
        if dropped == 3:
            kept = round(self._kept.one(chance()) * len(parent))
        kept = max(kept, _KEPT_BLOCKS)
        new = round(self._new[one_class(self._new_edges, len(parent))].one(chance()))
        return [*parent[:kept], *self._fresh(min(new, _CONTEXT_BLOCKS - kept))]

    def _fresh(self, count: int) -> range:
        first = self._next_id
        self._next_id += max(count, 0)
        return range(first, self._next_id)

    def _snap(self, at_s: float) -> float:
        return max(0.0, round(at_s / self._tick_s) * self._tick_s)
