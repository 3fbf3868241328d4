"""The simulation beside a live cluster: what it predicts is what a replay of the same demand says, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from shadowed import Asked, arrived, as_trace, demand, ended, in_batches, joined, name

from policies.cluster.ids import WorkerId
from reports.record import RunRecord
from twin.config import Config
from twin.config_read import load
from twin.engine.ticks import instant
from twin.mocker.sinks import MemorySinks
from twin.replay import replay
from twin.shadow.ahead import Ahead
from twin.shadow.facts import Arrived, Drains, Ended, Fact, Joined, Left, Pair, Progress

POOL = """
[[workers]]
count = 3
model = "llama-3.1-8b"
gpu = "h100_sxm"
"""
SPLIT = """
[[workers]]
name = "prefill"
role = "prefill"
count = 2
model = "llama-3.1-8b"
gpu = "h100_sxm"
[[workers]]
name = "decode"
role = "decode"
count = 2
model = "llama-3.1-8b"
gpu = "h100_sxm"
"""
CONFIGS = {
    "round robin": POOL,
    "kv": POOL + '[router]\nmode = "kv"\n',
    "kv with the engines' own events, a queue and little KV": POOL.replace("gpu =", "engine.kv_blocks = 900\ngpu =")
    + '[router]\nmode = "kv"\nindex = "engine"\n[router.queue]\nprefill_busy_tokens = 2000\n',
    "least loaded, late reports": POOL + '[router]\nmode = "least-loaded"\n[observe]\nreport_lag_s = 0.3\n',
    "sglang": POOL.replace("gpu =", 'engine.kind = "sglang"\nengine.block_size = 16\ngpu ='),
    "prefill and decode": SPLIT,
    "prefill and decode by prefixes": SPLIT + '[router]\nmode = "kv"\n',
}


def config_of(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, {}, ("allow_no_effect=true",))


def told(
    ahead: Ahead, facts: list[Fact], every_s: float = 0.2, *, to_the_end: bool = True
) -> tuple[list[Pair], dict[str, int], list[Progress]]:
    """All of it through the simulation: the pairs, what was left out, and every answer."""
    answers, now_s = [], 0.0
    for now_s, some in in_batches(facts, every_s):
        answers.append(ahead.take(some, now_s))
    if to_the_end:
        answers.append(ahead.finish(now_s))
        ahead.world.audit()
    left_out: dict[str, int] = {}
    for answer in answers:
        for reason, count in answer.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    return [pair for answer in answers for pair in answer.pairs], left_out, answers


def facts_of(config: Config, asked: list[Asked], seed: int = 5) -> list[Fact]:
    """Answers take any time at all: what is measured changes no prediction."""
    rng = random.Random(seed)
    ends = [ended(number, one, rng.uniform(0.01, 9.0)) for number, one in enumerate(asked)]
    return [*joined(config), *(arrived(number, one) for number, one in enumerate(asked)), *ends]


@pytest.mark.parametrize("router", CONFIGS)
def test_it_predicts_what_a_replay_of_the_same_requests_says(tmp_path: Path, router: str) -> None:
    config, asked = config_of(tmp_path, CONFIGS[router]), demand(3, 400)
    trace = as_trace(asked, tmp_path / "trace.parquet")
    flags = {"TRACE": trace, "--hash-block-tokens": 16, "--allow-no-effect": True}
    run = replay(load(tmp_path / "c.toml", flags), out=tmp_path / "run", html=False).folder
    columns = RunRecord(run).requests
    replayed = {
        name(int(row)): (first - at, last - at, int(made) - 1)
        for row, at, first, last, made in zip(
            *(columns.floats(c) for c in ("row", "arrival_s", "first_token_s", "last_token_s", "output_tokens")),
            strict=True,
        )
    }
    assert len(replayed) == len(asked)
    for every_s in (0.05, 3.0):
        pairs, left_out, _ = told(Ahead(config, MemorySinks(), wait_s=60.0), facts_of(config, asked), every_s)
        assert left_out == {}
        assert {pair.request_id: tuple(pair.predicted) for pair in pairs} == replayed


def test_it_waits_for_the_oldest_open_request_and_no_longer(tmp_path: Path) -> None:
    config = config_of(tmp_path, POOL)
    ahead = Ahead(config, MemorySinks(), wait_s=10.0)
    long, short = Asked(1.0, 100, 50, 5000, []), Asked(2.0, 100, 50, 60, [])
    facts: list[Fact] = [*joined(config), plain(0, long), plain(1, short), ended(1, short, 1.0)]
    assert ahead.take(facts, 4.0)[:2] == (1.0, ())
    assert ahead.take([], 11.0).clock_s == 1.0
    told = ahead.take([], 11.5)
    assert told.clock_s == 11.5
    assert [pair.request_id for pair in told.pairs] == [name(1)]
    assert (told.open, told.left_out) == (1, {})
    late = ahead.take([ended(0, long, 20.0)], 21.5)
    assert (late.pairs, late.left_out, late.open) == ((), {"open_too_long": 1}, 0)
    ahead.finish(21.5)
    ahead.world.audit()


def plain(number: int, one: Asked) -> Arrived:
    """Nobody knows what is in it."""
    return arrived(number, one)._replace(hashes=None)


def test_who_leaves_is_load_until_then_and_is_not_compared(tmp_path: Path) -> None:
    """The first two hold the only worker; the third is served when they have left."""
    config = config_of(tmp_path, POOL.replace("count = 3", "count = 1") + "[workers.engine]\nmax_num_seqs = 2\n")
    one = Asked(0.5, 100, 1, 5000, [])
    gone = [Ended(4.0, name(number), "cancelled", 7, 0.6, 3.9) for number in range(2)]
    last = Asked(1.0, 100, 10, 10, [])
    facts: list[Fact] = [*joined(config), plain(0, one), plain(1, one), plain(2, last), *gone, ended(2, last, 0.5)]
    pairs, left_out, _ = told(Ahead(config, MemorySinks(), wait_s=60.0), facts)
    assert left_out == {"cancelled": 2}
    assert [pair.request_id for pair in pairs] == [name(2)]
    assert 3.0 < pairs[0].predicted.ttft_s < 3.5
    assert pairs[0].measured.ttft_s == pytest.approx(0.25)


def test_what_the_live_cluster_rejects_is_counted_and_kept_as_such(tmp_path: Path) -> None:
    config = config_of(tmp_path, POOL)
    sinks = MemorySinks()
    one = Asked(1.0, 100, 5, 9, [])
    facts: list[Fact] = [*joined(config), plain(0, one), plain(1, one)]
    facts += [Ended(1.0, name(0), "rejected", 0, None, None), ended(1, one, 1.0)]
    pairs, left_out, _ = told(Ahead(config, sinks, wait_s=60.0), facts)
    assert (len(pairs), left_out) == (1, {"rejected": 1})
    assert [sinks.requests[row][6] for row in (0, 1)] == ["rejected", "completed"]
    assert len(sinks.requests[0]) == len(sinks.requests[1])


def test_workers_come_and_go_as_the_live_ones_do(tmp_path: Path) -> None:
    """One worker is lost with what it has, another drains, a new one comes under an id of its own."""
    config = config_of(tmp_path, POOL + "[resilience]\nmigration_limit = 3\n")
    asked = [Asked(0.1 * number, 500, 300, 300, []) for number in range(60)]
    new = joined(config)[0]._replace(at_s=4.5, worker_id=WorkerId(9))  # type: ignore[call-arg]
    of_workers: list[Fact] = [
        Left(1.0, WorkerId(1), "killed", False),
        Drains(3.0, WorkerId(0)),
        Left(3.6, WorkerId(0), "drained", True),
        new,
    ]
    facts = [*joined(config), *of_workers, *(plain(n, one) for n, one in enumerate(asked))]
    facts += [ended(n, one, 1.0) for n, one in enumerate(asked)]
    sinks = MemorySinks()
    ahead = Ahead(config, sinks, wait_s=60.0)
    pairs, left_out, answers = told(ahead, facts)
    assert (len(pairs), left_out) == (60, {})
    rows = sinks.requests
    assert any(row[17] for row in rows.values()), "nothing was sent again"
    assert {row[8] for row in rows.values() if row[3] < 1.0} <= {0, 1, 2}
    assert {row[8] for row in rows.values() if 1.0 <= row[3] < 3.0} == {0, 2}
    assert {row[8] for row in rows.values() if 3.0 <= row[3] < 4.5} == {2}
    assert len({row[8] for row in rows.values() if row[3] > 4.6}) == 2
    assert not [notice for answer in answers for notice in answer.notices]


def test_a_worker_that_still_drains_here_is_not_lost_for_one_that_comes(tmp_path: Path) -> None:
    """The live one had drained at once, and another has come: two are there until this one has ended its request."""
    config = config_of(tmp_path, POOL.replace("count = 3", "count = 1"))
    long, short = Asked(0.5, 100, 3000, 3000, []), Asked(2.0, 100, 10, 10, [])
    new = joined(config)[0]._replace(at_s=1.5, worker_id=WorkerId(7))  # type: ignore[call-arg]
    facts: list[Fact] = [*joined(config), plain(0, long), Drains(1.0, WorkerId(0)), new, plain(1, short)]
    facts += [Left(1.2, WorkerId(0), "drained", True), ended(0, long, 0.6), ended(1, short, 0.5)]
    sinks = MemorySinks()
    pairs, left_out, _ = told(Ahead(config, sinks, wait_s=60.0), facts)
    assert ([pair.request_id for pair in pairs], left_out) == ([name(1), name(0)], {})
    assert [(sinks.requests[row][8], sinks.requests[row][17]) for row in (0, 1)] == [(0, 0), (1, 0)]


def test_engines_say_what_they_have_room_for(tmp_path: Path) -> None:
    """A pool of 64 blocks cannot hold what the computed one would."""
    config = config_of(tmp_path, POOL.replace("count = 3", "count = 1"))
    one = Asked(0.5, 2000, 5, 5, [])
    small = [fact._replace(pool_tokens=64 * 16) for fact in joined(config)]  # type: ignore[call-arg]
    facts: list[Fact] = [*small, plain(0, one), ended(0, one, 1.0)]
    pairs, left_out, _ = told(Ahead(config, MemorySinks(), wait_s=60.0), facts)
    assert (pairs, left_out) == ([], {"twin_rejected": 1})


@pytest.mark.parametrize(
    "router", ["kv", "prefill and decode", "kv with the engines' own events, a queue and little KV"]
)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_request_is_accounted_for(tmp_path: Path, router: str, seed: int) -> None:
    """Clients leave, answers take for ever, workers are lost, drain and come back: the simulation goes on, its books
    add up at the end, and each request was compared or left out once."""
    rng = random.Random(seed)
    config = config_of(tmp_path, CONFIGS[router] + "[resilience]\nmigration_limit = 3\n")
    asked = demand(seed, 150)
    facts: list[Fact] = [*joined(config), *(arrived(n, one) for n, one in enumerate(asked))]
    for number, one in enumerate(asked):
        outcome = rng.choices(("completed", "cancelled", "failed", "rejected"), (12, 3, 1, 1))[0]
        told = ended(number, one, rng.choice((0.3, 2.0, 8.0)) * rng.random())
        facts.append(told._replace(outcome=outcome))  # type: ignore[arg-type]
    workers = joined(config)
    for number in range(6):
        worker = rng.choice(workers)
        assert isinstance(worker, Joined)
        at_s = instant(rng.uniform(0.5, asked[-1].at_s))
        new = worker._replace(at_s=at_s + 0.5, worker_id=WorkerId(100 + number))
        workers = [*(one for one in workers if one is not worker), new]
        if rng.random() < 0.5:
            facts += [Left(at_s, worker.worker_id, "killed", False), new]
        else:
            drained_s = at_s + rng.uniform(0.0, 0.5)
            facts += [Drains(at_s, worker.worker_id), Left(drained_s, worker.worker_id, "drained", True), new]
    pairs, left_out, answers = told_of(config, facts)
    assert len(pairs) + sum(left_out.values()) == len(asked)
    assert len({pair.request_id for pair in pairs}) == len(pairs) > 50
    assert left_out["cancelled"] > 5
    assert answers[-1].open == 0


def told_of(config: Config, facts: list[Fact]) -> tuple[list[Pair], dict[str, int], list[Progress]]:
    return told(Ahead(config, MemorySinks(), wait_s=1.0), facts)
