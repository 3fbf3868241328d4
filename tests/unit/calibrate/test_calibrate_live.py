"""Fits to live runs, on simulated ones that stand in for them: their step times are known, and have to come back."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pytest

from policies.errors import ConfigError
from reports.record import RunRecord
from reports.repeats import compare_repeats
from traces.convert import write_table
from traces.schema import canonical_schema
from twin.calibrate.live.run import Part, read_live_run, same_demand
from twin.calibrate.live.write import LiveFit, fit_runs, fitted_config, fitted_toml
from twin.config import Config, FaultsConfig, LatencyConfig
from twin.config_read import load
from twin.perf.linear import LinearCoefficients, LinearLatency
from twin.perf.protocol import PrefillChunk
from twin.replay import replay

PATH_S = 0.020
PLANTED = {
    "step_s": 0.008,
    "prefill_s_per_token": 2e-4,
    "prefill_s_per_pair": 1e-7,
    "prefill_s_per_prompt": 0.01,
    "decode_s_per_request": 0.002,
    "decode_s_per_ctx_token": 2e-6,
}
GROUP = """
allow_no_effect = true
[[workers]]
name = "mixed"
count = 2
tp = 1
model = "llama-3.1-8b"
path_s = {path_s}
[workers.engine]
block_size = 32
kv_blocks = 500
max_num_seqs = 16
max_num_batched_tokens = 512
[workers.latency]
model = "linear"
{latency}
[router]
mode = "kv"
"""


def demand(path: Path, rows: int, seed: int) -> Path:
    """Poisson arrivals, mixed lengths, a third of the prompts with a common beginning of 128 tokens."""
    rng = np.random.default_rng(seed)
    isl, osl = rng.integers(20, 900, rows), rng.integers(1, 60, rows)
    arrivals = np.cumsum(rng.exponential(0.25, rows))
    ids = [[1, 2, 3, 4] if n % 3 == 0 and length > 200 else [] for n, length in enumerate(isl.tolist())]
    ids = [
        [*own, *(1000 * (n + 1) + at for at in range(-(-int(length) // 32) - len(own)))]
        for n, (own, length) in enumerate(zip(ids, isl, strict=True))
    ]
    columns = {"arrival_s": arrivals - arrivals[0], "isl": isl, "osl": osl, "hash_ids": ids}
    schema = canonical_schema(tuple(columns), {"hash_block_tokens": "32"})
    table = pa.table({name: pa.array(values, schema.field(name).type) for name, values in columns.items()}, schema)
    write_table(table, path)
    return path


def configured(folder: Path, trace: Path, scenario: Path | None = None) -> Config:
    latency = "\n".join(f"{name} = {value!r}" for name, value in PLANTED.items())
    file = folder / "planted.toml"
    file.write_text(GROUP.format(path_s=PATH_S, latency=latency), encoding="utf-8")
    return load(file, {}, [f"trace.path={trace}", *([f"faults.path={scenario}"] if scenario is not None else [])])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of known step times, which is taken for a live one."""
    top = tmp_path_factory.mktemp("live")
    config = configured(top, demand(top / "trace.parquet", 300, seed=3))
    return replay(config, out=top / "live-1", html=False, journal=True).folder


@pytest.fixture(scope="module")
def fits(run: Path) -> dict[int, LiveFit]:
    """By how many requests they have seen."""
    return {rows: fit_runs([read_live_run(run, Part(first=rows))], Part(first=rows)) for rows in (150, 300)}


@pytest.mark.parametrize(
    ("chunks", "batch", "ctx"),
    [
        ([], 1, 300),
        ([], 4, 2000),
        ([PrefillChunk(500, 0, 0, True)], 0, 0),
        ([PrefillChunk(200, 128, 0, True)], 3, 1200),
    ],
)
@pytest.mark.parametrize("rows", [150, 300])
def test_planted_step_times_come_back(
    fits: dict[int, LiveFit], chunks: list[PrefillChunk], batch: int, ctx: int, rows: int
) -> None:
    (group,) = fits[rows].groups
    assert group.requests == rows
    found, planted = LinearLatency(group.coefficients), LinearLatency(LinearCoefficients(**PLANTED))
    assert found.step_s(chunks, batch, ctx, 0, 0) == pytest.approx(planted.step_s(chunks, batch, ctx, 0, 0), rel=0.05)
    first = [PrefillChunk(100, 0, 0, True)]
    whole_s = group.path_s + found.step_s(first, 0, 0, 0, 0)
    assert whole_s == pytest.approx(PATH_S + planted.step_s(first, 0, 0, 0, 0), rel=0.05)


def test_what_was_fitted_replays_to_the_times_of_the_run(run: Path, fits: dict[int, LiveFit], tmp_path: Path) -> None:
    config = fitted_config(fits[150], run / "journal.jsonl")
    assert config.trace.warmup == 150
    again = RunRecord(replay(config, out=tmp_path / "again", html=False).folder).requests
    live = RunRecord(run).requests
    for name in ("ttft_s", "e2e_s"):
        there, here = (np.nanmean(columns.floats(name)[150:]) for columns in (live, again))
        assert here == pytest.approx(there, rel=0.03)
    assert (again.ints("worker_id") == live.ints("worker_id")).mean() > 0.9
    assert again.floats("cached_tokens").sum() == pytest.approx(live.floats("cached_tokens").sum(), rel=0.1) != 0


