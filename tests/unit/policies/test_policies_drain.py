"""The phases of a drain, told without a world."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.resilience.drain import Drain, DrainRules, Phase, grace_too_short

RULES = DrainRules(grace_s=5.0, timeout_s=900.0)


def test_three_phases() -> None:
    drain = Drain.of(RULES, 100.0)
    phases = {at_s: drain.phase(at_s) for at_s in (100.0, 104.999, 105.0, 1004.999, 1005.0)}
    assert list(phases.values()) == [
        Phase.LEAVING,
        Phase.LEAVING,
        Phase.DRAINING,
        Phase.DRAINING,
        Phase.STOPPING,
    ]
    assert [drain.accepts(at_s) for at_s in (104.0, 106.0)] == [True, False]


def test_it_goes_when_it_is_idle_but_not_in_its_grace() -> None:
    drain = Drain.of(RULES, 0.0)
    assert not drain.may_go(4.0, idle=True)
    assert drain.may_go(5.0, idle=True)
    assert not drain.may_go(904.0, idle=False)
    assert drain.may_go(905.0, idle=False)


@pytest.mark.parametrize("at_s", [2.0, 300.0])
def test_a_second_signal_ends_both(at_s: float) -> None:
    drain = Drain.of(RULES, 0.0)
    drain.hurry(at_s)
    assert drain.phase(at_s) is Phase.STOPPING
    assert not drain.accepts(at_s)
    drain.hurry(at_s + 1)
    assert drain.cut_s == at_s, "a third changes nothing"


def test_a_drain_without_a_bound_is_cut_by_a_second_signal_alone() -> None:
    drain = Drain.of(DrainRules(grace_s=0.0, timeout_s=None), 0.0)
    assert not drain.may_go(1e9, idle=False)
    drain.hurry(10.0)
    assert drain.may_go(10.0, idle=False)


def test_who_kills_the_process_must_wait_longer() -> None:
    assert grace_too_short(RULES, 906.0) is None
    assert "killed after 30 s, grace and drain take up to 905 s" in str(grace_too_short(RULES, 30.0))
    assert grace_too_short(RULES, 905.0) is not None, "the same time is too short"
    assert "no bound" in str(grace_too_short(DrainRules(grace_s=5.0, timeout_s=None), 30.0))


def test_rules_are_checked() -> None:
    with pytest.raises(ConfigError, match="grace_s is -1"):
        DrainRules(grace_s=-1.0, timeout_s=None)
    with pytest.raises(ConfigError, match="drain_timeout_s is -2"):
        DrainRules(grace_s=0.0, timeout_s=-2.0)
