"""The ledger of split prefills, case by case."""

from __future__ import annotations

import pytest

from executors.leases import LeaseKey, LeaseLedger, LeaseState, LeaseTerms, Refusal
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import ConfigError, InvariantError

P, D, E = WorkerId(0), WorkerId(1), WorkerId(2)
TERMS = LeaseTerms.of(30.0, 2.0)
KEY = LeaseKey(P, 7, "cmpl-x-0")


@pytest.fixture
def ledger() -> LeaseLedger:
    made = LeaseLedger()
    made.worker_up(P, 7)
    made.grant(KEY, RequestId("x"), 100.0, TERMS)
    return made


def test_the_margin_is_a_fifth_of_the_lease_or_a_health_period() -> None:
    assert LeaseTerms.of(30.0, 2.0).margin_s == 6.0
    assert LeaseTerms.of(30.0, 9.0).margin_s == 9.0
    assert LeaseTerms.of(30.0, 2.0, 12.0).margin_s == 12.0


@pytest.mark.parametrize(("lease_s", "period_s", "margin_s"), [(10.0, 10.0, None), (10.0, 1.0, 1.0), (2.0, 5.0, None)])
def test_terms_that_leave_nothing_or_too_little_are_refused(
    lease_s: float, period_s: float, margin_s: float | None
) -> None:
    with pytest.raises(ConfigError, match="margin"):
        LeaseTerms.of(lease_s, period_s, margin_s)


def test_parameters_are_sent_until_they_are_due_and_not_at_that_time(ledger: LeaseLedger) -> None:
    assert ledger.next_due_s() == 124.0
    assert ledger.send(KEY, D, 123.999) is None
    other = LeaseKey(P, 7, "cmpl-y-0")
    ledger.grant(other, RequestId("y"), 100.0, TERMS)
    assert ledger.send(other, D, 124.0) is Refusal.PAST_DUE
    assert ledger.send(other, D, 101.0) is Refusal.OVER, "expired stays expired"


def test_parameters_are_sent_once(ledger: LeaseLedger) -> None:
    assert ledger.send(KEY, D, 101.0) is None
    assert ledger.send(KEY, E, 101.0) is Refusal.SENT_BEFORE
    assert ledger.fetched(KEY)
    assert ledger.send(KEY, D, 102.0) is Refusal.SENT_BEFORE
    assert ledger.counts()["refused"] == 2


def test_a_restarted_worker_keeps_no_lease(ledger: LeaseLedger) -> None:
    (void,) = ledger.worker_up(P, 8)
    assert (void.key, void.state) == (KEY, LeaseState.VOID)
    assert ledger.send(KEY, D, 101.0) is Refusal.OTHER_INCARNATION


def test_an_answer_that_comes_after_the_loss_of_its_worker_is_void() -> None:
    ledger = LeaseLedger()
    ledger.worker_up(P, 7)
    ledger.worker_lost(P)
    assert ledger.grant(KEY, RequestId("x"), 100.0, TERMS).state is LeaseState.VOID
    assert ledger.send(KEY, D, 101.0) is Refusal.OTHER_INCARNATION


def test_a_lost_decode_worker_gives_back_what_it_had_not_fetched(ledger: LeaseLedger) -> None:
    other = LeaseKey(P, 7, "cmpl-y-0")
    ledger.grant(other, RequestId("y"), 100.0, TERMS)
    ledger.send(KEY, D, 101.0)
    ledger.send(other, D, 101.0)
    ledger.fetched(other)
    assert [(lease.key, lease.state) for lease in ledger.worker_lost(D)] == [(KEY, LeaseState.GIVEN_BACK)]


def test_a_late_fetch_makes_everything_suspect_that_was_taken_from_that_worker(ledger: LeaseLedger) -> None:
    held = LeaseKey(P, 7, "cmpl-y-0")
    ledger.grant(held, RequestId("y"), 100.0, TERMS)
    ledger.send(KEY, D, 101.0)
    assert [lease.request_id for lease in ledger.suspects(P, 7)] == ["x"]
    assert ledger.suspects(P, 8) == []
    assert ledger.counts()["suspect"] == 1


def test_entries_that_are_over_are_forgotten_at_their_due_time_and_still_counted(ledger: LeaseLedger) -> None:
    ledger.given_back(KEY)
    with pytest.raises(InvariantError, match="never be used twice"):
        ledger.grant(KEY, RequestId("x"), 100.0, TERMS)
    ledger.expire(124.0)
    assert ledger.send(KEY, D, 124.0) is Refusal.UNKNOWN
    assert ledger.counts() | {"refused": 0} == {
        "held": 0, "sent": 0, "fetched": 0, "given_back": 1, "expired": 0, "void": 0,
        "granted": 1, "ever_sent": 0, "refused": 0, "suspect": 0,
    }  # fmt: skip
