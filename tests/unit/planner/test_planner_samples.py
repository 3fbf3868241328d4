"""Which forward passes are kept, which teach, and who counts as not heard of."""

from __future__ import annotations

import pytest
from builders import worker

from policies.cluster.ids import Role, WorkerId
from policies.cluster.state import Cluster
from policies.cluster.traffic import ForwardPass, PassLoad
from policies.planner.samples import Passes
from policies.planner.step_model import StepCoefficients, StepModel

COST = StepCoefficients(base_s=0.010, per_x_s=20e-6)


class Bench:
    """Prefill workers 0 and 1, up since 0 s."""

    def __init__(self, warmup_s: float = 30.0, warmup_passes: int = 20) -> None:
        self.model = StepModel(Role.PREFILL)
        self.passes = Passes({Role.PREFILL: self.model}, stale_s=10.0, warmup_s=warmup_s, warmup_passes=warmup_passes)
        self.cluster = Cluster()
        for worker_id in (0, 1):
            up = worker(worker_id, at_s=0.0, role=Role.PREFILL)
            self.cluster.fold(up)
            self.passes.up(up)
        self.counter = 0

    def tell(
        self, at_s: float, worker_id: int = 0, tokens: float = 1000, slow: float = 1.0, **rest: object
    ) -> str | None:
        self.counter += 1
        given: dict[str, object] = {
            "worker_id": WorkerId(worker_id),
            "counter": self.counter,
            "wall_time_s": slow * COST.seconds(tokens),
            "scheduled": PassLoad(num_prefill_requests=1, sum_prefill_tokens=tokens),
            **rest,
        }
        return self.passes.take(ForwardPass(at_s=at_s, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("no_worker", {"worker_id": None}),
        ("unreadable", {"unreadable": "queued.sum_prefill_tokens"}),
        ("not_finite", {"wall_time_s": float("nan")}),
        ("not_finite", {"queued": PassLoad(sum_prefill_tokens=float("inf"))}),
        ("negative", {"queued": PassLoad(num_decode_requests=-1)}),
        ("unknown_worker", {"worker_id": WorkerId(7)}),
        ("out_of_order", {"counter": 0}),
    ],
)
def test_what_cannot_be_is_dropped_and_counted_by_reason(why: str, fields: dict[str, object]) -> None:
    bench = Bench()
    assert bench.tell(1.0) is None
    assert bench.tell(2.0, **fields) == why
    assert bench.passes.dropped == {why: 1}


def test_a_heart_beat_says_what_waits_and_teaches_nothing() -> None:
    bench = Bench(0.0, 0)
    bench.tell(1.0, wall_time_s=0.0, queued=PassLoad(sum_prefill_tokens=500))
    heard = bench.passes.heard(bench.cluster, Role.PREFILL, 1.0)
    assert [engine.queued_prefill_tokens for engine in heard.engines] == [500]
    assert heard.stale == (1,)
    assert bench.model.samples == ()


def test_who_is_not_heard_of_for_two_intervals_is_left_out() -> None:
    bench = Bench()
    bench.tell(1.0, 0)
    bench.tell(8.0, 1)
    assert [e.worker_id for e in bench.passes.heard(bench.cluster, Role.PREFILL, 11.0).engines] == [0, 1]
    heard = bench.passes.heard(bench.cluster, Role.PREFILL, 11.5)
    assert ([e.worker_id for e in heard.engines], heard.stale) == ([1], (0,))


def test_a_worker_with_one_silent_rank_is_not_heard_of() -> None:
    bench = Bench()
    bench.tell(1.0, 0, dp_rank=0)
    bench.tell(9.0, 0, dp_rank=1)
    assert bench.passes.heard(bench.cluster, Role.PREFILL, 15.0).stale == (0, 1)


def test_young_workers_teach_nothing() -> None:
    bench = Bench()
    for n in range(40):
        bench.tell(n * 0.5, tokens=100 + n)  # up to 19.5 s: old enough in passes, not in time
    assert bench.model.samples == ()
    bench.tell(31.0, 1)  # old enough in time, not in passes
    assert bench.model.samples == ()
    bench.tell(31.0, 0)
    assert len(bench.model.samples) == 1


def test_cold_workers_do_not_poison_the_model() -> None:
    bench = Bench()
    for n in range(100):
        bench.tell(31.0 + n * 0.1, 0, tokens=100 + 37 * (n % 50))
    before = bench.model.coefficients
    assert before is not None
    up = worker(2, at_s=50.0, role=Role.PREFILL)
    bench.passes.up(up)
    for n in range(300):  # 5 times slow for 30 s
        bench.tell(50.0 + n * 0.1, 2, tokens=100 + 41 * (n % 50), slow=5.0)
    for n in range(50):
        bench.tell(80.0 + n * 0.1, 2, tokens=100 + 41 * (n % 50))
    after = bench.model.coefficients
    assert after is not None
    assert after.base_s == pytest.approx(before.base_s, rel=0.05)
    assert after.per_x_s == pytest.approx(before.per_x_s, rel=0.05)


def test_a_worker_that_comes_back_is_young_again_and_counts_anew() -> None:
    bench = Bench(warmup_passes=0)
    bench.tell(100.0)
    assert len(bench.model.samples) == 1
    bench.passes.up(worker(0, at_s=200.0, epoch=1, role=Role.PREFILL))
    assert bench.tell(201.0, counter=1) is None
    assert len(bench.model.samples) == 1
