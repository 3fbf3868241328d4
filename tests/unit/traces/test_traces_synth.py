"""Drawn traces: reproducible, marked, prefixes of longer draws, and in shape like what their figures were fitted to.

The bounds for the shape are those of the reference redraws in `traces/fits/evaluation.json` of the shared data, widened
by half of their own width on both sides; our means over eight seeds must lie within.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from scipy.stats import ks_2samp, spearmanr

from traces.draw import Quantiles, Stream
from traces.errors import TraceError
from traces.synth import SYNTHESISERS, SynthOptions, synthesise
from traces.synth_azure import draw_azure, draw_code, draw_conversation
from traces.synth_mooncake import draw_mooncake

Array = npt.NDArray[np.float64]
SEEDS = range(8)


def options_for(name: str, **asked: object) -> SynthOptions:
    needed = {"poisson": {"rate_rps": 5.0}, "gamma": {"rate_rps": 5.0, "cv": 2.0}}.get(name, {})
    return SynthOptions(**{**needed, **asked})  # type: ignore[arg-type]


# ---------------------------------------------------------------- what every generator keeps


@pytest.mark.parametrize("name", SYNTHESISERS)
def test_the_same_seed_gives_the_same_trace_and_another_does_not(name: str) -> None:
    one, same, other = (synthesise(name, options_for(name, seed=seed, rows=500)) for seed in (7, 7, 8))
    assert one.equals(same, check_metadata=True)
    assert not one.equals(other)
    assert one.num_rows == 500


@pytest.mark.parametrize("name", SYNTHESISERS)
def test_rows_are_the_beginning_of_a_longer_trace(name: str) -> None:
    short = synthesise(name, options_for(name, seed=3, rows=200))
    long = synthesise(name, options_for(name, seed=3, duration_s=3600.0))
    assert long.num_rows > 200
    assert long.slice(0, 200).equals(short)


@pytest.mark.parametrize("name", SYNTHESISERS)
def test_a_drawn_trace_is_canonical_and_says_that_it_is_synthetic(name: str) -> None:
    table = synthesise(name, options_for(name, seed=11, duration_s=600.0))
    arrival_s, isl, osl = (table[column].to_numpy() for column in ("arrival_s", "isl", "osl"))
    assert arrival_s[0] == 0
    assert (np.diff(arrival_s) >= 0).all()
    assert arrival_s[-1] < 600
    assert isl.min() >= 1
    assert osl.min() >= 1
    metadata = table.schema.metadata
    assert metadata[b"synthetic"] == b"true"
    assert metadata[b"seed"] == b"11"
    assert metadata[b"generator"].startswith(f"twin synth {name}".encode())
    assert "date" not in str(metadata)


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("azur", {}, "there is no generator 'azur'; there are azure, mooncake, poisson, gamma"),
        ("azure", {"rate_rps": 5.0}, "rate_rps has no effect on azure"),
        ("mooncake", {"isl": 5, "osl": 5}, "isl has no effect on mooncake"),
        ("poisson", {"cv": 2.0}, "cv has no effect on poisson"),
        ("azure", {"rows": 5, "duration_s": 5.0}, "give one of them"),
        ("azure", {"rows": 0}, "rows is 0"),
        ("azure", {"duration_s": float("inf")}, "duration_s is inf"),
        ("azure", {"seed": -1}, "seed is -1"),
        ("poisson", {"rate_rps": None}, "poisson needs rate_rps"),
        ("gamma", {"cv": None}, "gamma needs cv"),
        ("poisson", {"isl": 5}, "isl and osl belong together"),
        ("poisson", {"lengths": "fixed"}, "isl and osl belong together"),
        ("poisson", {"isl": 5, "osl": 5, "lengths": "azure"}, "isl has no effect with lengths azure"),
        ("poisson", {"lengths": "normal"}, "lengths is 'normal'; it is one of fixed, geometric, azure"),
        ("azure", {"duration_s": 1e-9}, "no request arrives within 1e-09 s"),
    ],
)
def test_what_cannot_be_drawn(name: str, asked: dict[str, object], said: str) -> None:
    with pytest.raises(TraceError) as caught:
        synthesise(name, options_for(name, **asked))
    assert said in str(caught.value)


# ---------------------------------------------------------------- Poisson and gamma


@pytest.mark.parametrize(("name", "cv"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 1.0), ("gamma", 3.0)])
def test_gaps_have_the_rate_and_variation_asked_for(name: str, cv: float) -> None:
    asked = {"cv": cv} if name == "gamma" else {}
    table = synthesise(name, SynthOptions(seed=5, rows=50_000, rate_rps=4.0, isl=7, osl=3, **asked))
    gaps = np.diff(table["arrival_s"].to_numpy())
    assert gaps.mean() == pytest.approx(0.25, rel=4 * cv / np.sqrt(50_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert set(table["isl"].to_pylist()) == {7}
    assert set(table["osl"].to_pylist()) == {3}


def test_geometric_lengths_have_their_means() -> None:
    asked = SynthOptions(seed=5, rows=50_000, rate_rps=1.0, isl=200, osl=1, lengths="geometric")
    table = synthesise("poisson", asked)
    isl = table["isl"].to_numpy()
    assert isl.mean() == pytest.approx(200, rel=4 / np.sqrt(50_000))
    assert isl.std() == pytest.approx(200, rel=0.03)
    assert set(table["osl"].to_pylist()) == {1}


# ---------------------------------------------------------------- chance


def test_streams_are_independent_of_each_other_and_of_numpy_distributions() -> None:
    stream = Stream(1, "a")
    assert stream.uniform(3).tolist() == [0.7839079634497955, 0.6685289572173779, 0.02763930978048834]
    assert Stream(1, "b").one() != Stream(1, "a").one() != Stream(2, "a").one()
    drawn = Stream(4, "g").gamma(0.25, 200_000)
    assert drawn.mean() == pytest.approx(1.0, abs=0.02)
    assert drawn.std() == pytest.approx(2.0, abs=0.05)


def test_one_and_many_draws_of_a_table_agree() -> None:
    table = Quantiles({"u": [0.0, 0.25, 1.0], "v": [1.0, 3.0, 4.0]})
    u = np.linspace(0, 1, 41)
    assert [table.one(each) for each in u] == pytest.approx(table.at(u).tolist())


# ---------------------------------------------------------------- the shapes


def widened(bounds: dict[str, float]) -> tuple[float, float]:
    half = (bounds["max"] - bounds["min"]) / 2
    return bounds["min"] - half, bounds["max"] + half


def arrival_figures(arrival_s: Array) -> dict[str, float]:
    gaps = np.diff(arrival_s)
    figures = {"rate": len(arrival_s) / (arrival_s[-1] - arrival_s[0]), "iat_cv": gaps.std() / gaps.mean()}
    for width in (1, 10, 60):
        windows = int((arrival_s[-1] - arrival_s[0]) // width)
        counts = np.bincount(((arrival_s - arrival_s[0]) // width).astype(int))[:windows]
        figures[f"iod{width}"] = counts.var() / counts.mean()
    return figures


@pytest.mark.shared
@pytest.mark.parametrize("service", ["conv", "code"])
def test_azure_has_the_recorded_shape(shared: Path, service: str) -> None:
    reference = json.loads((shared / "traces" / "fits" / "evaluation.json").read_text())[f"azure_{service}"]
    recorded = pq.read_table(shared / "traces" / "azure_2023" / f"azure_{service}.0-45min.parquet")
    real_s, real_isl, real_osl = (recorded[c].to_numpy() for c in ("arrival_s", "prompt_tokens", "output_tokens"))
    draw, span_s = {"conv": (draw_conversation, 2623.3), "code": (draw_code, 2534.3)}[service]
    drawn: list[dict[str, float]] = []
    for seed in SEEDS:
        arrival_s, isl, osl = draw(span_s, seed)
        drawn.append(
            {
                **arrival_figures(arrival_s),
                "ks_isl": ks_2samp(real_isl, isl).statistic,
                "ks_osl": ks_2samp(real_osl, osl).statistic,
                "ks_iat": ks_2samp(np.diff(real_s), np.diff(arrival_s)).statistic,
                "ks_total": ks_2samp(real_isl + real_osl, isl + osl).statistic,
                "spearman": spearmanr(isl, osl).statistic,
            }
        )
    for figure, bounds in ((name, reference[name]) for name in drawn[0]):
        mean = float(np.mean([each[figure] for each in drawn]))
        low, high = widened(bounds)
        assert low <= mean <= high, f"{figure}: {mean:.4f} is outside {low:.4f} to {high:.4f}"


@pytest.mark.shared
def test_the_reference_figures_are_computed_as_the_fit_did(shared: Path) -> None:
    reference = json.loads((shared / "traces" / "fits" / "evaluation.json").read_text())
    for service in ("conv", "code"):
        recorded = pq.read_table(shared / "traces" / "azure_2023" / f"azure_{service}.0-45min.parquet")
        for figure, value in arrival_figures(recorded["arrival_s"].to_numpy()).items():
            assert value == pytest.approx(reference[f"azure_{service}"]["real"][figure], abs=6e-4)


@pytest.mark.shared
def test_mooncake_has_the_recorded_shape(shared: Path) -> None:
    reference = json.loads((shared / "traces" / "fits" / "evaluation.json").read_text())["mooncake_conversation"]
    recorded = pq.read_table(shared / "traces" / "mooncake" / "mooncake_conversation.0-45min.parquet")
    real_isl, real_osl = (recorded[column].to_numpy() for column in ("prompt_tokens", "output_tokens"))
    real_hits = hit_blocks(recorded["hash_ids"].to_pylist())
    drawn: list[dict[str, float]] = []
    for seed in SEEDS:
        found = draw_mooncake(2700.0, seed)
        offsets, values = found.ids.offsets.tolist(), found.ids.values.tolist()
        hits = hit_blocks([values[a:b] for a, b in pairwise(offsets)])
        drawn.append(
            {
                "n": len(found.isl),
                "ks_isl": ks_2samp(real_isl, found.isl).statistic,
                "ks_osl": ks_2samp(real_osl, found.osl).statistic,
                "ks_hitblocks": ks_2samp(real_hits, hits).statistic,
                "ideal_hit": hits.sum() / len(values),
                "unique_blocks": len(set(values)),
            }
        )
    for figure in drawn[0]:
        mean = float(np.mean([each[figure] for each in drawn]))
        low, high = widened(reference[figure])
        assert low <= mean <= high, f"{figure}: {mean:.4f} is outside {low:.4f} to {high:.4f}"


def hit_blocks(requests: list[list[int]]) -> npt.NDArray[np.int64]:
    """Leading ids of each request that some request before it had too."""
    seen: set[int] = set()
    hits = []
    for ids in requests:
        hits.append(next((i for i, each in enumerate(ids) if each not in seen), len(ids)))
        seen.update(ids)
    return np.array(hits)


def test_mooncake_sessions_share_prefixes_and_stand_on_the_grid() -> None:
    table = synthesise("mooncake", SynthOptions(seed=2, duration_s=900.0))
    assert set(np.mod(table["arrival_s"].to_numpy(), 3.0)) == {0.0}
    assert table.schema.metadata[b"hash_block_tokens"] == b"512"
    lists, isl = table["hash_ids"].to_pylist(), table["isl"].to_pylist()
    assert all(len(ids) == -(-tokens // 512) for ids, tokens in zip(lists, isl, strict=True))
    assert all(ids[0] == 0 for ids in lists)
    firsts = list(dict.fromkeys(each for ids in lists for each in ids))
    assert firsts == list(range(len(firsts)))


def test_azure_beyond_the_recording_keeps_its_level() -> None:
    """Six hours at 5.9 conversation and about 3.1 code requests per second; minutes vary with a CV of about 0.25."""
    conversation = draw_conversation(6 * 3600.0, 1).arrival_s
    assert len(conversation) / (6 * 3600) == pytest.approx(5.89, rel=0.1)
    minutes = np.bincount((conversation // 60).astype(int), minlength=360)
    assert 0.15 < minutes.std() / minutes.mean() < 0.3
    assert len(draw_azure(6 * 3600.0, 1).arrival_s) / (6 * 3600) == pytest.approx(9.0, rel=0.1)


@pytest.mark.shared
def test_figures_of_the_package_are_the_shared_ones(shared: Path, root: Path) -> None:
    for name in ("azure_conv", "azure_code", "mooncake_conversation"):
        ours, theirs = (folder / f"{name}.json" for folder in (root / "traces" / "fits", shared / "traces" / "fits"))
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


@pytest.mark.parametrize("name", ["poisson", "gamma"])
def test_few_rows_at_a_high_rate_are_the_first_of_many(name: str) -> None:
    """Sixty seconds of ten million a second were drawn for five rows."""
    few, many = (synthesise(name, options_for(name, rows=rows, rate_rps=1e7, isl=3, osl=2)) for rows in (5, 20_000))
    assert few.equals(many.slice(0, 5))
    assert many["arrival_s"][-1].as_py() == pytest.approx(0.002, rel=0.1)


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("poisson", {"isl": 3_000_000_000, "osl": 1}, "isl is 3000000000; a trace holds at most 2147483647 tokens"),
        ("gamma", {"isl": 1, "osl": 2**31}, "osl is 2147483648; a trace holds at most"),
        ("poisson", {"isl": 2**31 - 1, "osl": 1, "lengths": "geometric"}, "isl was drawn above 2147483647 tokens"),
        ("poisson", {"rate_rps": 1e7, "duration_s": 1e6}, "about 1e.13 requests; at most 100,000,000"),
        ("azure", {"rows": 100_000_001}, "at most 100,000,000"),
        ("poisson", {"rate_rps": 1e-12, "rows": 5}, "would last 5e.12 s, and one holds at most 1000000000 s"),
        ("gamma", {"cv": 1e5, "rows": 5}, "cv is 100000.0; at most 100"),
    ],
)
def test_what_no_trace_can_hold_is_refused(name: str, asked: dict[str, object], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        synthesise(name, options_for(name, **asked))


def test_the_longest_mean_is_drawn_unclipped() -> None:
    table = synthesise("poisson", options_for("poisson", rows=3, isl=2**31 - 1, osl=1))
    assert table["isl"].to_pylist() == [2**31 - 1] * 3
