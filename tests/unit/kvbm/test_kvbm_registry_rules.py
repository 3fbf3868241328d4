"""The registry of what lies outside a worker: leases, answers that are hints, what is known to be nowhere, and who may
read whom."""

from __future__ import annotations

import pytest
from kvbm_builders import BLOCK_BYTES, Bench, Chains, fill, level

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.health import NegativeCache
from policies.kvbm.level import Level, TierBody
from policies.kvbm.look_up import Miss, Plan
from policies.kvbm.offload import Presence
from policies.kvbm.peers import PeerMemory, PeerView
from policies.kvbm.registry import NOTHING, Answer, Ask, Lease, RegistryRules, RegistryView, Told
from policies.kvbm.spans import Spans
from policies.kvbm.tiers import TierSpec

G1, G2, G3, G4 = Tier
RULES = RegistryRules(lookup_s=0.002, lease_s=60.0, negative_s=1.0)
ME, OTHER, THIRD = (WorkerId(n) for n in range(3))


# ---------------------------------------------------------------- leases


@pytest.mark.parametrize(
    ("cut_s", "over_s"), [(0.0, 60.0), (19.0, 60.0), (20.0, 80.0), (59.0, 100.0), (100.0, 160.0), (119.9, 160.0)]
)
def test_a_lease_is_renewed_every_third_of_it_and_outlasts_its_owner_by_what_is_left(
    cut_s: float, over_s: float
) -> None:
    lease = Lease(60.0, 0.0)
    assert lease.holds(1e6), "it is renewed for ever"
    lease.cut(cut_s)
    lease.cut(cut_s + 1.0)
    assert lease.holds(over_s - 1e-6)
    assert not lease.holds(over_s + 1e-6)


def test_who_comes_back_has_a_lease_that_begins_then() -> None:
    lease = Lease(60.0, 0.0)
    lease.cut(5.0)
    lease.back(95.0)
    assert lease.holds(1e6)
    lease.cut(114.0)
    assert lease.holds(154.9)
    assert not lease.holds(155.1)


# ---------------------------------------------------------------- answers


def store_with(*runs: BlockRun) -> TierBody:
    body = level(G4, 99).body
    fill(body.store, *runs)
    return body


def spans(*runs: BlockRun) -> Spans:
    found = Spans()
    for run in runs:
        found.add(*run)
    return found


def test_what_was_told_of_is_found_as_far_as_it_is_there_still() -> None:
    chains = Chains()
    body = store_with(chains.run("a1", "a4"), chains.run("b1", "b2"))
    branch, other = chains.branch("a"), chains.branch("b")
    told = Told(body.store, spans(chains.run("a2", "a3"), chains.run("a6")))
    assert [part[1:] for part in told.find(branch, 1, 9)] == [(1, 3)]
    assert told.find(branch, 0, 9) == []
    assert told.lacking(branch, 0, 7) == [(0, 1), (3, 7)], "a6 was told of, and is not there"
    assert told.lacking(other, 0, 2) == [(0, 2)]
    answer = Answer({G4: spans(chains.run("a1", "a2"))}, {OTHER: spans(chains.run("a3"))})
    assert (answer.reach(branch, 0), answer.reach(branch, 3), answer.reach(other, 0)) == (3, 3, 0)


# ---------------------------------------------------------------- what is asked


def test_what_is_known_to_be_nowhere_is_not_asked_for_and_nothing_behind_it() -> None:
    chains, view = Chains(), RegistryView(RULES)
    pieces, first = [(chains.branch("a"), 6)], chains.run("a1")

    def question(now_s: float) -> Ask | None:
        return view.question(pieces, first, 6, 6, now_s)

    whole = question(0.0)
    assert whole is not None
    assert (list(whole.runs), whole.end) == ([chains.run("a1", "a6")], 6)
    view.negative.add(chains.run("a4"), 0.0)
    cut = question(0.5)
    assert cut is not None
    assert (list(cut.runs), cut.end) == ([chains.run("a1", "a3")], 3)
    view.negative.add(first, 0.5)
    assert question(0.9) is None
    assert question(1.5) is not None, "for a second"


def test_what_a_worker_writes_itself_is_asked_for_again() -> None:
    chains, view = Chains(), RegistryView(RULES)
    view.negative.add(chains.run("a1", "a3"), 0.0)
    view.put(Spans(), [chains.run("a2")])
    assert view.negative.first_in(chains.run("a1", "a3"), 0.5) == 0
    assert view.negative.first_in(chains.run("a2"), 0.5) is None


def test_what_failed_again_after_it_was_forgotten_is_remembered_for_its_whole_time() -> None:
    chains, known = Chains(), NegativeCache(1.0)
    known.add(chains.run("a1", "a3"), 0.0)
    known.forget(chains.run("a2"))
    known.add(chains.run("a2"), 0.8)
    assert known.first_in(chains.run("a1", "a3"), 0.9) == 0
    assert known.first_in(chains.run("a1", "a3"), 1.5) == 1
    assert known.first_in(chains.run("a1", "a3"), 1.9) is None


