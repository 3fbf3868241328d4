"""The bundled trace: it is what `twin synth azure --seed 42` draws, and it has the shape that the documents quote.

Beside the rows stand laws that would fail if the rows were wrong: order, limits, and the figures that they were drawn
from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.draw import fit
from traces.load import open_trace
from traces.stats import describe
from traces.synth import SynthOptions, synthesise


@pytest.fixture
def bundled(root: Path) -> Path:
    return root / "traces" / "azure.parquet"


def test_it_is_what_the_command_draws(bundled: Path) -> None:
    drawn = synthesise("azure", SynthOptions(seed=42))
    assert pq.read_table(bundled).equals(drawn, check_metadata=True)


def test_it_says_that_it_is_synthetic(bundled: Path) -> None:
    info = open_trace(bundled).info
    assert info.synthetic
    assert (info.generator, info.seed) == ("twin synth azure", "42")
    assert info.licence is not None
    assert "CC-BY-4.0" in info.licence


def test_its_shape(bundled: Path) -> None:
    """Close to the recorded 45 minutes: 8.8 requests/s, ISL 1465, OSL 144, minutes of 3 to 14 requests/s."""
    found = describe(bundled)
    assert found.rows >= 20_000
    assert found.rate_rps == pytest.approx(8.8, rel=0.1)
    assert found.isl.mean == pytest.approx(1465, rel=0.05)
    assert found.osl.mean == pytest.approx(144, rel=0.05)
    assert found.peak_rps is not None
    assert 13 < found.peak_rps < 16
    assert found.gap_cv == pytest.approx(1.32, abs=0.1)


def test_no_row_lies_outside_what_it_was_drawn_from(bundled: Path) -> None:
    table = pq.read_table(bundled)
    arrival_s, isl, osl = (table[name].to_numpy() for name in ("arrival_s", "isl", "osl"))
    services = [fit("azure_conv"), fit("azure_code")]
    assert arrival_s[0] == 0
    assert (np.diff(arrival_s) >= 0).all()
    assert isl.min() >= min(service["isl"]["rest"]["v"][0] for service in services)
    assert isl.max() <= max(service["isl"]["rest"]["v"][-1] for service in services)
    assert osl.min() >= 6
    assert osl.max() <= 1899
    assert (np.round(arrival_s, 6) == arrival_s).all()


@pytest.mark.shared
def test_no_recorded_row_is_in_it(bundled: Path, shared: Path) -> None:
    """Rows of both would agree in arrival and lengths; a few might by chance, hardly at the same microsecond."""

    def keys(table: pa.Table, names: tuple[str, ...]) -> set[tuple[object, ...]]:
        return set(zip(*(table[name].to_pylist() for name in names), strict=True)) - {(0.0,)}

    ours = keys(pq.read_table(bundled).slice(1), ("arrival_s", "isl", "osl"))
    theirs = pq.read_table(shared / "traces" / "azure.parquet").slice(1)
    assert not ours & keys(theirs, ("arrival_s", "prompt_tokens", "output_tokens"))
