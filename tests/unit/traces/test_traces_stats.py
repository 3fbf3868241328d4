"""Figures about a trace, each against a hand-made example, the recorded traces, or numpy on the whole column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from traces.convert import write_table
from traces.load import BATCH_ROWS, ReadOptions, open_trace
from traces.prefixes import PrefixTree
from traces.schema import canonical_schema
from traces.stats import QUANTILES, TraceStats, describe, describe_batches


def written(path: Path, **columns: list[object]) -> Path:
    count = len(columns["arrival_s"])
    columns = {"isl": [1] * count, "osl": [1] * count, **columns}
    ordered = {name: columns[name] for name in canonical_schema(columns).names}
    write_table(pa.table(ordered, schema=canonical_schema(columns, {"hash_block_tokens": "16"})), path)
    return path


def test_a_trace_by_hand(tmp_path: Path) -> None:
    found = describe(written(tmp_path / "t.parquet", arrival_s=[0, 0.5, 1.25, 3.0], isl=[1, 2, 3, 4], osl=[9, 9, 9, 1]))
    assert (found.rows, found.span_s, found.rate_rps) == (4, 3.0, 1.0)
    assert found.gap_cv == pytest.approx(np.std([0.5, 0.75, 1.75]))
    assert found.dispersion == (pytest.approx(np.var([2, 1, 0]) / 1.0), None, None)
    assert found.peak_rps is None
    assert found.isl.mean == 2.5
    assert found.osl.quantiles == tuple(np.quantile([9, 9, 9, 1], QUANTILES))
    assert found.hit_rate_tokens is None
    assert found.sessions == 0


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_streaming_gives_the_figures_of_the_whole(tmp_path: Path, batch_rows: int) -> None:
    draws = np.random.default_rng(0)
    arrival_s = np.cumsum(draws.exponential(0.7, 2000))
    isl, osl = draws.integers(1, 5000, 2000), draws.geometric(0.01, 2000)
    columns = {"arrival_s": arrival_s.tolist(), "isl": isl.tolist(), "osl": osl.tolist()}
    trace = open_trace(written(tmp_path / "t.parquet", **columns))
    found = describe_batches(trace.batches(batch_rows), trace.info, trace.skipped, trace.remarks)
    gaps = np.diff(arrival_s)
    assert found.rate_rps == pytest.approx(1999 / (arrival_s[-1] - arrival_s[0]))
    assert found.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    for width, value in zip((1, 10, 60), found.dispersion, strict=True):
        offset = arrival_s - arrival_s[0]
        counts = np.bincount((offset // width).astype(int))[: int(offset[-1] // width)]
        assert value == pytest.approx(counts.var() / counts.mean())
        assert width < 60 or found.peak_rps == counts.max() / 60
    for column, lengths in ((isl, found.isl), (osl, found.osl)):
        assert lengths.mean == pytest.approx(column.mean())
        assert lengths.quantiles == pytest.approx(np.quantile(column, QUANTILES))


@pytest.mark.shared
def test_the_recorded_azure_trace(shared: Path) -> None:
    reference = json.loads((shared / "traces" / "fits" / "evaluation.json").read_text())
    for service in ("conv", "code"):
        found = describe(shared / "traces" / "azure_2023" / f"azure_{service}.0-45min.parquet")
        real = reference[f"azure_{service}"]["real"]
        assert found.rate_rps == pytest.approx(real["rate"], abs=6e-4)
        assert found.gap_cv == pytest.approx(real["iat_cv"], abs=6e-5)
        assert found.dispersion == pytest.approx([real["iod1"], real["iod10"], real["iod60"]], abs=6e-4)


@pytest.mark.shared
def test_the_recorded_mooncake_trace(shared: Path) -> None:
    found = describe(shared / "traces" / "mooncake" / "conversation_trace.0-45min.jsonl")
    assert (found.rows, found.distinct_blocks) == (8940, 140_684)
    assert found.hit_rate_blocks == pytest.approx(0.35339, abs=1e-5)  # 0.3537 if last blocks could hit too
    assert found.hit_rate_tokens == pytest.approx(0.36058, abs=1e-4)
    assert found.remarks == {"exact duplicates, kept": 1}


# ---------------------------------------------------------------- sharing


@pytest.mark.shared
def test_two_shared_ids_are_1024_tokens(shared: Path) -> None:
    found = describe(shared / "cases" / "inputs" / "c06_mooncake512.jsonl")
    assert found.hit_rate_tokens == 1024 / 2560
    assert found.hit_rate_blocks == 2 / 5


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    same = written(tmp_path / "t.parquet", arrival_s=[0, 1], isl=[32, 32], hash_ids=[[1, 2], [1, 2]])
    found = describe(same)
    assert found.hit_rate_tokens == 31 / 64
    assert found.hit_rate_blocks == 1 / 4


def test_a_row_without_ids_shares_nothing_and_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", arrival_s=[0, 1, 2], isl=[16, 16, 17], hash_ids=[[1], None, [1, 2]])
    found = describe(path)
    assert found.hit_rate_tokens == 16 / 49
    assert found.hit_rate_blocks == 1 / 4


@pytest.mark.parametrize(
    ("prompts", "known"),
    [
        ([([1, 2], 32), ([1, 3], 32)], [0, 16]),
        ([([1, 2], 20), ([1, 2], 32)], [0, 20]),
        ([([1, 2], 20), ([1, 2], 32), ([1, 2, 3], 48)], [0, 20, 32]),
        ([([1, 2], 32), ([2, 1], 32)], [0, 0]),
        ([([1, 2], 20), ([1, 2, 3], 40), ([1, 2, 3], 41)], [0, 20, 40]),
        ([([1], 5), ([1], 3), ([1], 16)], [0, 3, 5]),
        ([([1, 2, 99], 32), ([1, 2, 99], 48)], [0, 32]),
    ],
)
def test_shared_tokens_of_prompts(prompts: list[tuple[list[int], int]], known: list[int]) -> None:
    tree = PrefixTree(16)
    assert [tree.add(ids, isl) for ids, isl in prompts] == known


# ---------------------------------------------------------------- sessions, words


@pytest.mark.shared
def test_sessions_and_what_waits_for_an_answer(shared: Path) -> None:
    found = describe(shared / "parity" / "traces" / "sessions.jsonl", ReadOptions(hash_block_tokens=64))
    assert (found.rows, found.sessions, found.session_rows, found.closed_loop_rows) == (204, 60, 204, 144)


@pytest.fixture
def shown(root: Path) -> TraceStats:
    return describe(root / "traces" / "azure.parquet")


def test_what_is_printed_says_what_it_is(shown: TraceStats) -> None:
    table = shown.table()
    labels = {label for label, _ in table}
    assert {"rows", "span", "rate", "gaps, CV", "isl", "osl", "ideal hit rate", "sessions"} <= labels
    said = "\n".join(f"{label} {value}" for label, value in table)
    assert "synthetic: drawn by twin synth azure, seed 42" in said
    assert "CC-BY-4.0" in said
    assert "n/a (no hash ids" in said


def test_figures_as_plain_values(shown: TraceStats) -> None:
    plain = json.loads(json.dumps(shown.to_dict()))
    assert plain["isl"]["p50"] == shown.isl.quantiles[QUANTILES.index(0.5)]
    assert plain["hit_rate_tokens"] is None
    assert plain["info"]["synthetic"] is True
    assert set(plain["dispersion"]) == {"1s", "10s", "60s"}


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    found = describe(written(tmp_path / "t.parquet", arrival_s=[3.0]))
    assert (found.rows, found.span_s, found.rate_rps, found.gap_cv, found.peak_rps) == (1, 0.0, None, None, None)
    assert "rate" in dict(found.table())


def test_more_rows_than_a_batch(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 1
    found = describe(written(tmp_path / "t.parquet", arrival_s=np.arange(count).tolist()))
    assert (found.rows, found.rate_rps, found.gap_cv) == (count, 1.0, 0.0)
