"""Measured tables: interpolation, borders, refusals, the peer's profile, and rows that are wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policies.errors import ConfigError
from twin.perf.protocol import FOREVER_STEPS, DecodePiece, PrefillChunk
from twin.perf.table import TableLatency
from twin.perf.table_files import read_table

CSV = """kind,latency_ms,new_tokens,past_tokens,batch,mean_ctx_tokens
prefill,10,100,0,,
prefill,100,1100,0,,
prefill,30,100,4000,,
prefill,140,1100,4000,,
decode,5,,,1,0
decode,6,,,1,1000
decode,9,,,1,2000
decode,7,,,5,0
decode,12,,,5,1000
"""


def written(tmp_path: Path, text: str, name: str = "measured.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def table(tmp_path: Path, text: str = CSV, *, extrapolate: bool = False) -> TableLatency:
    return TableLatency(
        read_table(written(tmp_path, text), extrapolate=extrapolate), extrapolate=extrapolate, engine_version="vLLM 1.0"
    )


def prompt(new: int, past: int = 0, recomputed: int = 0) -> PrefillChunk:
    return PrefillChunk(new, past, recomputed, True)


def prefill_ms(model: TableLatency, *chunks: PrefillChunk) -> float:
    return 1e3 * model.step_s(chunks, 0, 0, 0, 0)


def decode_ms(model: TableLatency, batch: int, ctx_tokens: int) -> float:
    return 1e3 * model.step_s([], batch, ctx_tokens, 0, 0)


def test_measured_points_come_back(tmp_path: Path) -> None:
    model = table(tmp_path)
    assert prefill_ms(model, prompt(1100)) == pytest.approx(100)
    assert prefill_ms(model, prompt(100, past=4000)) == pytest.approx(30)
    assert decode_ms(model, 1, 2000) == pytest.approx(9)
    assert decode_ms(model, 5, 5000) == pytest.approx(12)


def test_between_points_it_is_bilinear(tmp_path: Path) -> None:
    model = table(tmp_path)
    assert prefill_ms(model, prompt(600)) == pytest.approx(55)
    assert prefill_ms(model, prompt(600, past=1000)) == pytest.approx(0.75 * 55 + 0.25 * 85)
    assert decode_ms(model, 1, 1500) == pytest.approx(7.5)
    assert decode_ms(model, 3, 3 * 500) == pytest.approx((5.5 + 9.5) / 2)


def test_chunks_count_together_and_recomputed_tokens_count(tmp_path: Path) -> None:
    model = table(tmp_path)
    assert prefill_ms(model, prompt(400), prompt(200, past=3000)) == prefill_ms(model, prompt(600, past=1000))
    assert prefill_ms(model, prompt(400, recomputed=200)) == prefill_ms(model, prompt(600))


def test_a_mixed_step_is_the_sum(tmp_path: Path) -> None:
    model = table(tmp_path)
    assert 1e3 * model.step_s([prompt(600)], 1, 1000, 0, 0) == pytest.approx(55 + 6)


def test_a_resumed_request_without_work_decodes(tmp_path: Path) -> None:
    model = table(tmp_path)
    assert model.step_s([], 0, 0, 1, 1500) == model.step_s([], 1, 1500, 0, 0)


def test_decode_pieces_end_at_the_cell_border(tmp_path: Path) -> None:
    model = table(tmp_path)
    piece = model.decode_piece(1, 900)
    assert (piece.g0, piece.g1, piece.g2, piece.steps) == (pytest.approx(5.9e-3), pytest.approx(1e-6), 0.0, 101)
    last = model.decode_piece(1, 1900)
    assert (last.g1, last.steps) == (pytest.approx(3e-6), 101)
    with pytest.raises(ConfigError, match="mean context 2001 is outside"):
        model.decode_piece(1, 2001)


def test_outside_the_points_is_an_error_with_the_limits(tmp_path: Path) -> None:
    model = table(tmp_path)
    with pytest.raises(ConfigError) as outside:
        decode_ms(model, 6, 600)
    assert str(outside.value) == (
        "latency table measured.csv, decode: batch 6 is outside the measured points (batch 1 to 5); "
        "measure more, or set extrapolate = true"
    )
    with pytest.raises(ConfigError, match=r"batch 3, mean context 1500 is outside .*0 to 1000 at batch 5"):
        decode_ms(model, 3, 4500)
    with pytest.raises(ConfigError, match=r"past_tokens 0, new_tokens 50 is outside .*100 to 1100"):
        prefill_ms(model, prompt(50))
    with pytest.raises(ConfigError, match=r"past_tokens 5000 is outside"):
        prefill_ms(model, prompt(500, past=5000))


def test_extrapolation_must_be_asked_for_and_is_said(tmp_path: Path) -> None:
    model = table(tmp_path, extrapolate=True)
    assert decode_ms(model, 1, 3000) == pytest.approx(12)
    assert decode_ms(model, 9, 0) == pytest.approx(9)
    assert prefill_ms(model, prompt(2100)) == pytest.approx(190)
    assert model.decode_piece(1, 2500).steps == FOREVER_STEPS
    assert "extrapolates beyond its points" in model.provenance.line()
    assert "extrapolates" not in table(tmp_path).provenance.line()


def test_extrapolation_never_reaches_zero(tmp_path: Path) -> None:
    falling = "kind,latency_s,batch,mean_ctx_tokens\ndecode,3,1,0\ndecode,2,1,10\n"
    model = table(tmp_path, falling, extrapolate=True)
    piece = model.decode_piece(1, 15)
    assert piece.steps == 15
    assert piece.g0 + piece.g1 * (piece.steps - 1) > 0
    with pytest.raises(ConfigError, match=r"extrapolated to -0\.1 s at batch 1, mean context 31"):
        model.decode_piece(1, 31)


def test_context_of_the_whole_batch_may_be_given_instead(tmp_path: Path) -> None:
    per_request = "kind,latency_ms,batch,mean_ctx_tokens\n" + "".join(
        f"decode,{batch + ctx / 100},{batch},{ctx}\n" for batch, ctx in itertools.product((1, 4), (0, 500))
    )
    whole = "kind,latency_ms,batch,ctx_tokens\n" + "".join(
        f"decode,{batch + ctx / 100},{batch},{batch * ctx}\n" for batch, ctx in itertools.product((1, 4), (0, 500))
    )
    assert table(tmp_path, per_request).decode_piece(2, 400) == table(tmp_path, whole).decode_piece(2, 400)


def test_a_table_without_batch_goes_by_context(tmp_path: Path) -> None:
    model = table(tmp_path, "kind,latency_ms,ctx_tokens\ndecode,5,0\ndecode,15,1000\n")
    assert model.decode_piece(10, 500) == DecodePiece(pytest.approx(0.010), pytest.approx(1e-4), 0.0, 51)
    assert any("batch size is not in the table" in note for note in model.provenance.notes)


def test_a_table_without_context_goes_by_batch(tmp_path: Path) -> None:
    model = table(tmp_path, "kind,latency_ms,batch\ndecode,5,1\ndecode,8,4\n")
    assert model.decode_piece(2, 10**9) == DecodePiece(pytest.approx(0.006), 0.0, 0.0, FOREVER_STEPS)
    assert any("context is not in the table" in note for note in model.provenance.notes)


def test_a_table_without_prior_context_says_so(tmp_path: Path) -> None:
    model = table(tmp_path, "kind,latency_ms,new_tokens\nprefill,5,10\nprefill,15,110\n")
    assert prefill_ms(model, prompt(60, past=9999)) == pytest.approx(10)
    assert any("prior context is not in the table" in note for note in model.provenance.notes)
    with pytest.raises(ConfigError, match="no decode points, but 2 requests decode"):
        model.decode_piece(2, 100)


def test_a_table_without_prefill_cannot_price_a_prompt(tmp_path: Path) -> None:
    model = table(tmp_path, "kind,latency_ms,batch\ndecode,5,1\n")
    with pytest.raises(ConfigError, match="no prefill points, but a step computes 7 prompt tokens"):
        prefill_ms(model, prompt(7))


def test_points_measured_twice_count_with_their_mean(tmp_path: Path) -> None:
    model = table(tmp_path, "kind,latency_ms,batch\ndecode,5,1\ndecode,7,1\n")
    assert decode_ms(model, 1, 1) == pytest.approx(6)


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    columns = {
        "kind": ["prefill", "prefill", "decode", "decode"],
        "latency_s": [0.01, 0.1, 0.005, 0.008],
        "new_tokens": pa.array([100, 1100, None, None], pa.int64()),
        "batch": pa.array([None, None, 1, 4], pa.int64()),
    }
    path = tmp_path / "measured.parquet"
    pq.write_table(pa.table(columns), path)
    model = TableLatency(read_table(path), extrapolate=False, source="my bench")
    assert prefill_ms(model, prompt(600)) == pytest.approx(55)
    assert decode_ms(model, 2, 10) == pytest.approx(6)
    assert model.provenance.source.startswith("my bench, measured.parquet (4 points, sha256 ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind,latency\ndecode,1\n", r"column 'latency' is not known; did you mean 'latency_"),
        ("kind,batch\ndecode,1\n", r"needs either latency_s or latency_ms, found neither"),
        ("kind,latency_s,latency_ms,batch\ndecode,1,1,1\n", r"needs either latency_s or latency_ms"),
        ("latency_s,batch\n1,1\n", r"column kind \(prefill or decode\) is missing"),
        ("kind,latency_s,batch\nwarmup,1,1\n", r"measured\.csv:2: kind = 'warmup'"),
        ("kind,latency_s,batch\ndecode,,1\n", r":2: the latency is missing"),
        ("kind,latency_s,batch\ndecode,1,1\ndecode,nan,2\n", r":3: latency_s = 'nan' is not a finite number"),
        ("kind,latency_s,batch\ndecode,0,1\n", r":2: latency_s = 0 must be more than 0"),
        ("kind,latency_s,batch\ndecode,1,0\n", r":2: batch = 0 is too small"),
        ("kind,latency_s,batch,ctx_tokens\ndecode,1,2,-5\n", r":2: ctx_tokens = -5 is too small"),
        ("kind,latency_s,batch,ctx_tokens,mean_ctx_tokens\ndecode,1,2,5,5\n", r":2: both ctx_tokens and mean"),
        ("kind,latency_s,batch,ctx_tokens\ndecode,1,2,5\ndecode,1,3,\n", r"decode rows differ in the columns"),
        ("kind,latency_s,batch\nprefill,1,\n", r"prefill rows need new_tokens"),
        ("kind,latency_s,mean_ctx_tokens\ndecode,1,4\n", r"decode rows need batch, or ctx_tokens"),
        ("kind,latency_s,batch\ndecode,1\n", r":2: 3 columns expected"),
        ("kind,latency_s,batch\n", r"no rows"),
        ("", r"needs either latency_s or latency_ms"),
    ],
)
def test_a_bad_table_costs_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_table(written(tmp_path, text))


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.csv: cannot be read \(No such file"):
        read_table(tmp_path / "absent.csv")
    with pytest.raises(ConfigError, match=r"expected a \.csv, \.parquet or \.npz file"):
        read_table(written(tmp_path, "x", "measured.txt"))
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_table(written(tmp_path, "x", "measured.parquet"))
    with pytest.raises(ConfigError, match="not a readable NPZ profile"):
        read_table(written(tmp_path, "x", "measured.npz"))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00kind")
    with pytest.raises(ConfigError, match="not a CSV file"):
        read_table(binary)


# the peer's NPZ profile

PROFILE = {
    "prefill_isl": np.array([100, 1000]),
    "prefill_ttft_ms": np.array([20.0, 110.0]),
    "decode_active_kv_tokens": np.array([0, 1000, 5000]),
    "decode_context_length": np.array([0, 500, 2000]),
    "decode_itl": np.array([[4.0, 5.0, 8.0], [6.0, 7.0, 10.0], [14.0, 15.0, 30.0]]),
}


def profile(tmp_path: Path, **changes: np.ndarray) -> Path:
    path = tmp_path / "profile.npz"
    np.savez(path, **{**PROFILE, **changes})
    return path


def test_the_peers_profile(tmp_path: Path) -> None:
    model = TableLatency(read_table(profile(tmp_path)), extrapolate=False)
    assert prefill_ms(model, prompt(550)) == pytest.approx(65)
    assert decode_ms(model, 2, 1001) == pytest.approx(7.002)  # C 1001, mean context 500, rounded down
    assert decode_ms(model, 4, 3000) == pytest.approx(0.5 * (7 + 250 / 1500 * 3) + 0.5 * (15 + 250 / 1500 * 15))


def test_the_peers_profile_is_quadratic_along_a_decode(tmp_path: Path) -> None:
    model = TableLatency(read_table(profile(tmp_path)), extrapolate=False)
    piece = model.decode_piece(3, 2000)
    assert piece.g2 > 0
    for j in range(0, piece.steps, 97):
        assert piece.g0 + piece.g1 * j + piece.g2 * j * j == pytest.approx(model.step_s([], 3, 2000 + 3 * j, 0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_itl": np.ones((2, 3))}, r"decode_itl has shape \(2, 3\), expected \(3, 3\)"),
        ({"prefill_isl": np.ones(3)}, "prefill_isl .* and prefill_ttft_ms .* differ"),
        ({"prefill_ttft_ms": np.array([1.0, np.nan])}, "prefill_ttft_ms is empty or holds a value"),
    ],
)
def test_a_bad_profile_costs_one_line(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_table(profile(tmp_path, **changes))


def test_a_profile_that_lacks_an_array(tmp_path: Path) -> None:
    path = tmp_path / "profile.npz"
    np.savez(path, prefill_isl=np.ones(1))
    with pytest.raises(ConfigError, match="array prefill_ttft_ms is missing"):
        read_table(path)
