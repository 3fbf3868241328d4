"""What `traces/README.md` says: its example runs, its figures are those of the files, its lists those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from traces.readers import BUILT_IN
from traces.readers.columns import ALIASES
from traces.schema import COLUMNS, ISL, OSL
from traces.stats import describe
from traces.synth import SYNTHESISERS


@pytest.fixture
def text(root: Path) -> str:
    return (root / "traces" / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(text: str, root: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1000 ")


def test_the_figures_of_the_bundled_trace(text: str, root: Path) -> None:
    found = describe(root / "traces" / "azure.parquet")
    assert found.rate_rps is not None
    assert found.peak_rps is not None
    assert found.gap_cv is not None
    assert f"**synthetic**, {found.rows:,} requests over {found.span_s:,.1f} s" in text
    assert f"| {found.rate_rps:.2f}, {found.peak_rps:.1f} | " in text
    assert f"coefficient of variation | {found.gap_cv:.2f} | " in text
    dispersion = ", ".join(f"{value:.3g}" for value in found.dispersion if value is not None)
    assert f"at 1, 10, 60 s | {dispersion} | " in text
    for name, lengths in (("prompt", found.isl), ("output", found.osl)):
        p50, p99 = lengths.quantiles[2], lengths.quantiles[6]
        assert f"{name} tokens: mean, p50, p99 | {lengths.mean:.0f}, {p50:.0f}, {p99:.0f} | " in text


@pytest.mark.shared
def test_the_figures_of_the_recorded_trace(text: str, shared: Path) -> None:
    found = describe(shared / "traces" / "azure.parquet")
    assert found.rate_rps is not None
    assert found.peak_rps is not None
    assert f" | {found.rate_rps:.2f}, {found.peak_rps:.1f} |\n" in text
    dispersion = ", ".join(f"{value:.3g}" for value in found.dispersion if value is not None)
    assert f" | {dispersion} |\n" in text
    for lengths in (found.isl, found.osl):
        assert f" | {lengths.mean:.0f}, {lengths.quantiles[2]:.0f}, {lengths.quantiles[6]:.0f} |\n" in text


def test_every_format_generator_column_and_alias_is_there(text: str) -> None:
    for name in (*BUILT_IN, *SYNTHESISERS, *COLUMNS):
        assert f"`{name}`" in text, name
    lower = text.casefold()
    for column in (ISL, OSL):
        for alias in ALIASES[column]:
            assert f"`{alias}`" in lower, alias
