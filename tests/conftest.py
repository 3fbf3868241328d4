"""What every test may use: the shared reference data, one seed, and the hypothesis profiles.

Nothing here may hide a failure: a test that lacks its data skips and says which data, and where to put it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
SEED = int(os.environ.get("DYNATWIN_TEST_SEED", "0"))

# `ci` draws the same examples every time; `nightly` draws many, new ones each night, and prints how to repeat one.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), derandomize=False, max_examples=10_000)
settings.load_profile(PROFILE)

# A shell starts background jobs with Ctrl-C ignored, and programs started from here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _shared_folder() -> Path | None:
    named = os.environ.get("DYNATWIN_SHARED")
    folder = Path(named) if named else ROOT.parent / "shared"
    return folder.resolve() if folder.is_dir() else None


def pytest_report_header() -> list[str]:
    shared = _shared_folder() or "absent: the tests that need it skip; set DYNATWIN_SHARED to its folder"
    return [f"shared data: {shared}", f"seed: {SEED} (DYNATWIN_TEST_SEED), hypothesis profile: {PROFILE}"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        repeat = f"DYNATWIN_TEST_SEED={SEED} HYPOTHESIS_PROFILE={PROFILE} python -m pytest '{item.nodeid}'"
        report.sections.append(("repeat with", repeat))
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder (cases, parity runs, recorded traces); skips where there is none."""
    folder = _shared_folder()
    if folder is None:
        where = os.environ.get("DYNATWIN_SHARED", str(ROOT.parent / "shared"))
        pytest.skip(f"needs the shared reference data, and {where} is not there (set DYNATWIN_SHARED to its folder)")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture
def seed() -> int:
    """The seed of this test session; printed at the top and with every failure."""
    return SEED
