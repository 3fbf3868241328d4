"""Columns of a table: known names, a user's own, and times whose unit and statistic are always said."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from twin.calibrate.columns import columns_of, parse_columns

USUAL = ["engine", "arch", "gpu", "weights", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms"]


def test_the_usual_names_need_no_words() -> None:
    columns = columns_of(USUAL, {}, "t.csv")
    assert columns.names["model"] == "arch"
    assert columns.unit_s == {"ttft": 1e-3, "tpot": 1e-3}


def test_a_users_own_names() -> None:
    given = parse_columns(["ttft=first:s:mean,model=served", "notes=-"])
    present = [name for name in USUAL if name not in ("arch", "ttft_ms")] + ["served", "first", "notes"]
    columns = columns_of(present, given, "t.csv")
    assert columns.names["model"] == "served"
    assert columns.names["ttft"] == "first"
    assert columns.unit_s["ttft"] == 1.0


def test_unit_and_statistic_may_stand_in_the_name() -> None:
    columns = columns_of([*USUAL[:-2], "mean_ttft_us"], {"ttft": "mean_ttft_us"}, "t.csv")
    assert columns.unit_s == {"ttft": 1e-6}


@pytest.mark.parametrize(
    ("present", "given", "message"),
    [
        ([*USUAL, "engin_version"], [], "t.csv: column 'engin_version' is not known; did you mean 'engine_version'"),
        ([*USUAL, "first"], ["ttft=first"], "ttft from column first: in which unit\\? say ttft=first:ms:mean"),
        ([*USUAL, "first"], ["ttft=first:ms"], "which statistic\\? means are taken: ttft=first:ms:mean"),
        ([*USUAL, "ttft_p50_ms"], ["ttft=ttft_p50_ms"], "is a p50; the fit takes means"),
        ([*USUAL, "x_ms"], ["tfft=x_ms:mean"], "--columns 'tfft' is not known; did you mean 'ttft'"),
        (USUAL, ["ttft=first:ms:mean"], "column 'first' is not known"),
        (USUAL, ["ttft"], "--columns ttft: give FIELD=COLUMN"),
        (USUAL[1:], [], "no column for engine"),
        (USUAL[:-3], [], "no column for concurrency"),
        (USUAL[:-2], [], "no measured time"),
    ],
)
def test_what_is_not_clear_costs_one_line(present: list[str], given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        columns_of(present, parse_columns(given), "t.csv")
