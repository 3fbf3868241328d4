"""Whether an interrupted request goes on elsewhere, what goes with it, and what is counted (resilience.md §2)."""

from __future__ import annotations

import pytest
from builders import worker

from policies.cluster.actions import Action, Dispatch, Fail, Migrate, SetTimer
from policies.cluster.controller import Controller
from policies.cluster.events import (
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    TimerFired,
)
from policies.cluster.ids import LossCause, RequestId, Trait, WorkerId
from policies.errors import InvariantError
from policies.resilience.backoff import Backoff
from policies.resilience.carry import Stream, Usage, carry, stop_tail
from policies.resilience.migration import ELIGIBLE, Migration, MigrationSettings

R = RequestId("r")


class Life:
    """One request of 100 tokens under a migration policy; `interrupt` returns what is ordered for it."""

    def __init__(self, *, traits: tuple[Trait, ...] = (), **settings: object) -> None:
        usual = {"limit": 3, "max_seq_len": None} | settings
        self.migration = Migration(MigrationSettings(**usual))  # type: ignore[arg-type]
        self._to = Sender()
        self._controller = Controller([self._to, self.migration])
        for n in range(6):
            self.post(worker(n))
        self.post(RequestArrived(at_s=0.0, request_id=R, isl=100, traits=traits))
        self.traits = traits

    def post(self, event: Event) -> list[Action]:
        return list(self._controller.step(event))

    def first(self, at_s: float) -> None:
        self.post(FirstToken(at_s=at_s, request_id=R, worker_id=self._to.last))

    def migrated(self, action: Migrate, at_s: float, emitted: int) -> None:
        """The world carries the order out."""
        self.post(
            RequestMigrated(
                at_s=at_s,
                request_id=R,
                isl=100 + emitted,
                attempt=action.attempt,
                emitted_tokens=emitted,
                excluded=action.excluded,
                traits=self.traits,
            )
        )

    def interrupt(self, at_s: float, emitted: int, cause: LossCause = LossCause.DISCONNECTED) -> Action:
        event = RequestInterrupted(
            at_s=at_s, request_id=R, worker_id=self._to.last, emitted_tokens=emitted, reason="gone", cause=cause
        )
        (action,) = self.post(event)
        if isinstance(action, Migrate):
            self.migrated(action, at_s, emitted)
        return action

    def counts(self) -> dict[str, int]:
        return self.migration.counters()


class Sender:
    """Sends each request to the first live worker that it may go to."""

    subscribes = frozenset({RequestArrived, RequestMigrated})
    last = WorkerId(0)

    def decide(self, event: Event, view: object) -> list[Action]:
        assert isinstance(event, RequestArrived)
        excluded = event.excluded if isinstance(event, RequestMigrated) else ()
        live = [w.worker_id for w in view.live if w.worker_id not in excluded]  # type: ignore[attr-defined]
        self.last = live[0]
        return [Dispatch(request_id=event.request_id, worker_id=live[0], rule="first", reason="first")]


# ---------------------------------------------------------------- M1, M2


@pytest.mark.parametrize("cause", list(LossCause))
def test_m1_what_another_worker_may_do_better_is_sent_again(cause: LossCause) -> None:
    action = Life().interrupt(1.0, 0, cause)
    if cause in ELIGIBLE:
        assert isinstance(action, Migrate)
    else:
        assert isinstance(action, Fail)
        assert action.code == cause.value == "engine_error"


@pytest.mark.parametrize("trait", [Trait.GUIDED, Trait.MANY, Trait.LOGPROBS, Trait.TOOLS])
def test_m2_a13_what_a_continuation_cannot_keep_is_not_continued(trait: Trait) -> None:
    life = Life(traits=(trait,))
    life.first(0.1)
    action = life.interrupt(0.165, 7)
    assert isinstance(action, Fail)
    assert f"{action.code}: {action.reason}".startswith(f"not_migratable: {trait.value}; worker 0: gone, 7 tokens")
    assert life.counts() == {"migration_refused_not_migratable": 1}


def test_m2_before_its_first_token_nothing_is_lost() -> None:
    assert isinstance(Life(traits=(Trait.GUIDED,)).interrupt(0.055, 0), Migrate)


def test_m2_an_engine_that_carries_it_over_may_continue() -> None:
    life = Life(traits=(Trait.LOGPROBS,), carried=frozenset({Trait.LOGPROBS}))
    assert isinstance(life.interrupt(0.165, 7), Migrate)


def test_m2_another_answer_than_it_would_have_been_is_reported() -> None:
    life = Life(traits=(Trait.SAMPLED,))
    assert isinstance(life.interrupt(0.165, 7), Migrate)
    assert life.counts()["migrations_sampled"] == 1


def test_m2_length_is_the_clients_prompt_and_all_it_got() -> None:
    for longest, kind in ((106, Fail), (107, Migrate)):
        assert isinstance(Life(max_seq_len=longest).interrupt(0.165, 7), kind), "A12: strictly more disables it"


def test_m3_workers_that_failed_it_are_left_out_until_they_are_others() -> None:
    life = Life()
    first = life.interrupt(0.1, 0)
    assert isinstance(first, Migrate)
    assert first.excluded == (WorkerId(0),)
    second = life.interrupt(0.2, 0)
    assert isinstance(second, Migrate)
    assert second.excluded == (WorkerId(0), WorkerId(1))
    life.post(worker(0, at_s=0.25, epoch=1))
    third = life.interrupt(0.3, 0)
    assert isinstance(third, Migrate)
    assert third.excluded == (WorkerId(1), WorkerId(2)), "W0 is another worker now"
    assert isinstance(life.interrupt(0.4, 0), Fail), "the limit is 3"


