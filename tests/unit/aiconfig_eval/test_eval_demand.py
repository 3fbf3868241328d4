"""Rows that a simulation plays: lengths, shares and arrivals are what the workload says, for every candidate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aiconfig_eval_builders import workload

from aiconfig.demand import Protocol, draw_rows, protocol, write_rows
from aiconfig.estimate import Load
from policies.errors import ConfigError
from traces.stats import describe


def _column(table: object, name: str) -> np.ndarray:
    return np.array(table.column(name).to_pylist())  # type: ignore[attr-defined]


def test_lengths_are_uniform_between_the_share_and_the_whole() -> None:
    rows = draw_rows(workload(isl=100, osl=10, min_ratio=0.5), 20_000)
    isl, osl = _column(rows, "isl"), _column(rows, "osl")
    assert (isl.min(), isl.max()) == (50, 100)
    assert (osl.min(), osl.max()) == (5, 10)
    assert isl.mean() == pytest.approx(75, rel=0.01)
    counts = np.bincount(isl)[50:]
    assert counts.min() > 0.7 * counts.mean()
    assert abs(np.corrcoef(isl, osl)[0, 1]) < 0.03, "a long prompt says nothing about its answer"


def test_a_share_of_one_means_fixed_lengths() -> None:
    rows = draw_rows(workload(isl=100, osl=10, min_ratio=1.0), 50)
    assert set(_column(rows, "isl")) == {100}
    assert set(_column(rows, "osl")) == {10}


def test_the_shortest_request_has_a_token() -> None:
    rows = draw_rows(workload(isl=3, osl=1, min_ratio=0.01), 500)
    assert _column(rows, "isl").min() == 1
    assert set(_column(rows, "osl")) == {1}


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    demand = workload(arrivals="poisson", prefix_tokens=40)
    assert draw_rows(demand, 300).slice(0, 100).equals(draw_rows(demand, 100))


def test_seeds_differ_and_repeat() -> None:
    assert draw_rows(workload(seed=1), 50).equals(draw_rows(workload(seed=1), 50))
    assert not draw_rows(workload(seed=1), 50).equals(draw_rows(workload(seed=2), 50))


@pytest.mark.parametrize("prefix", [16, 40, 120])
def test_prompts_have_exactly_the_prefix_in_common(prefix: int, tmp_path: Path) -> None:
    demand = workload(isl=200, min_ratio=1.0, prefix_tokens=prefix)
    write_rows(demand, 1000, tmp_path / "rows.parquet")
    shared = describe(tmp_path / "rows.parquet").hit_rate_tokens
    assert shared == pytest.approx(prefix / 200 * 999 / 1000)


def test_a_prefix_that_no_block_can_hold_is_not_shared(tmp_path: Path) -> None:
    assert "hash_ids" not in draw_rows(workload(prefix_tokens=15), 10).schema.names


def test_poisson_arrivals_come_once_a_second() -> None:
    arrivals = _column(draw_rows(workload(arrivals="poisson"), 5000), "arrival_s")
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() == pytest.approx(1.0, rel=0.06)


def test_how_much_is_played() -> None:
    assert protocol(workload(requests=None), Load(users=4)) == Protocol(requests=200, warmup=4)
    assert protocol(workload(requests=None), Load(users=64)) == Protocol(requests=640, warmup=64)
    assert protocol(workload(requests=None), Load(users=300)) == Protocol(requests=1300, warmup=300)
    assert protocol(workload(requests=None), Load(users=1000)) == Protocol(requests=4000, warmup=1000)
    assert protocol(workload(requests=100), Load(users=64)) == Protocol(requests=100, warmup=0)
    played = protocol(workload(requests=None, arrivals="poisson"), Load(rps=2.0))
    assert played.requests - played.warmup == 1000, "percentiles take 1,000 completions"


@pytest.mark.parametrize(
    ("arrivals", "load", "text"),
    [
        ("poisson", Load(users=3), "users are for --arrivals closed"),
        ("closed", Load(rps=3.0), "a rate is for --arrivals poisson or recorded"),
    ],
)
def test_a_load_that_contradicts_the_arrivals_is_refused(arrivals: str, load: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        protocol(workload(arrivals=arrivals), load)


def test_recorded_arrivals_need_a_trace() -> None:
    with pytest.raises(ConfigError, match="give --trace"):
        draw_rows(workload(arrivals="recorded"), 5)
