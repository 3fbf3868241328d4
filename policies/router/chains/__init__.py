"""The prefix index of a real router: from engines' own block events to the longest cached prefix of every rank.

`live` is the front: events in, requests for a replay or a dump out, matches on demand. It stands on `feed` (gaps, and
how a rank is told again: one small state machine per rank) and `index` (all ranks, their tiers, dump and load), which
stands on `lineage` (one rank: block ids in `runs`, ghosts, `orphans`, copies) and `holders` (who holds which stretch of
a branch, and the walk along a prompt). `approximate` guesses from dispatches what engines without events hold, over the
same `holders`.

The content of blocks is a `ContentTree` over local hashes, one key a block: a place in it is named by all local hashes
from the start, as a chain hash is, so two blocks are one place exactly when their chain hashes are equal. Work costs
per event, per branch and per stretch of equal holders, and per block only where something odd happened.
"""