# ---------------------------------------------------------------- M4, M5, M6


def test_m4_what_goes_to_the_next_worker() -> None:
    carried = carry(100, 50, 7)
    assert (carried.isl, carried.max_tokens, carried.seed_offset, carried.history_tokens) == (107, 43, 7, 7)
    assert carry(100, None, 7).max_tokens is None
    assert carry(100, 50, 12).isl == 112, "from the client's own prompt, not from what was sent last"


@pytest.mark.parametrize(
    ("text", "tail"),
    [("the end", ""), ("the EN", "EN"), ("the END", ""), ("a###E", "E"), ("x#", "#"), ("x##", "##"), ("", "")],
)
def test_m4_a_stop_string_may_lie_across_the_join(text: str, tail: str) -> None:
    assert stop_tail(text, ["END", "###"]) == tail


def test_m5_m6_one_stream_in_order_nothing_twice_and_one_account() -> None:
    stream = Stream(prompt_tokens=100)
    assert stream.take(0, 0, 7) == 7
    stream.begin(1)
    assert stream.take(0, 7, 3) == 0, "the dead attempt speaks late"
    assert stream.take(1, 0, 5) == 5
    assert stream.take(1, 3, 4) == 2, "two of them have come already"
    assert stream.late_tokens == 5
    assert stream.usage == Usage(prompt_tokens=100, completion_tokens=14)
    assert stream.usage.total_tokens == 114
    with pytest.raises(InvariantError, match="leaves a hole"):
        stream.take(1, 9, 1)
    with pytest.raises(InvariantError, match="attempts only go up"):
        stream.begin(1)


# ---------------------------------------------------------------- M9


def _end(life: Life, kind: type[Event]) -> dict[str, int]:
    more = {RequestFinished: {"worker_id": WorkerId(1), "output_tokens": 9}, RequestFailed: {"reason": "x"}}.get(
        kind, {}
    )
    life.post(kind(at_s=9.0, request_id=R, **more))  # type: ignore[call-arg]
    return {name: count for name, count in life.counts().items() if name.count("_") > 2}


@pytest.mark.parametrize(("emitted", "kind"), [(0, "new_request"), (7, "ongoing_request")])
@pytest.mark.parametrize(
    ("ending", "outcome"), [(RequestFinished, "success"), (RequestFailed, "failure"), (RequestCancelled, "cancelled")]
)
def test_m9_migrations_are_counted_by_type_and_outcome(
    emitted: int, kind: str, ending: type[Event], outcome: str
) -> None:
    life = Life()
    life.interrupt(0.165, emitted)
    assert _end(life, ending) == {f"migrations_{kind}_{outcome}": 1}


def test_m9_an_attempt_that_is_interrupted_too_has_failed() -> None:
    life = Life()
    life.interrupt(0.165, 7)
    life.interrupt(0.3, 10)
    assert _end(life, RequestFinished) == {
        "migrations_ongoing_request_failure": 1,
        "migrations_ongoing_request_success": 1,
    }


def test_m9_how_long_it_took_until_it_went_on() -> None:
    life = Life()
    life.interrupt(0.165, 7)
    life.post(PrefillDone(at_s=0.272, request_id=R, worker_id=WorkerId(1)))
    life.interrupt(0.3, 10)
    life.post(PrefillDone(at_s=0.41, request_id=R, worker_id=WorkerId(2)))
    took = life.migration.took
    assert (took.count, took.sum_s, took.max_s) == (2, pytest.approx(0.217), pytest.approx(0.11))


# ---------------------------------------------------------------- waiting before another try

WAITS = Backoff(seed=3)


def _fired(life: Life, order: SetTimer) -> Migrate:
    """The time has come that a try waited for."""
    (action,) = life.post(TimerFired(at_s=order.due_s, name=order.name))
    assert isinstance(action, Migrate)
    life.migrated(action, order.due_s, 0)
    return action


def test_tries_in_a_row_wait_longer_each_time() -> None:
    """At once, then 50 ms, 200 ms and 1 s later, a fifth more or less."""
    life = Life(limit=9, backoff=WAITS)
    assert isinstance(life.interrupt(1.0, 0), Migrate)
    for tries, at_s in ((2, 2.0), (3, 3.0), (4, 5.0), (5, 7.0)):
        order = life.interrupt(at_s, 0)
        assert isinstance(order, SetTimer)
        assert order.due_s == at_s + WAITS.wait_s("retry r", tries)
        assert _fired(life, order).attempt == tries
    assert life.migration.counters()["migrations_waited"] == 4


def test_a_sign_of_life_between_makes_it_the_first_try_again() -> None:
    life = Life(limit=9, backoff=WAITS)
    life.interrupt(1.0, 0)
    life.first(1.5)
    assert isinstance(life.interrupt(2.0, 1), Migrate)
    assert isinstance(life.interrupt(3.0, 8), Migrate), "it had seven tokens more"
    assert isinstance(life.interrupt(4.0, 8), SetTimer)


def test_who_leaves_while_it_waits_is_not_sent_again() -> None:
    life = Life(limit=9, backoff=WAITS)
    life.interrupt(1.0, 0)
    order = life.interrupt(2.0, 0)
    assert isinstance(order, SetTimer)
    life.post(RequestCancelled(at_s=2.01, request_id=R))
    assert life.post(TimerFired(at_s=order.due_s, name=order.name)) == []