# ---------------------------------------------------------------- a manager that asks


def shared(capacity: int = 99) -> Level:
    spec = TierSpec(
        tier=G4,
        capacity_bytes=capacity * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        latency_s=0.0,
        bytes_per_s=1e9,
        is_shared=True,
    )
    return Level(TierBody(spec, Lru), Presence())


class Asker(Bench):
    """A worker that asks the registry for a prompt `aN..` of six blocks, five of which need not be computed."""

    def __init__(self, rules: RegistryRules = RULES, *levels: Level) -> None:
        super().__init__(*(levels or (level(G2, 9), shared())), registry=RegistryView(rules))
        self.chains = Chains()

    @property
    def body(self) -> TierBody:
        return self.manager.levels[-1].body

    def looks(self, now_s: float, answer: Answer | None = None) -> Plan:
        pieces = [(self.chains.branch("a"), 6)]
        return self.manager.look_up(pieces, blocks=6, usable=5, device_blocks=0, now_s=now_s, answer=answer)

    def ask(self, now_s: float, *, is_out: bool = False) -> tuple[float, Ask]:
        (ask,) = self.looks(now_s).awaits
        assert isinstance(ask, Ask)
        return self.manager.outside.asked(ask, now_s, is_out=is_out), ask

    def answer(self, now_s: float, *, is_out: bool = False) -> Answer:
        took_s, ask = self.ask(now_s, is_out=is_out)
        self.manager.outside.answered(ask, now_s + took_s)
        assert ask.is_over
        assert ask.answer is not None
        return ask.answer


def test_nothing_of_a_shared_tier_is_known_before_it_has_been_asked() -> None:
    bench = Asker()
    fill(bench.body.store, bench.chains.run("a1", "a3"))
    plan = bench.looks(0.0)
    assert (plan.load_blocks, plan.misses) == (0, {Miss.ABSENT: 6})
    took_s, ask = bench.ask(0.0)
    assert took_s == RULES.lookup_s
    plan = bench.looks(0.002, ask.answer)
    assert (plan.load_blocks, plan.misses, plan.awaits) == (3, {Miss.ABSENT: 3}, ())


def test_who_has_all_of_a_prompt_below_its_device_asks_nobody() -> None:
    bench = Asker()
    fill(bench.manager.levels[0].body.store, bench.chains.run("a1", "a5"))
    assert bench.looks(0.0).awaits == ()
    assert bench.looks(0.0).load_blocks == 5


def test_a_hit_is_a_hint_and_what_has_gone_since_was_read_in_vain() -> None:
    bench = Asker()
    fill(bench.body.store, bench.chains.run("a1", "a4"))
    answer = bench.answer(0.0)
    bench.body.store.drop(*bench.chains.run("a3"), 0.001)
    plan = bench.looks(0.002, answer)
    assert (plan.load_blocks, plan.misses) == (2, {Miss.FAILED: 2, Miss.ABSENT: 2})


def test_what_has_come_since_the_question_is_not_known() -> None:
    bench = Asker()
    fill(bench.body.store, bench.chains.run("a1"))
    answer = bench.answer(0.0)
    fill(bench.body.store, bench.chains.run("a2", "a5"))
    assert bench.looks(0.002, answer).load_blocks == 1


def test_nobody_asks_again_for_a_second_for_what_nobody_had_though_it_is_there_meanwhile() -> None:
    bench = Asker()
    assert bench.looks(0.002, bench.answer(0.0)).misses == {Miss.ABSENT: 6}
    fill(bench.body.store, bench.chains.run("a1", "a5"))
    plan = bench.looks(0.9)
    assert (plan.awaits, plan.load_blocks, plan.misses) == ((), 0, {Miss.ABSENT: 6}), "stale, and known to nobody"
    assert bench.looks(1.002, bench.answer(1.002)).load_blocks == 5


def test_an_answer_that_is_late_is_a_miss_after_20_ms_and_not_remembered() -> None:
    slow = Asker(RegistryRules(lookup_s=0.021, lease_s=60.0, negative_s=1.0))
    exact = Asker(RegistryRules(lookup_s=0.020, lease_s=60.0, negative_s=1.0))
    for bench, is_out, blocks in ((slow, False, 0), (exact, False, 5), (exact, True, 0)):
        if not bench.body.store.resident:
            fill(bench.body.store, bench.chains.run("a1", "a5"))
        took_s, ask = bench.ask(5.0, is_out=is_out)
        assert took_s == 0.020
        assert bench.looks(5.02, ask.answer).load_blocks == blocks
        assert bench.looks(5.02).awaits, "it asks again at once"
    views = [bench.manager.outside.registry for bench in (slow, exact)]
    assert [(view.asked, view.late) for view in views if view is not None] == [(1, 1), (2, 1)]