def test_the_written_configuration_is_the_fitted_one_and_differs_from_the_run_in_nothing_else(
    run: Path, fits: dict[int, LiveFit], tmp_path: Path
) -> None:
    read, fit = read_live_run(run), fits[300]
    file = tmp_path / "twin.toml"
    file.write_text(fitted_toml(fit, date(2026, 11, 30)), encoding="utf-8")
    assert "live-1" in file.read_text(encoding="utf-8").splitlines()[0]
    back = load(file)
    wanted = fitted_config(fit)
    assert back.workers == wanted.workers
    (group,) = back.workers
    assert group.path_s == fit.groups[0].path_s
    neutral = {"path_s": 0.0, "latency": LatencyConfig(params=MappingProxyType({}))}
    assert replace(group, **neutral) == replace(read.config.workers[0], **neutral)
    assert back.router == read.config.router
    assert "error_band" in group.latency.params


def test_an_exact_run_has_small_errors_on_requests_that_a_fit_has_not_seen(fits: dict[int, LiveFit]) -> None:
    (group,) = fits[300].groups
    assert group.unseen is not None
    assert group.unseen.tpot is not None
    assert max(*group.unseen.ttft, *group.unseen.tpot) < 0.1
    assert abs(group.bias[0]) < 0.02
    assert group.reach[0] >= 2
    assert group.reach[1] <= 900


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose clients leave, some before their first token."""
    top = tmp_path_factory.mktemp("cut")
    scenario = top / "leave.toml"
    scenario.write_text('faults = [{kind = "client_disconnect", rate = 0.3, within_ms = 400}]\n', encoding="utf-8")
    config = configured(top, demand(top / "trace.parquet", 80, seed=5), scenario)
    return replay(config, out=top / "cut", html=False, journal=True).folder


def ends(run: Path) -> list[str | None]:
    codes, labels = RunRecord(run).requests.codes("status")
    return [labels[code] for code in codes]


def test_cut_requests_load_the_engine_and_are_counted_but_not_fitted(cut: Path) -> None:
    silent = int(np.isnan(RunRecord(cut).requests.floats("first_token_s")).sum())
    read = read_live_run(cut, Part(first=40))
    requests = [request for worker in read.workers for request in worker.requests]
    assert ends(cut).count("cancelled") > 10
    assert silent > 0
    assert sum(one.fitted for one in requests) == ends(cut)[:40].count("completed")
    assert len(requests) == 80 - silent
    assert read.left_out == {"no output tokens": silent, "ended cancelled": ends(cut).count("cancelled") - silent}
    (group,) = fit_runs([read], Part(first=40)).groups
    assert group.requests == ends(cut)[:40].count("completed")


def test_a_run_with_cut_requests_is_compared_with_its_twin_by_those_that_completed(cut: Path, tmp_path: Path) -> None:
    """The trace has no rows of clients that left without a token: the others are found again by their names."""
    silent = np.isnan(RunRecord(cut).requests.floats("first_token_s"))
    fit = fit_runs([read_live_run(cut, Part(first=40))], Part(first=40))
    config = fitted_config(fit, cut / "journal.jsonl")
    assert config.trace.warmup == 40 - silent[:40].sum()
    found = compare_repeats([cut, cut], replay(replace(config, faults=FaultsConfig()), out=tmp_path / "twin").folder)
    assert found.rows == 40 - silent[40:].sum()
    completed = ends(cut)[40:].count("completed")
    ttft = RunRecord(cut).requests.floats("ttft_s")[40:][[end == "completed" for end in ends(cut)[40:]]]
    assert found.figure("TTFT mean").live == pytest.approx(ttft.mean())
    assert found.figure("TTFT mean").error == pytest.approx(0.0, abs=0.1)
    assert found.figure("completed").live == completed
    assert f"latencies leave out {found.rows - completed} requests that did not complete in every run" in found.notes


def test_only_the_first_requests_count_where_that_is_asked_for(run: Path) -> None:
    requests = [request for worker in read_live_run(run, Part(first=20)).workers for request in worker.requests]
    assert len(requests) == 300
    assert sorted(one.row for one in requests if one.fitted) == list(range(20))
    assert all(one.first_s is not None and one.dispatch_s < one.first_s for one in requests)


def test_too_few_requests_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"group mixed: 9 completed requests to fit to; at least 10 are needed"):
        fit_runs([read_live_run(run, Part(first=9))], Part(first=9))


def test_folders_that_are_no_recorded_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without journal\.jsonl; record it with twin serve --record DIR"):
        read_live_run(tmp_path)


def test_repeats_of_other_clusters_are_refused(run: Path, tmp_path: Path) -> None:
    read = read_live_run(run)
    more = replace(read.config, workers=(replace(read.config.workers[0], count=3),))
    other = replace(read, config=more, folder=tmp_path)
    with pytest.raises(ConfigError, match="other groups of workers than"):
        same_demand([read, other])
