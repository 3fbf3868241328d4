"""The messy inputs of `tests/data/messy`, each with the behaviour that its README there promises, and the four forms in
which one Azure trace comes (case C05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces.errors import TraceError
from traces.load import ReadOptions, Trace, open_trace

DATA = Path(__file__).resolve().parents[2] / "data"
MESSY = DATA / "messy"
FORMS = DATA / "cases"


def rows(trace: Trace) -> list[dict[str, object]]:
    return [row for batch in trace for row in batch.to_pylist()]


def column(trace: Trace, name: str) -> list[object]:
    return [row[name] for row in rows(trace)]


def test_seven_decimals_crlf_and_a_whole_second() -> None:
    trace = open_trace(MESSY / "s1_azure_7digits_crlf.csv")
    arrivals = column(trace, "arrival_s")
    assert arrivals == pytest.approx([0, 0.001000, 0.008000, 0.010001, 59.999, 59.999], abs=1e-6)
    assert len(set(arrivals)) == 6
    assert trace.info.format == "azure"


def test_seconds_under_mooncakes_names_are_refused_unless_the_unit_is_given() -> None:
    path = MESSY / "s2_mooncake_seconds.jsonl"
    with pytest.raises(TraceError, match=r"s2_mooncake_seconds\.jsonl:2: timestamp is 0\.2.*--time-unit s") as caught:
        rows(open_trace(path))
    assert caught.value.rows == (2,)
    with pytest.raises(TraceError, match="--time-unit s"):
        rows(open_trace(path, ReadOptions(on_bad_row="skip")))
    assert column(open_trace(path, ReadOptions(time_unit="s")), "arrival_s") == [0, 0.2, 0.4, 12.75, 61.5]
    assert column(open_trace(path, ReadOptions(time_unit="ms")), "arrival_s") == [0, 0.0002, 0.0004, 0.01275, 0.0615]


def test_a_broken_json_line_stops_or_is_counted_and_never_ends_the_trace() -> None:
    path = MESSY / "s3_bad_json_line.jsonl"
    with pytest.raises(TraceError, match=r"s3_bad_json_line\.jsonl:3: not JSON: Expecting ',' delimiter") as caught:
        rows(open_trace(path))
    assert caught.value.rows == (3,)
    trace = open_trace(path, ReadOptions(on_bad_row="skip"))
    assert column(trace, "isl") == [600, 610, 630, 640]
    assert trace.skipped == {"unreadable": 1}


def test_failed_requests_are_counted_and_duplicates_kept() -> None:
    trace = open_trace(MESSY / "s4_burstgpt_zero_output_dupes.csv")
    assert [(row["arrival_s"], row["isl"], row["osl"]) for row in rows(trace)] == [
        (0, 301, 44), (9, 88, 130), (9, 88, 130), (26, 512, 64),
    ]  # fmt: skip
    assert trace.skipped == {"no output tokens": 3}
    assert trace.remarks == {"exact duplicates, kept": 1}
    assert (trace.info.format, trace.info.time_unit) == ("burstgpt", "s")


def test_failed_requests_are_kept_when_asked_for() -> None:
    options = ReadOptions(keep_zero_output=True, on_bad_row="skip")
    trace = open_trace(MESSY / "s4_burstgpt_zero_output_dupes.csv", options)
    assert column(trace, "osl") == [44, 0, 0, 130, 130, 64]
    assert trace.skipped == {"isl below 1": 1}
    assert trace.remarks == {"exact duplicates, kept": 2}


def test_every_line_that_lacks_something_is_named() -> None:
    path = MESSY / "s5_optional_fields.jsonl"
    with pytest.raises(TraceError) as caught:
        rows(open_trace(path))
    assert caught.value.rows == (2, 3, 4, 5)
    said = str(caught.value)
    assert "s5_optional_fields.jsonl:2: output_length is missing" in said
    assert "4 (timestamp is missing), 5 (input_length is missing)" in said
    assert "--default-osl" in said
    assert "--on-bad-row skip" in said


def test_lines_that_lack_something_are_skipped_by_reason() -> None:
    trace = open_trace(MESSY / "s5_optional_fields.jsonl", ReadOptions(on_bad_row="skip"))
    assert [(row["arrival_s"], row["isl"], row["priority"]) for row in rows(trace)] == [(0, 640, None), (0.2, 100, 3)]
    assert trace.skipped == {"osl missing": 2, "arrival_s missing": 1, "isl missing": 1}


def test_a_default_output_length_rescues_what_lacks_only_that() -> None:
    trace = open_trace(MESSY / "s5_optional_fields.jsonl", ReadOptions(on_bad_row="skip", default_osl=7))
    assert column(trace, "osl") == [32, 7, 7, 10]
    assert trace.remarks == {"osl taken from the default": 2}
    assert trace.skipped == {"arrival_s missing": 1, "isl missing": 1}


def test_byte_order_mark_quotes_and_padding() -> None:
    trace = open_trace(MESSY / "s6_bom_headers.csv")
    assert column(trace, "arrival_s") == [0.0, 0.052, 0.098189, 0.140684]
    assert column(trace, "isl") == [4808, 3180, 110, 7433]
    assert trace.info.notes == ("arrived_at in s; num_prefill_tokens and num_decode_tokens in tokens",)


@pytest.mark.parametrize(
    "name", ["c05_azure_crlf.csv", "c05_azure_tz.csv", "c05_azure_names.parquet", "c05_plain.parquet"]
)
def test_the_four_forms_of_one_trace_agree(name: str) -> None:
    found = rows(open_trace(FORMS / name))
    assert [row["arrival_s"] for row in found] == pytest.approx([0.0, 0.25, 1.0], abs=1e-6)
    assert sum(int(str(row["isl"])) for row in found) == 300
    assert sum(int(str(row["osl"])) for row in found) == 33


@pytest.mark.shared
def test_our_copies_are_the_shared_files(shared: Path) -> None:
    for path in MESSY.iterdir():
        assert path.read_bytes() == (shared / "traces" / "messy" / path.name).read_bytes()
