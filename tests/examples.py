"""How many examples a property test draws: its own number in CI, 10,000 at night."""

from __future__ import annotations

import os

from hypothesis import settings

NIGHTLY = 10_000
MANY = 100


def examples(ci: int, **more: int) -> settings:
    """Settings of a test that draws 10,000 examples with HYPOTHESIS_PROFILE=nightly, and else `ci`: half of large
    numbers, so that `make test` stays short."""
    usual = ci // 2 if ci >= MANY else ci
    return settings(max_examples=NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else usual, **more)
