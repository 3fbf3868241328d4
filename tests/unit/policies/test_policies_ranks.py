"""Mode kv with workers of several data-parallel ranks: each rank is a place of its own, with its cache, its books and
its limits; the worker is what is filtered, pinned and lost."""

from __future__ import annotations

import pytest
from builders import router, router_settings, worker
from engine_words import EngineScene

from policies.cluster.actions import Dispatch, Reject
from policies.cluster.events import WorkerUp
from policies.cluster.ids import RankId, WorkerId
from policies.errors import ConfigError
from policies.router.kv_engine import KvEngine
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings

PROMPT = list(range(10))


def ranked(worker_id: int, ranks: int = 2, **changes: object) -> WorkerUp:
    return worker(worker_id, dp_ranks=ranks, **changes)


def scene(*workers: WorkerUp, **changes: object) -> EngineScene:
    by_rank = {"index": "engine", "route_ranks": True, "tie_break": "lowest_id"}
    return EngineScene(router("kv", **(by_rank | changes)), list(workers))


def place(one: EngineScene, request_id: str, isl: int = 640, keys: list[int] | None = None, **more: object) -> tuple:
    sent = one.arrive(request_id, isl, keys, **more)  # type: ignore[arg-type]
    assert isinstance(sent, Dispatch), sent
    return sent.worker_id, sent.dp_rank


def policy(one: EngineScene) -> KvEngine:
    inner = getattr(one.policy, "_inner", one.policy)
    assert isinstance(inner, KvEngine)
    return inner


def test_a_prompt_goes_to_the_rank_that_has_it() -> None:
    one = scene(ranked(0), ranked(1))
    one.stored(1, PROMPT[:8], rank=1)
    sent = one.arrive("r", 640, PROMPT)
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.dp_rank, sent.overlap_blocks) == (1, 1, 8)
    assert sent.reason == "rank 1: cost 12.00, 8 blocks cached, 0 open"


def test_each_rank_has_books_of_its_own() -> None:
    one = scene(ranked(0), ranked(1))
    assert [place(one, f"r{n}") for n in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    one.finish("r1")
    assert place(one, "r4") == (0, 1)
    loads = policy(one)._books.loads
    assert loads[RankId(WorkerId(0), 1)].requests == 1


def test_a_worker_without_ranks_is_one_place_among_them() -> None:
    one = scene(worker(0), ranked(1))
    assert [place(one, f"r{n}") for n in range(3)] == [(0, None), (1, 0), (1, 1)]


def test_what_is_told_explains_every_rank() -> None:
    one = scene(ranked(0), worker(1), explain=True)
    one.stored(0, PROMPT[:4], rank=1)
    sent = one.arrive("r", 640, PROMPT)
    assert isinstance(sent, Dispatch)
    told = [(c.worker_id, c.dp_rank, c.overlap_blocks, c.index_mode) for c in sent.candidates]
    assert told == [(0, 0, 0, "live"), (0, 1, 4, "live"), (1, None, 0, "live")]


def test_a_pinned_request_goes_to_the_cheapest_rank_of_its_worker() -> None:
    one = scene(ranked(0), ranked(1))
    one.stored(0, PROMPT, rank=0)
    one.stored(1, PROMPT[:2], rank=1)
    sent = one.arrive("r", 640, PROMPT, hint=1)
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.dp_rank, sent.rule, sent.overlap_blocks) == (1, 1, "pin", 2)


def test_a_worker_that_chooses_its_rank_itself_counts_as_its_best_one() -> None:
    one = scene(ranked(0), ranked(1), route_ranks=False)
    one.stored(0, PROMPT[:2], rank=0)
    one.stored(0, PROMPT[:6], rank=1)
    sent = one.arrive("r", 640, PROMPT)
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.dp_rank, sent.overlap_blocks) == (0, None, 6)


def test_a_lost_worker_is_lost_with_all_its_ranks() -> None:
    one = scene(ranked(0), ranked(1))
    one.stored(0, PROMPT, rank=1)
    for n in range(4):
        place(one, f"r{n}")
    one.lost(0)
    assert all(held.worker_id == 1 for held in policy(one)._books.loads)  # type: ignore[union-attr]
    assert policy(one).counters()["index_blocks"] == 0
    one.up(0, dp_ranks=3, epoch=1)
    assert [place(one, f"s{n}") for n in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_a_worker_is_overloaded_when_all_its_ranks_are() -> None:
    one = scene(ranked(0), ranked(1), busy=BusySettings(prefill_tokens=600))
    places = [place(one, f"r{n}", keys=PROMPT) for n in range(4)]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)], "a rank that is overloaded gets nothing"
    refused = one.arrive("r4", 640, PROMPT)
    assert isinstance(refused, Reject)
    assert refused.code == "all_busy"
    one.first_token("r2")
    assert place(one, "r5") == places[2]


def test_a_rank_has_its_share_of_what_the_worker_has() -> None:
    """25 of 80 blocks are more than 0.3 of the 40 of a rank that has them all."""
    one = scene(ranked(0, total_blocks=80), busy=BusySettings(decode_blocks_share=0.3))
    assert [place(one, f"r{n}", isl=64 * 25) for n in range(2)] == [(0, 0), (0, 1)]
    assert isinstance(one.arrive("r2", 640), Reject)


def test_requests_wait_while_every_rank_is_busy_with_prompts() -> None:
    limits = QueueSettings(
        prefill_busy_share=None,
        prefill_busy_tokens=600,
        busy_worker_share=1.0,
        requests_per_worker=None,
        tokens_per_worker=None,
        max_wait_s=None,
        classes=(
            QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=8192, order="fcfs", waits=True),
        ),
    )
    one = scene(ranked(0), queue=limits)
    assert [place(one, f"r{n}") for n in range(2)] == [(0, 0), (0, 1)]
    waits = one.arrive("r2")
    assert type(waits).__name__ == "Enqueue"
    one.first_token("r1")
    sent = one.where["r2"]
    assert sent == 0
    assert policy(one)._books.loads[RankId(WorkerId(0), 1)].requests == 2


def test_guesses_are_by_rank_too() -> None:
    one = scene(ranked(0), use_kv_events=False)
    first = place(one, "r0", keys=PROMPT)
    one.finish("r0")
    assert place(one, "r1", keys=PROMPT) == first
    one.finish("r1")


def test_ranks_need_events_that_tell_them_apart() -> None:
    with pytest.raises(ConfigError, match="route_ranks needs index = engine"):
        router_settings("kv", route_ranks=True)
