"""Many deployments and one pool of GPUs (Y1 to Y8), one leader, and that no bound is ever broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.planner.global_planner import (
    Answer,
    GlobalPlanner,
    GlobalSettings,
    Granted,
    ScaleRequest,
    Want,
    leader,
)


class Pools:
    """Deployments of one pool each, by name: workers they have."""

    def __init__(self, most: int | None, least: int | None = None, gpus: int = 1, **have: int) -> None:
        self.planner = GlobalPlanner(GlobalSettings(max_total=most, min_total=least))
        self.gpus, self.have = gpus, have
        for name, workers in have.items():
            self.planner.know(name, (Want(pool="d", workers=workers, gpus=gpus),))

    def ask(self, name: str, by: int, at_s: float = 0.0, rank: int = 0) -> Granted:
        wants = (Want(pool="d", workers=self.have[name] + by, gpus=self.gpus),)
        granted = self.planner.request(ScaleRequest(caller=name, wants=wants, rank=rank), at_s)
        for step in granted.steps:
            self.have[step.caller] = step.after
        return granted

    def wished(self, name: str, by: int, at_s: float, rank: int = 0) -> None:
        """A wish that was granted and then undone by somebody else: it is still remembered, and not so."""
        before = self.have[name]
        self.planner.remember(name, Want(pool="d", workers=before + by, gpus=self.gpus), rank, at_s)


def steps(granted: Granted) -> list[tuple[str, int]]:
    return [(step.caller, step.after - step.before) for step in granted.steps]


def test_y1_within_the_ceiling() -> None:
    granted = Pools(16, a=7, b=7).ask("a", 2)
    assert (granted.answer, granted.total) == (Answer.SUCCESS, 16)


def test_y2_at_the_ceiling_is_rejected_with_the_numbers_and_remembered() -> None:
    pools = Pools(16, a=8, b=8)
    granted = pools.ask("a", 1)
    assert granted.answer is Answer.REJECTED
    assert granted.reason == "16 GPUs are in use, +1 were asked for, and there are to be at most 16"
    assert steps(pools.ask("b", -1, 10.0)) == [("b", -1)]  # b may shrink for its own sake
    assert pools.ask("a", 1, 20.0).answer is Answer.SUCCESS


@pytest.mark.parametrize(("age_s", "answer"), [(100.0, Answer.SUCCESS), (400.0, Answer.REJECTED)])
def test_y3_y4_a_remembered_shrink_pays_for_growth_and_goes_first(age_s: float, answer: Answer) -> None:
    pools = Pools(16, a=8, b=8)
    pools.wished("b", -1, 0.0)
    granted = pools.ask("a", 1, age_s)
    assert granted.answer is answer
    if answer is Answer.SUCCESS:
        assert steps(granted) == [("b", -1), ("a", 1)]
        assert granted.total == 16


def test_y5_as_much_as_can_be_paid_for() -> None:
    pools = Pools(16, a=8, b=8)
    pools.wished("b", -2, 0.0)
    granted = pools.ask("a", 4, 10.0)
    assert steps(granted) == [("b", -2), ("a", 2)]
    assert granted.partial
    assert granted.total == 16


def test_y6_at_the_floor_a_shrink_is_paired_with_a_remembered_growth() -> None:
    pools = Pools(None, least=8, a=4, c=4)
    pools.wished("c", 1, 0.0)
    granted = pools.ask("a", -1, 10.0)
    assert steps(granted) == [("a", -1), ("c", 1)]
    assert granted.total == 8
    assert Pools(None, least=8, a=4, c=4).ask("a", -1).answer is Answer.REJECTED


def test_y7_the_floor_gives_way_by_one_worker() -> None:
    granted = Pools(12, least=8, gpus=2, a=2, b=2).ask("a", -1)
    assert (granted.answer, granted.total) == (Answer.SUCCESS, 6)


def test_y8_a_ceiling_of_nothing_rejects_all_growth() -> None:
    assert Pools(0, a=0).ask("a", 1).answer is Answer.REJECTED


def test_a_smaller_rank_and_an_older_wish_go_first() -> None:
    def after(*wishes: tuple[str, int, float]) -> list[tuple[str, int]]:
        pools = Pools(9, a=3, b=3, c=3)
        for name, rank, at_s in wishes:
            pools.wished(name, -1, at_s, rank)
        return steps(pools.ask("a", 1, 50.0))

    assert after(("b", 2, 0.0), ("c", 1, 10.0)) == [("c", -1), ("a", 1)]
    assert after(("b", 1, 20.0), ("c", 1, 10.0)) == [("c", -1), ("a", 1)]


def test_one_leads_and_the_other_says_so() -> None:
    two = [GlobalPlanner(GlobalSettings(max_total=4), leads=leads) for leads in (True, False)]
    request = ScaleRequest(caller="a", wants=(Want(pool="d", workers=1, gpus=1),))
    assert [one.request(request, 0.0).answer for one in two] == [Answer.SUCCESS, Answer.ERROR]
    assert [one.total for one in two] == [1, 0]
    assert leader({"b": 10.0, "a": 20.0, "c": 5.0}, 7.0) == "a"
    assert leader({"a": 1.0}, 7.0) is None


def test_bounds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="above max_total"):
        GlobalSettings(max_total=4, min_total=5)
    with pytest.raises(ConfigError, match="ttl_s"):
        GlobalSettings(max_total=4, ttl_s=0)


@given(
    most=st.integers(0, 20),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4), st.integers(0, 500)), max_size=20),
)
def test_the_ceiling_holds_after_every_step_and_nobody_gets_what_he_did_not_want(
    most: int, asked: list[tuple[str, int, int]]
) -> None:
    pools = Pools(most, gpus=2, a=0, b=0, c=0)
    at_s, wanted = 0.0, {"a": 0, "b": 0, "c": 0}
    for name, by, wait_s in asked:
        at_s += wait_s
        by = max(by, -pools.have[name])
        before = dict(pools.have)
        wanted[name] = before[name] + by
        granted = pools.ask(name, by, at_s)
        used = sum(before.values()) * 2
        for step in granted.steps:
            used += step.change
            assert used <= most
            assert min(before[step.caller], wanted[step.caller]) <= step.after
            assert step.after <= max(before[step.caller], wanted[step.caller])
        assert used == granted.total == pools.planner.total
