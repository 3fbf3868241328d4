"""Which lanes a rank of a worker has."""

from __future__ import annotations

import pytest

from twin.mocker.tierplan import Lanes, share

FOUR: Lanes = (("g0",), ("g1",), ("g2",), ("g3",))


@pytest.mark.parametrize(
    ("lanes", "rank", "ranks", "own"),
    [
        (FOUR, 0, 1, FOUR),
        (FOUR, 0, 2, FOUR[:2]),
        (FOUR, 1, 2, FOUR[2:]),
        (FOUR, 3, 4, FOUR[3:]),
        ((("cpu",),), 1, 2, (("cpu",),)),
        (FOUR, 1, 3, FOUR),
    ],
)
def test_the_lanes_of_a_ranks_own_gpus(lanes: Lanes, rank: int, ranks: int, own: Lanes) -> None:
    assert share(lanes, rank, ranks) == own
