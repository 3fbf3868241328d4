"""Live repeats beside their twin: spread and error by hand; the unknown stays open; other requests are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy

from policies.errors import ConfigError
from reports.build import build_report
from reports.record import RunRecord, finish_run
from reports.repeats import Fidelity, compare_repeats, is_close
from reports.repeats_views import fidelity_markdown, fidelity_text

ASKS = draw_asks(300, 6.0, seed=1)
SPEEDS = {"live-1": 0.0080, "live-2": 0.0084, "live-3": 0.0096, "near": 0.0085, "far": 0.0130, "off": 0.0098}
WARMUP = 100


def put(folder: Path, decode_s: float, asks: list[Ask] = ASKS, *, workers: int = 2, warmup: int | None = None) -> Path:
    toy = Toy(workers=workers, decode_s=decode_s, prefill_s_per_token=2e-4, max_seqs=32)
    run = run_toy(folder, asks, toy)
    simulated = not folder.name.startswith("live")
    config = {"trace": {"warmup": warmup}} if warmup else {}
    build_report(folder, replace(run.meta, simulated=simulated, config=config, not_modelled=("the weather",)))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("runs")
    found = {name: put(top / name, decode_s) for name, decode_s in SPEEDS.items()}
    found["half"] = put(top / "half", SPEEDS["near"], warmup=WARMUP)
    found["other"] = put(top / "live-other", 0.008, draw_asks(300, 6.0, seed=2))
    found["three"] = put(top / "three", SPEEDS["near"], workers=3)
    return found


def against(folders: dict[str, Path], twin: str, repeats: int = 3) -> Fidelity:
    return compare_repeats([folders[f"live-{n}"] for n in range(1, repeats + 1)], folders[twin])


def column(folder: Path, name: str) -> np.ndarray:
    return RunRecord(folder).requests.floats(name)


def test_each_figure_has_the_mean_and_the_ends_of_the_live_runs_and_the_error_of_the_twin(
    folders: dict[str, Path],
) -> None:
    e2e = against(folders, "far").figure("E2E p90")
    live = [float(np.quantile(column(folders[f"live-{n}"], "e2e_s"), 0.9)) for n in (1, 2, 3)]
    twin = float(np.quantile(column(folders["far"], "e2e_s"), 0.9))
    assert (e2e.live, e2e.low, e2e.high) == (pytest.approx(np.mean(live)), min(live), max(live))
    assert e2e.error == pytest.approx(twin / np.mean(live) - 1)
    assert e2e.inside is False


def test_an_error_within_the_spread_is_not_distinguishable_and_never_called_accurate(folders: dict[str, Path]) -> None:
    found = against(folders, "near")
    assert found.figure("ITL mean").inside
    assert found.close is True
    text = fidelity_text(found)
    (line,) = (line for line in text.splitlines() if line.startswith(" ITL mean"))
    assert "not distinguishable" in line
    assert "accurate" not in text
    assert "within the larger of 15% and the live spread: held" in text


def test_beyond_the_spread_fifteen_percent_pass_and_more_is_named(folders: dict[str, Path]) -> None:
    off = against(folders, "off").figure("ITL mean")
    assert not off.inside
    assert is_close(off)
    far = against(folders, "far")
    assert far.close is False
    assert "missed by ITL mean, E2E mean" in fidelity_text(far)


def test_the_difference_of_e2e_is_split_at_the_first_token(folders: dict[str, Path]) -> None:
    found = against(folders, "far")
    part = found.e2e_part
    assert part is not None
    e2e, ttft = found.figure("E2E mean"), found.figure("TTFT mean")
    assert part.ttft_s == pytest.approx(ttft.twin - ttft.live)
    assert part.ttft_s + part.decode_s == pytest.approx(e2e.twin - e2e.live)
    assert part.decode_s > part.ttft_s


def test_rows_that_the_twin_leaves_out_are_left_out_of_the_live_runs_too(folders: dict[str, Path]) -> None:
    found = against(folders, "half")
    assert (found.rows, found.first_row) == (200, WARMUP)
    live = np.mean([column(folders[f"live-{n}"], "ttft_s")[WARMUP:].mean() for n in (1, 2, 3)])
    assert found.figure("TTFT mean").live == pytest.approx(live)
    assert found.figure("TTFT mean").twin == pytest.approx(column(folders["half"], "ttft_s")[WARMUP:].mean())
    assert found.figure("completed").live == 200
    assert any("the first 100 requests are played and left out" in note for note in found.notes)


def test_every_other_block_is_compared_where_that_is_asked_for(folders: dict[str, Path]) -> None:
    lives = [folders[f"live-{n}"] for n in (1, 2, 3)]
    found = compare_repeats(lives, folders["near"], block=50)
    odd = np.arange(300) // 50 % 2 == 1
    assert (found.rows, found.figure("completed").live) == (150, 150)
    for name, column_name in (("TTFT mean", "ttft_s"), ("E2E mean", "e2e_s")):
        assert found.figure(name).live == pytest.approx(
            np.mean([column(one, column_name)[odd].mean() for one in lives])
        )
        assert found.figure(name).twin == pytest.approx(column(folders["near"], column_name)[odd].mean())


def test_gaps_of_blocks_are_those_that_begin_while_their_requests_arrive(folders: dict[str, Path]) -> None:
    run = RunRecord(folders["near"])
    arrivals = run.requests.floats("arrival_s")
    bounds_s = [(arrivals[50], arrivals[100]), (arrivals[150], arrivals[200]), (arrivals[250], np.inf)]
    gaps, weights = [], []
    for batch in run.steps.batches(("start_s", "steps", "gap_tokens", "gap0_s", "gap1_s", "gap2_s")):
        starts, steps = batch.floats("start_s"), batch.ints("steps")
        for at in range(batch.rows):
            if any(low <= starts[at] < high for low, high in bounds_s):
                offsets = np.arange(steps[at])
                gap0, gap1, gap2 = (batch.floats(name)[at] for name in ("gap0_s", "gap1_s", "gap2_s"))
                gaps += (gap0 + gap1 * offsets + gap2 * offsets**2).tolist()
                weights += [batch.ints("gap_tokens", null=0)[at]] * int(steps[at])
    found = compare_repeats([folders["live-1"], folders["live-2"]], folders["near"], block=50)
    assert found.figure("ITL mean").twin == pytest.approx(np.average(gaps, weights=weights))


@pytest.mark.parametrize(("twin", "block", "words"), [("half", 50, "part of a part"), ("near", 300, "no second block")])
def test_blocks_that_mean_nothing_are_refused(folders: dict[str, Path], twin: str, block: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compare_repeats([folders["live-1"], folders["live-2"]], folders[twin], block=block)


def test_the_share_on_the_same_worker_is_told_beside_that_of_the_live_runs(folders: dict[str, Path]) -> None:
    found = against(folders, "three")
    same = np.mean([row % 2 == row % 3 for row in range(300)])
    assert found.same_worker == (pytest.approx(same),) * 3
    assert found.live_same_worker == (1.0, 1.0)


def test_what_a_live_run_does_not_know_stays_open(folders: dict[str, Path]) -> None:
    preemptions = against(folders, "near").figure("preemptions")
    assert (preemptions.live, preemptions.error, preemptions.inside) == (None, None, None)
    assert preemptions.twin == 0


def test_odd_comparisons_are_noted(folders: dict[str, Path]) -> None:
    assert any("2 repeats say little about the live spread" in note for note in against(folders, "near", 2).notes)
    swapped = compare_repeats([folders["near"], folders["live-1"], folders["live-2"]], folders["live-3"])
    assert "simulated as well, and no measurement: near" in swapped.notes
    assert "live-3 was measured, not simulated: it is one more repeat" in swapped.notes


def test_a_partial_run_is_noted(folders: dict[str, Path], tmp_path: Path) -> None:
    partial = put(tmp_path / "live-4", 0.008)
    finish_run(partial, complete=False, cpu_s=1.0, wall_s=1.0, asked_requests=300, versions={})
    found = compare_repeats([folders["live-1"], partial], folders["near"])
    assert "live-4 is partial: it was stopped half-way" in found.notes


def test_other_requests_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"live-other: had other requests than .*live-1 \(300 and 300 rows"):
        compare_repeats([folders["live-1"], folders["other"]], folders["near"])


def moved(by: int) -> list[Ask]:
    """Request 50 comes so many places later, each at the time of the one whose place it takes."""
    order = [*range(50), *range(51, 51 + by), 50, *range(51 + by, 300)]
    return [replace(ASKS[row], arrival_s=ASKS[place].arrival_s) for place, row in enumerate(order)]


def test_requests_that_changed_places_are_compared_with_themselves(folders: dict[str, Path], tmp_path: Path) -> None:
    swapped = put(tmp_path / "live-swapped", SPEEDS["live-2"], moved(3))
    found = compare_repeats([folders["live-1"], swapped], folders["near"])
    assert (found.rows, found.figure("completed").high) == (300, 300)
    parted = compare_repeats([folders["live-1"], swapped], folders["near"], block=51)
    mine = {n: column(swapped, "ttft_s")[53 if n == 50 else n - 1 if 50 < n < 54 else n] for n in range(300)}
    rows = [n for n in range(300) if n // 51 % 2]
    own = np.mean([column(folders["live-1"], "ttft_s")[rows].mean(), np.mean([mine[n] for n in rows])])
    assert parted.figure("TTFT mean").live == pytest.approx(own)


def test_requests_in_quite_another_order_are_other_requests(folders: dict[str, Path], tmp_path: Path) -> None:
    far = put(tmp_path / "live-far", SPEEDS["live-2"], moved(40))
    with pytest.raises(ConfigError, match="had other requests"):
        compare_repeats([folders["live-1"], far], folders["near"])


def test_a_twin_that_measures_nothing_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    all_warm = put(tmp_path / "warm", 0.008, warmup=300)
    with pytest.raises(ConfigError, match=r"all of its 300 rows are warm-up; set trace\.warmup lower"):
        compare_repeats([folders["live-1"], folders["live-2"]], all_warm)


def test_json_and_markdown_say_the_same(folders: dict[str, Path]) -> None:
    found = against(folders, "near")
    plain = json.loads(found.to_json())
    by_name = {one["name"]: one for one in plain["figures"]}
    assert by_name["E2E mean"]["low"] == found.figure("E2E mean").low
    assert by_name["preemptions"]["live"] is None
    lines = fidelity_markdown(found).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:] if line.startswith("|")] == list(by_name)
    assert "* not modelled: the weather" in lines
