"""Files are whole or not there, and Ctrl-C waits where half of something would be left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from builders_reports import step_row

from reports.files import held_back, whole_file
from reports.record import WINDOW_ROWS, RunRecord, RunWriter, StepRow


@pytest.fixture(autouse=True)
def usual_ctrl_c() -> Iterator[None]:
    """Python's own handling, whatever the test runner has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    with whole_file(path) as out:
        out.write("new")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new"


def test_a_file_that_is_given_up_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    with suppress(KeyboardInterrupt), whole_file(path) as out:
        out.write("half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def pressed(times: int, done: list[int], error: Exception | None = None) -> None:
    """Press Ctrl-C so often while it is held back; `done` counts how far the block gets."""
    with held_back():
        for n in range(times):
            signal.raise_signal(signal.SIGINT)
            done.append(n)
        if error is not None:
            raise error


@pytest.mark.parametrize(("times", "reached"), [(1, [0]), (2, [0])])
def test_the_first_waits_for_the_end_of_the_block_and_the_second_does_not(times: int, reached: list[int]) -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        pressed(times, done)
    assert done == reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="of the block"):
        pressed(1, [], ValueError("of the block"))


def test_it_is_passed_on_to_whoever_handles_it() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _frame: seen.append(signum))
    with held_back():
        signal.raise_signal(signal.SIGINT)
        assert seen == []
    assert seen == [signal.SIGINT]


def test_where_it_is_ignored_it_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_a_thread_nothing_changes() -> None:
    inside = []

    def work() -> None:
        with held_back():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [signal.default_int_handler]


class PressedWhenCleared(list[StepRow]):
    """Steps at whose clearing, which follows their writing, somebody presses Ctrl-C."""

    def clear(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().clear()


def test_rows_that_are_being_written_when_it_comes_are_written_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.steps = PressedWhenCleared(step_row(0, n * 0.25, n * 0.25 + 0.25) for n in range(WINDOW_ROWS))
    with pytest.raises(KeyboardInterrupt):
        writer.spill()
    left, writer.steps = list(writer.steps), []
    writer.steps.extend(left)
    writer.close()
    starts = RunRecord(tmp_path).steps.columns().floats("start_s")
    assert np.array_equal(starts, np.arange(WINDOW_ROWS) * 0.25)
