"""Whatever happens: no order contradicts another, the budget holds, floors come back, and the journal replays."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plant import RPS, Plant, changed, planned

from policies.cluster.events import WorkerLost
from policies.cluster.ids import Role
from policies.cluster.scaling import GpuBudgetChanged
from policies.cluster.traffic import TrafficWindow, WindowKind

P, D = Role.PREFILL, Role.DECODE
BUDGET = 9
STEP_S = 60.0

DEEDS = st.tuples(
    st.sampled_from(["load", "load", "load", "lose", "drain", "add", "gap", "stuck", "fails", "budget", "quiet"]),
    st.integers(0, 9),
)


def play(plant: Plant, deeds: list[tuple[str, int]], load: list[float], gaps: set[int]) -> None:
    """One deed a minute; the budget is kept at every one, as far as it is the planner's to keep."""
    for minute, (deed, n) in enumerate(deeds):
        plant.run(minute * STEP_S)
        live = plant.controller.view.live
        if deed == "load":
            load[0] = n / 2
        elif deed == "lose" and len(live) > 2:
            lost = live[n % len(live)].worker_id
            plant._gone(lost)
            plant._leaves.pop(lost, None)
            plant.post(WorkerLost(at_s=plant.now_s, worker_id=lost, reason="crashed"))
        elif deed == "drain" and len(live) > 2:
            plant.drain(live[n % len(live)].worker_id)
        elif deed == "add" and len(plant.controller.view.workers) + len(plant.controller.view.starting) < BUDGET:
            plant.add_by_hand(P if n % 2 else D)
        elif deed == "gap":
            gaps.add(minute)
        elif deed in ("stuck", "fails"):
            plant.start = lambda _, how={"stuck": "never", "fails": "fails"}[deed]: how
        elif deed == "budget":
            plant.post(GpuBudgetChanged(at_s=plant.now_s, max_gpus=BUDGET - n % 3))
        elif deed == "quiet":
            plant.start = lambda _: "ok"
        held = len(plant.controller.view.workers) + len(plant.controller.view.starting)
        assert held <= BUDGET


@given(deeds=st.lists(DEEDS, min_size=5, max_size=40), load_scaling=st.booleans())
@settings(max_examples=8)
def test_whatever_happens(deeds: list[tuple[str, int]], load_scaling: bool) -> None:
    load, gaps = [1.0], set[int]()

    def window(i: int, w: TrafficWindow) -> TrafficWindow | None:
        return None if i in gaps and i % 2 else changed(w, WindowKind.NO_DATA) if i in gaps else w

    made = planned(
        P, D, load_scaling=load_scaling, max_gpu_budget=BUDGET, throughput_adjustment_interval_s=STEP_S,
        load_adjustment_interval_s=15.0, startup_s=90.0, scale_timeout_s=300.0, hold_s=120.0,
    )  # fmt: skip
    plant = Plant(made, lambda _: load[0] * RPS[D], {P: 2, D: 2}, window=window, journaled=True)
    play(plant, deeds, load, gaps)
    plant.start = lambda _: "ok"
    plant.post(GpuBudgetChanged(at_s=plant.now_s, max_gpus=BUDGET))
    load[0] = 1.5
    plant.run(plant.now_s + 5_000)
    assert 2 <= plant.n(P) <= 3  # 1.5 decode workers' worth is 1.2 of prefill
    assert 2 <= plant.n(D) <= 3
    plant.check_replay()
