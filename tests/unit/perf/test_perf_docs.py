"""The page on latency models cannot drift from the code: its examples are run, its table is the shipped one."""

from __future__ import annotations

import doctest
from dataclasses import fields
from pathlib import Path

from twin.perf.coefficients import Coefficients, named_block

PAGE = "latency-models.md"
# Columns of the page's table of coefficients, each with the unit it is printed in.
COLUMNS = {
    "e_bw": 1.0,
    "e_gemm": 1.0,
    "e_moe_bw": 1.0,
    "e_moe": 1.0,
    "e_kv": 1.0,
    "e_attn": 1.0,
    "alpha_s": 1e-6,
    "e_link": 1.0,
    "t_launch_s": 1e-6,
    "h0_s": 1e-3,
    "h_seq_s": 1e-6,
    "h_prefill_s": 1e-3,
    "client_s": 1e-3,
}


def test_the_examples_of_the_page(root: Path) -> None:
    result = doctest.testfile(str(root / "docs" / PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 15
    assert result.failed == 0


def test_the_table_of_coefficients_is_the_shipped_one(root: Path) -> None:
    text = (root / "docs" / PAGE).read_text(encoding="utf-8").split("| block |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert len(rows) == 7
    for name, *cells in rows:
        values = named_block(name.split()[0]).values
        for (column, unit), cell in zip(COLUMNS.items(), cells, strict=True):
            printed = 0.0 if cell == "–" else float(cell) * unit
            assert abs(getattr(values, column) - printed) < 1e-12, (name, column)
    assert set(COLUMNS) < {field.name for field in fields(Coefficients)}