def test_what_is_written_while_the_registry_cannot_be_reached_is_there_and_on_no_record() -> None:
    """Its writer puts it when it can; where that is lost first, only writing it again does."""
    bench = Asker(RULES, shared())
    bench.manager.outside.cut_off(0.0)
    bench.complete(bench.chains.run("a1", "a3"), 0.0)
    bench.settle(0.0)
    assert bench.body.store.resident == 3
    assert bench.answer(1.0, is_out=True) is NOTHING
    assert bench.body.listed(*bench.chains.run("a1", "a3")) == []
    assert bench.body.absent(*bench.chains.run("a1", "a3")) == [(0, 3)], "whoever has it may write it again"
    bench.manager.outside.reached(2.0)
    assert bench.body.listed(*bench.chains.run("a1", "a3")) == [(0, 3)]
    assert bench.looks(3.0, bench.answer(3.0)).load_blocks == 3


def test_somebody_else_puts_on_record_what_he_writes_again() -> None:
    bench = Asker(RULES, shared())
    bench.manager.outside.cut_off(0.0)
    bench.complete(bench.chains.run("a1", "a3"), 0.0)
    bench.settle(0.0)
    bench.manager.close(1.0)
    other = Bench(Level(bench.body, Presence()), registry=RegistryView(RULES))
    other.complete(bench.chains.run("a1", "a2"), 2.0)
    other.settle(2.0)
    assert bench.body.listed(*bench.chains.run("a1", "a3")) == [(0, 2)]
    assert bench.body.store.resident == 3, "the second copies were freed"
    bench.body.store.audit()
    bench.body.lose()
    assert not bench.body.unlisted.blocks


# ---------------------------------------------------------------- peers


class Peers:
    """Three workers with host memory; the third has another layout."""

    def __init__(self, lease_s: float = 60.0) -> None:
        self.memory = PeerMemory()
        self.chains = Chains()
        self.cut_off: set[WorkerId] = set()
        self.bodies = {worker: level(G2, 99).body for worker in (ME, OTHER, THIRD)}
        self.views = {
            worker: PeerView(
                self.memory,
                worker,
                body,
                body.spec,
                "other" if worker is THIRD else "same",
                Lease(lease_s, 0.0),
                lambda other: other not in self.cut_off,
            )
            for worker, body in self.bodies.items()
        }

    def has(self, worker: WorkerId, run: BlockRun) -> None:
        fill(self.bodies[worker].store, run)
        self.views[worker].changed(True, [run])

    def listed(self, worker: WorkerId, now_s: float) -> dict[WorkerId, int]:
        pieces = [(self.chains.branch("a"), 9)]
        found = self.views[worker].listed(pieces, [self.chains.run("a1", "a9")], now_s)
        return {owner: spans.blocks for owner, spans in found.items()}


def test_r5_a_worker_of_another_layout_is_not_read_and_not_told_of() -> None:
    peers = Peers()
    peers.has(OTHER, peers.chains.run("a1", "a3"))
    peers.has(THIRD, peers.chains.run("a1", "a5"))
    assert peers.listed(ME, 0.0) == {OTHER: 3}
    assert peers.listed(THIRD, 0.0) == {}
    assert [owner for owner, _ in peers.views[ME].holders([(peers.chains.branch("a"), 9)], 0.0)] == [OTHER]


def test_who_is_cut_off_stays_on_record_as_it_was_until_its_lease_is_over() -> None:
    peers = Peers()
    peers.has(OTHER, peers.chains.run("a1", "a3"))
    peers.views[OTHER].cut(25.0)
    peers.has(OTHER, peers.chains.run("a4", "a5"))
    peers.bodies[OTHER].store.drop(*peers.chains.run("a1"), 26.0)
    assert peers.listed(ME, 30.0) == {OTHER: 3}, "what has come and gone meanwhile is not heard of"
    assert peers.listed(ME, 79.0) == {OTHER: 3}
    assert peers.listed(ME, 80.0) == {}, "renewed at 20 s"
    peers.views[OTHER].back(90.0)
    assert peers.listed(ME, 90.0) == {OTHER: 4}, "it puts all that it has"
    assert len(peers.memory) == 4


def test_who_knows_all_at_once_reads_only_whom_it_reaches() -> None:
    peers = Peers(lease_s=1e-9)
    peers.has(OTHER, peers.chains.run("a1", "a3"))
    pieces = [(peers.chains.branch("a"), 9)]
    assert peers.views[ME].holders(pieces, 5.0)
    peers.cut_off.add(OTHER)
    assert peers.views[ME].holders(pieces, 5.0) == []


def test_a_worker_that_is_lost_takes_its_entries_along() -> None:
    peers = Peers()
    peers.has(OTHER, peers.chains.run("a1", "a3"))
    peers.views[OTHER].cut(1.0)
    peers.views[OTHER].close()
    assert peers.listed(ME, 2.0) == {}
    assert not len(peers.memory)
