"""Zero traffic is not no data (Z1 to Z8, but for waking: see the scenarios)."""

from __future__ import annotations

import pytest

from policies.cluster.ticks import PlanReason
from policies.cluster.traffic import TrafficWindow, WindowKind
from policies.planner.forecast.constant import Constant
from policies.planner.forecast.guarded import Guarded
from policies.planner.windows import Reading, Traffic

STEP = 180.0
SEEN, NONE, PART = WindowKind.OBSERVED, WindowKind.NO_DATA, WindowKind.PARTIAL


class Told(Guarded):
    """Remembers what it was fed."""

    def __init__(self) -> None:
        super().__init__(Constant())
        self.fed: list[float] = []

    def observe(self, y: float) -> bool:
        self.fed.append(y)
        return super().observe(y)


class Watch:
    """Feeds windows of one interval, one after the other."""

    def __init__(self, hold_s: float = 600.0) -> None:
        self.num_req = Told()
        self.isl = Told()
        self.traffic = Traffic(STEP, hold_s, self.num_req, self.isl, Told(), most_accept=3.0)
        self.now_s = 0.0
        self.readings: list[Reading] = []

    def see(self, kind: WindowKind = SEEN, num_req: float = 0.0, **rest: float) -> Watch:
        t0_s, self.now_s = self.now_s, self.now_s + STEP
        window = TrafficWindow(at_s=self.now_s, t0_s=t0_s, t1_s=self.now_s, kind=kind, num_req=num_req, **rest)  # type: ignore[arg-type]
        self.readings.append(self.traffic.take(window))
        return self

    @property
    def last(self) -> Reading:
        return self.readings[-1]


def test_z1_none_after_some_is_zero() -> None:
    watch = Watch().see(num_req=100).see(num_req=0)
    assert watch.num_req.fed == [100, 0]
    assert watch.last.hold is None
    assert watch.last.may_shrink


def test_z2_z3_who_has_never_seen_traffic_waits_for_it() -> None:
    watch = Watch()
    for _ in range(3):  # 180, 360, 540 s
        assert watch.see().last.hold is PlanReason.AWAITING_FIRST_TRAFFIC
    assert watch.num_req.fed == []
    assert watch.see().last.hold is None  # 720 s
    assert watch.num_req.fed == [0]


def test_z4_no_data_feeds_nothing_and_is_noticed() -> None:
    watch = Watch().see(num_req=100).see(NONE)
    assert watch.num_req.fed == [100]
    assert watch.last.hold is PlanReason.NO_DATA
    assert not watch.last.may_shrink
    assert watch.traffic.silent_s(watch.now_s) == STEP
    assert watch.traffic.no_data_windows == 1


def test_z5_z8_a_gap_is_neither_filled_nor_zero() -> None:
    watch = Watch().see(num_req=100).see(num_req=100)
    for _ in range(3):
        watch.see(NONE)
    watch.see(num_req=100)
    assert watch.num_req.fed == [100, 100, 100]
    assert Watch().see(NONE).see(num_req=90).num_req.fed == [90]


def test_z6_what_was_half_seen_is_scaled_and_never_shrinks() -> None:
    watch = Watch().see(PART, 54, coverage=0.6)
    assert watch.num_req.fed == [pytest.approx(90)]
    assert watch.last.flags == ("partial",)
    assert watch.last.hold is None
    assert not watch.last.may_shrink


@pytest.mark.parametrize(
    "window",
    [
        {"num_req": float("nan")},
        {"num_req": -3.0},
        {"kind": PART, "num_req": 5.0, "coverage": 0.0},
        {"num_req": 5.0, "coverage": float("nan")},
    ],
)
def test_figures_that_cannot_be_are_no_data(window: dict[str, float]) -> None:
    watch = Watch().see(**window)  # type: ignore[arg-type]
    assert watch.last.hold is PlanReason.NO_DATA
    assert watch.num_req.fed == []


def test_a_source_that_falls_silent_is_no_data() -> None:
    watch = Watch().see(num_req=100)
    assert watch.traffic.at(watch.now_s + 1.4 * STEP).hold is None
    assert watch.traffic.at(watch.now_s + 1.6 * STEP).hold is PlanReason.NO_DATA


def test_rates_are_the_last_ones_and_stay_in_their_bounds() -> None:
    watch = Watch().see(num_req=1, kv_hit_rate=0.99, accept_length=9.0).see(num_req=1)
    assert (watch.traffic.hit_rate, watch.traffic.accept_length) == (0.95, 3.0)
    watch.see(num_req=1, kv_hit_rate=-1.0, accept_length=0.2)
    assert (watch.traffic.hit_rate, watch.traffic.accept_length) == (0.0, 1.0)


def test_lengths_are_those_of_windows_with_requests() -> None:
    watch = Watch().see(num_req=5, isl=3000, osl=150).see(num_req=0, isl=7, osl=7)
    assert watch.isl.fed == [3000]
    work = watch.traffic.work()
    assert work is not None
    assert (work.isl, work.osl) == (3000, 150)
    assert Watch().see().traffic.work() is None


def test_a_shorter_window_counts_for_a_whole_interval_and_a_reset_is_flagged() -> None:
    watch = Watch()
    window = TrafficWindow(at_s=90, t0_s=0, t1_s=90, kind=SEEN, num_req=45, counter_reset=True)
    reading = watch.traffic.take(window)
    assert reading.fed == 90
    assert reading.flags == ("counter_reset",)
