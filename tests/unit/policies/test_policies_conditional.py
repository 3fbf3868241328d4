"""When a prompt stays on a decode worker: the limits of the router spec, section 11, F1 to F6."""

from __future__ import annotations

import pytest

from policies.router.disaggregation import stays_local


@pytest.mark.parametrize(
    ("isl", "overlap_blocks", "local"),
    [(2000, 0, False), (2000, 10, True), (2000, 9, False), (4000, 30, False), (4000, 31, True), (10_000, 125, True)],
)
def test_little_is_left_in_tokens_and_as_a_share(isl: int, overlap_blocks: int, local: bool) -> None:
    assert stays_local(isl, overlap_blocks * 64) is local
