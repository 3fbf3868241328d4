"""Gaps in a rank's events: examples G1 to G8, time-outs and back-off, what is asked for, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import worker

from policies.cluster.actions import Action, RequestIndexDump, RequestIndexReplay, SetTimer
from policies.cluster.events import Event, TimerFired, WorkerLost
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.kv_events import (
    DumpEntry,
    IndexDump,
    IndexRecoveryFailed,
    IndexReplay,
    KvEvent,
    KvRemoved,
    KvStored,
)
from policies.errors import ConfigError, InvariantError
from policies.router.chains import feed as feed_module
from policies.router.chains.feed import FeedMode
from policies.router.chains.live import LiveIndex

W0 = RankId(WorkerId(0), 0)
LIVE, RECOVERING, DEGRADED = FeedMode


def stored(number: int, epoch: int = 0, worker_id: int = 0, dp_rank: int = 0) -> KvStored:
    """Event n stores block n at the start of prompts, with local hash n: what was applied can be asked for."""
    return KvStored(
        at_s=0.0,
        worker_id=WorkerId(worker_id),
        dp_rank=dp_rank,
        epoch=epoch,
        event_id=number,
        exts=(BlockHash(number),),
        local_hashes=(BlockHash(number),),
    )


def entry(*numbers: int) -> tuple[DumpEntry, ...]:
    return tuple(DumpEntry(parent_ext=None, exts=(BlockHash(n),), local_hashes=(BlockHash(n),)) for n in numbers)


class Fed:
    """A live index of one worker that is up; answers are stamped with the number of the last request."""

    def __init__(self, **changes: object) -> None:
        self.live = LiveIndex(64)
        self.invariants = Invariants()
        self.now_s = 0.0
        self.asked: list[Action] = []
        self.timers: dict[str, float] = {}
        self.post(worker(0, **changes))

    def post(self, event: Event) -> list[Action]:
        """One event, now; the requests that it led to."""
        event = replace(event, at_s=self.now_s)
        actions = self.live.on(event)
        self.invariants.observe(event, actions)
        requests = [action for action in actions if not isinstance(action, SetTimer)]
        self.timers |= {action.name: action.due_s for action in actions if isinstance(action, SetTimer)}
        self.asked += requests
        return requests

    @property
    def common(self) -> dict:
        last = self.asked[-1]
        assert isinstance(last, RequestIndexDump | RequestIndexReplay)
        return {
            "at_s": self.now_s,
            "worker_id": last.worker_id,
            "dp_rank": last.dp_rank,
            "epoch": last.epoch,
            "ask": last.ask,
        }

    def dump(self, last_id: int | None, *numbers: int) -> list[Action]:
        return self.post(IndexDump(**self.common, last_id=last_id, entries=entry(*numbers)))

    def replay(self, *numbers: int) -> list[Action]:
        return self.post(IndexReplay(**self.common, events=tuple(map(stored, numbers))))

    def fail(self) -> list[Action]:
        return self.post(IndexRecoveryFailed(**self.common, reason="cannot"))

    def fire(self) -> list[Action]:
        """The timer that is set comes due."""
        (name,) = self.timers
        self.now_s = self.timers.pop(name)
        return self.post(TimerFired(at_s=self.now_s, name=name))

    @property
    def held(self) -> set[int]:
        """Which blocks 0 to 199 the rank holds."""
        index = self.live._indexes[64]
        return {n for n in range(200) if index.depths(index.match(index.path([n])))}

    @property
    def state(self) -> tuple[int | None, FeedMode]:
        feed = self.live._feeds[W0]
        return feed.cursor, feed.mode

    def counts(self) -> dict[str, int]:
        return {k: n for k, n in self.live.counters().items() if n and not k.startswith("index_")}


def at_ten() -> Fed:
    fed = Fed()
    fed.dump(10, 1)
    assert (fed.state, fed.held) == ((10, LIVE), {1})
    return fed


# ---------------------------------------------------------------- examples G


def test_g1_events_in_order() -> None:
    fed = at_ten()
    assert fed.post(stored(11)) == fed.post(stored(12)) == []
    assert (fed.state, fed.held) == ((12, LIVE), {1, 11, 12})


def test_g2_a_gap_is_asked_for() -> None:
    fed = at_ten()
    (ask,) = fed.post(stored(13))
    assert isinstance(ask, RequestIndexReplay)
    assert (ask.from_id, ask.to_id, ask.reason) == (11, 12, "events 11 to 12 are missing")
    assert (fed.state, fed.held) == ((10, RECOVERING), {1})


def test_g3_a_replay_comes_before_what_waits() -> None:
    fed = at_ten()
    fed.post(stored(13))
    fed.post(stored(14))
    assert fed.replay(11, 12) == []
    assert (fed.state, fed.held) == ((14, LIVE), {1, 11, 12, 13, 14})


def test_g4_and_g5_a_dump_replaces_what_is_known() -> None:
    fed = at_ten()
    fed.post(stored(13))
    fed.dump(13, 2, 3)
    fed.post(stored(14))
    assert (fed.state, fed.held) == ((14, LIVE), {2, 3, 14})
    other = at_ten()
    other.post(stored(13))
    other.dump(20, 2)
    for number in range(14, 21):
        other.post(stored(number))
    assert (other.state, other.held, other.counts()["stale_events"]) == ((20, LIVE), {2}, 7)


def test_g6_an_old_event_changes_nothing() -> None:
    fed = at_ten()
    fed.post(stored(9))
    assert (fed.state, fed.held, fed.counts()["stale_events"]) == ((10, LIVE), {1}, 1)


def test_g7_when_nobody_can_tell_it_goes_on_with_what_there_is() -> None:
    fed = at_ten()
    fed.post(stored(13))
    assert fed.fail() == []
    assert (fed.state, fed.held) == ((13, DEGRADED), {1, 13})
    fed.post(stored(14))
    (ask,) = fed.fire()
    assert isinstance(ask, RequestIndexDump)
    fed.post(stored(15))
    fed.dump(14, 1, 12)
    assert (fed.state, fed.held) == ((15, LIVE), {1, 12, 15})
    assert fed.counts() == {"gaps": 1, "replays_failed": 1, "dumps_done": 2}


def test_g8_a_new_registration_begins_anew() -> None:
    fed = at_ten()
    (ask,) = fed.post(stored(0, epoch=1))
    assert isinstance(ask, RequestIndexDump)
    assert (fed.held, fed.state, ask.epoch) == (set(), (None, RECOVERING), 1)
    assert fed.post(worker(0, epoch=1)) == []  # its WorkerUp comes late, and is no news
    fed.dump(None)
    assert (fed.state, fed.held) == ((0, LIVE), {0})
    fed.post(stored(11))
    assert (fed.held, fed.counts()["old_events"]) == ({0}, 1)


# ---------------------------------------------------------------- beyond the table


def test_a_rank_that_comes_up_is_asked_for_all_it_has_and_no_answer_is_waited_for_ever() -> None:
    fed = Fed()
    fed.post(stored(4))
    waits = []
    for _ in range(6):
        before_s = fed.now_s
        (ask,) = fed.fire()
        assert isinstance(ask, RequestIndexDump)
        waits.append(fed.now_s - before_s)
    assert waits == [5, 10, 20, 40, 60, 60]
    assert (fed.state, fed.held) == ((4, DEGRADED), {4})
    fed.dump(4, 1, 4)
    assert (fed.state, fed.held) == ((4, LIVE), {1, 4})
    fed.post(stored(6))
    assert fed.timers == {"kv-index/0/0": fed.now_s + 5}  # back to the first wait


def test_an_answer_that_nobody_waits_for_any_more_changes_nothing() -> None:
    fed = at_ten()
    fed.post(stored(13))
    late = IndexReplay(**fed.common, events=(stored(11), stored(12)))
    fed.fire()
    assert fed.state == (13, DEGRADED)
    fed.dump(13, 11, 12, 13)
    fed.post(late)
    assert (fed.state, fed.held, fed.counts()["late_answers"]) == ((13, LIVE), {11, 12, 13}, 1)


def test_another_gap_in_what_waited_is_asked_for_too() -> None:
    fed = at_ten()
    for number in (13, 15, 15, 13):
        fed.post(stored(number))
    (ask,) = fed.replay(11, 12)
    assert isinstance(ask, RequestIndexReplay)
    assert ((ask.from_id, ask.to_id), fed.state, fed.counts()["stale_events"]) == ((14, 14), (13, RECOVERING), 2)
    fed.replay(14)
    assert fed.state == (15, LIVE)


def test_half_a_replay_is_none() -> None:
    fed = at_ten()
    fed.post(stored(14))
    fed.replay(11, 13)
    assert (fed.state, fed.held) == ((14, DEGRADED), {1, 11, 14})


def test_an_old_dump_does_not_undo_what_is_known() -> None:
    fed = at_ten()
    fed.post(stored(13))
    fed.dump(8, 5)
    assert (fed.state, fed.held) == ((13, DEGRADED), {1, 13})


def test_all_events_from_the_first_one_are_as_good_as_a_dump() -> None:
    fed = Fed()
    fed.post(stored(3))
    fed.replay(0, 1, 2)
    assert (fed.state, fed.held) == ((3, LIVE), {0, 1, 2, 3})
    other = Fed()
    other.post(stored(3))
    other.replay(1, 2)
    assert (other.state, other.held) == ((3, DEGRADED), {3})


def test_too_much_to_keep_means_asking_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_BUFFERED", 3)
    fed = at_ten()
    asks = [ask for number in range(13, 17) for ask in fed.post(stored(number))]
    assert [type(ask) for ask in asks] == [RequestIndexReplay, RequestIndexDump]
    assert fed.live._feeds[W0].buffered == 1
    fed.dump(15, 1, 2)
    assert (fed.state, fed.held, fed.counts()["buffer_overflows"]) == ((16, LIVE), {1, 2, 16}, 1)
    fed.post(stored(18))
    fed.fail()
    for number in range(19, 30):
        fed.post(stored(number))
    assert (fed.live._feeds[W0].buffered, fed.held >= set(range(18, 30))) == (3, True)


def test_ranks_have_feeds_of_their_own() -> None:
    fed = Fed(dp_ranks=2)
    assert [(ask.dp_rank, ask.ask) for ask in fed.asked] == [(0, 1), (1, 1)]  # type: ignore[union-attr]
    fed.dump(None)
    assert [fed.live.mode(RankId(WorkerId(0), n)) for n in range(3)] == [RECOVERING, LIVE, None]


def test_what_is_not_registered_is_counted() -> None:
    fed = at_ten()
    fed.post(stored(0, worker_id=7))
    fed.post(stored(0, dp_rank=1))
    fed.post(WorkerLost(at_s=0.0, worker_id=WorkerId(0)))
    fed.post(stored(11))
    assert (fed.counts()["strange_events"], fed.held, fed.live.size) == (3, set(), 0)
    fed.post(TimerFired(at_s=5.0, name=next(iter(fed.timers))))


def test_another_router_starts_from_what_this_one_knows() -> None:
    fed, new = at_ten(), Fed()
    fed.post(stored(11))
    (ask,) = new.asked
    assert isinstance(ask, RequestIndexDump)
    new.post(stored(12))
    answer = fed.live.dump(W0, ask.ask, 0.0)
    new.post(answer)
    assert (new.state, new.held) == ((12, LIVE), {1, 11, 12})
    fed.post(stored(20))
    told = fed.live.dump(W0, 7, 0.0)
    assert isinstance(told, IndexDump)
    assert told.last_id == 11  # exact up to its gap
    fed.fail()
    refused = fed.live.dump(W0, 7, 0.0)
    assert isinstance(refused, IndexRecoveryFailed)
    assert (refused.ask, refused.reason) == (7, "not exact here (degraded)")
    unknown = fed.live.dump(RankId(WorkerId(9), 0), 8, 0.0)
    assert isinstance(unknown, IndexRecoveryFailed)
    assert unknown.reason == "not known here"


def test_every_request_is_answered_once() -> None:
    fed = Fed()
    answer = IndexRecoveryFailed(**fed.common, reason="cannot")
    fed.post(answer)
    with pytest.raises(InvariantError, match="Every action ends in exactly one terminal event"):
        fed.post(answer)


def test_the_loss_of_the_worker_ends_its_requests() -> None:
    fed = Fed()
    fed.post(WorkerLost(at_s=0.0, worker_id=WorkerId(0)))
    fed.invariants.finish()
    with pytest.raises(InvariantError, match="terminal event"):
        fed.fail()


# ---------------------------------------------------------------- block sizes (case C11)


def c11(shared: Path, recut: bool) -> tuple[LiveIndex, dict[int, list[int]]]:
    setup = json.loads((shared / "cases/inputs/c11_setup.json").read_text())
    tokens, size = setup["prompt_token_ids"], setup["worker"]["kv_block_size"]
    live = LiveIndex(setup["router_block_size"], recut=recut)
    orders = live.on(worker(0, block_size=size))
    for order in orders:
        if isinstance(order, RequestIndexDump):
            live.on(IndexDump(at_s=0.0, worker_id=WorkerId(0), ask=order.ask, last_id=0, entries=()))
    local = tuple(map(BlockHash, local_hashes(tokens, size)))
    blocks = setup["events"][0]["blocks"]
    exts = tuple(BlockHash(1000 + n) for n in range(blocks))
    live.on(KvStored(at_s=0.0, worker_id=WorkerId(0), event_id=1, exts=exts, local_hashes=local))
    return live, {n: local_hashes(tokens, n) for n in (16, 64)}


@pytest.mark.shared
def test_c11_another_block_size_is_refused_by_name(shared: Path) -> None:
    live, hashes = c11(shared, recut=False)
    assert live.refused == {
        0: "worker 0 (w0) has blocks of 16 tokens, the router hashes 64 (recut is off): its cache is not seen; "
        "set one of the two block sizes to the other"
    }
    counters = live.counters()
    assert (counters["block_size_mismatch"], counters["strange_events"]) == (1, 1)
    assert live.columns(live.prompt(128, hashes), [W0]).device_blocks == [0]
    live.on(worker(0, block_size=64, epoch=1))
    assert live.refused == {}


def test_an_empty_prompt_finds_nothing() -> None:
    fed = at_ten()
    fed.post(replace(stored(11), tier=Tier.G2_HOST))
    assert fed.live.columns(fed.live.prompt(0, {64: []}), [W0]) == ([0], [0], [0], [0])


@pytest.mark.shared
def test_c11_or_cut_again(shared: Path) -> None:
    live, hashes = c11(shared, recut=True)
    assert live.block_sizes == (64, 16)
    assert live.columns(live.prompt(129, hashes), [W0]).device_blocks == [2]
    assert live.columns(live.prompt(128, hashes), [W0]).device_blocks == [1]  # its last token is computed
    live.on(KvRemoved(at_s=0.0, worker_id=WorkerId(0), event_id=2, exts=(BlockHash(1007),)))
    assert live.columns(live.prompt(129, hashes), [W0]).device_blocks == [1]
    with pytest.raises(ConfigError, match=r"hashed in blocks of \[64\] tokens, workers have \[16\] too"):
        live.prompt(129, {64: hashes[64]})


def test_sizes_that_do_not_fit_are_refused_even_when_cut_again() -> None:
    live = LiveIndex(64, recut=True)
    assert live.on(worker(0, block_size=48)) == []
    assert "neither divides the other" in live.refused[WorkerId(0)]
    assert len(live.on(worker(1, block_size=128))) == 2
    with pytest.raises(ConfigError, match="block_size is 0"):
        LiveIndex(0)


def test_a_strange_kind_of_event_is_loud() -> None:
    class KvMoved(KvEvent):
        pass

    fed = at_ten()
    with pytest.raises(Exception, match="cannot take"):
        fed.post(KvMoved(at_s=0.0, worker_id=WorkerId(0), event_id=11))


@pytest.mark.parametrize("other", [{"dp_rank": 1}, {"worker_id": 1}, {"epoch": 9}])
def test_what_others_said_is_left_out_of_a_replay(other: dict[str, int]) -> None:
    """Whoever answers may send what another rank said too, or this one under another registration."""
    fed = at_ten()
    fed.post(stored(13))
    ids = [(BlockHash(100 + n),) for n in (11, 12)]
    foreign = tuple(
        replace(stored(n, **other), exts=block, local_hashes=block) for n, block in zip((11, 12), ids, strict=True)
    )
    fed.post(IndexReplay(**fed.common, events=(*foreign, stored(11), stored(12))))
    assert (fed.state, fed.held) == ((13, LIVE), {1, 11, 12, 13})

    lone = at_ten()
    lone.post(stored(13))
    lone.post(IndexReplay(**lone.common, events=foreign))
    assert (lone.state, lone.held) == ((13, DEGRADED), {1, 13}), "a replay of others' events answers nothing"
