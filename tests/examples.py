"""How many examples a property test draws: its own number in CI, 10,000 at night."""

from __future__ import annotations

import os

from hypothesis import settings

NIGHTLY = 10_000


def examples(ci: int, **more: int) -> settings:
    """Settings of a test that draws `ci` examples, and 10,000 with HYPOTHESIS_PROFILE=nightly."""
    return settings(max_examples=NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else ci, **more)
