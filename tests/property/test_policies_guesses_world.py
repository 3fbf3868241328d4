"""Guessed caches in simulated runs and random histories: leaping changes nothing, no block event is made, the hit rate
comes near that with events, a prediction is the deeper of two, and nothing is left of workers that are gone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from builders import Scene, router, router_settings, worker
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import KEY_TOKENS, InTurn, Seen, engine_settings, simulate, trace_row
from test_kvbm_world import LATENCY, returning, tight

from policies.cluster.controller import Policy
from policies.cluster.draws import draw, pick
from policies.cluster.events import BlocksCleared, BlocksRemoved, BlocksStored, RequestArrived, WorkerLost
from policies.cluster.ids import RequestId
from policies.router.build import build
from policies.router.kv import Kv
from reports.record import GIVEN_COLUMNS
from twin.mocker.demand import Row

TTL = {"use_kv_events": False, "approximate_ttl_s": 60.0}
LRU = {"use_kv_events": False, "index_policy": "lru"}
POOL_BLOCKS = 580
VARIANTS: Sequence[dict[str, object]] = (
    {**TTL, "approximate_ttl_s": 0.05},
    {**TTL, "explain": True},
    LRU,
    {"predicted_ttl_s": 0.03},
)


@examples(200)
@given(st.tuples(returning(), tight()), st.sampled_from(VARIANTS), st.booleans())
def test_leaping_changes_nothing(demand: tuple[list[Row], dict], variant: dict[str, object], sticky: bool) -> None:
    rows, options = demand
    leapt, stepped = (
        run(rows, Kv(router_settings("kv", block_size=options["block_size"], **variant)), options | {"leap": leap})
        for leap in (True, False)
    )
    for one, two in zip(leapt, stepped, strict=True):
        assert one == two


def run(rows: list[Row], policy: Kv, options: dict) -> tuple[object, ...]:
    """All that a run comes to, and what the policy counted."""
    settings = engine_settings(**options | {"prefix_caching": True})
    seen = simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS, policies=[policy])
    return seen.sinks.requests, seen.sinks.decisions, seen.events, policy.counters()


# ---------------------------------------------------------------- a whole run


def families(rows: int = 600, prompts: int = 12) -> list[Row]:
    """Prompts of 40 blocks: 30 of one of a few families, 10 of their own; two a second."""
    out = []
    for n in range(rows):
        family = pick(draw(5, "family", str(n)), prompts)
        keys = [family * 1000 + k for k in range(30)] + [100_000 + 100 * n + k for k in range(10)]
        out.append(trace_row(n, n / 2, 40 * 16, 20 + n % 50, keys))
    return out


def hit_rate(seen: Seen) -> float:
    cached = GIVEN_COLUMNS.index("cached_tokens")
    return sum(cells[cached] for cells in seen.sinks.requests.values()) / (640 * len(seen.sinks.requests))


def whole_run(policy: Policy) -> Seen:
    """Four workers, each with room for the prefixes of half of the families beside what runs."""
    settings = engine_settings(blocks=POOL_BLOCKS)
    return simulate(families(), [(settings, LATENCY)] * 4, key_tokens=16, policies=[policy])


def kv(**changes: object) -> Policy:
    return build(router_settings("kv", block_size=16, **changes))


@pytest.mark.parametrize("variant", [TTL, LRU], ids=["ttl", "lru"])
def test_the_hit_rate_without_events_comes_near_that_with_them(variant: dict[str, object]) -> None:
    policy = kv(**variant)
    seen = whole_run(policy)
    told, guessed, blind = hit_rate(whole_run(kv())), hit_rate(seen), hit_rate(whole_run(InTurn()))
    shown = f"hit rate {told:.3f} with events, {guessed:.3f} guessed, {blind:.3f} in turn"
    assert abs(guessed - told) < 0.05, shown
    assert guessed > blind + 0.05, shown
    assert not any(seen.world.news.tells_blocks(spec) for spec in seen.world.specs.values()), "events are made"
    assert not any(seen.world.controller.wants(kind) for kind in (BlocksStored, BlocksRemoved, BlocksCleared))


@pytest.mark.parametrize("variant", [TTL, LRU, {"predicted_ttl_s": 5.0}], ids=["ttl", "lru", "predicted"])
def test_nothing_is_left_of_workers_that_are_gone(variant: dict) -> None:
    policy = kv(**variant)
    assert isinstance(policy, Kv)
    seen = whole_run(policy)
    held = policy.counters()["guessed_blocks"]
    ttl_s = variant.get("approximate_ttl_s") or variant.get("predicted_ttl_s")
    most = 4 * POOL_BLOCKS if ttl_s is None else (2 * ttl_s + 1) * 40  # two prompts a second
    assert held <= most, f"{held} blocks are held, and {most} at most can be"
    assert policy.counters()["open_bookings"] == 0
    for worker_id in list(seen.world.workers):
        seen.world.post(WorkerLost(at_s=seen.world.clock.now, worker_id=worker_id))
    counters = policy.counters()
    assert (counters["guessed_blocks"], counters["index_blocks"]) == (0, 0)
    assert policy._guesses is not None
    assert policy._guesses.size == 0


# ---------------------------------------------------------------- the deeper of two

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send"] * 6 + ["stored", "stored", "removed", "cleared", "wait", "lost"]),
        st.integers(0, 1),
        PROMPTS,
    ),
    max_size=25,
)


@examples(200)
@given(STEPS)
def test_a_prediction_is_the_deeper_of_events_and_guess(steps: list[tuple[str, int, list[int]]]) -> None:
    """Three routers live through the same: by events alone, by guess alone, by both."""
    scenes = [
        Scene(router("kv", **changes), [worker(0), worker(1)])
        for changes in ({}, {"use_kv_events": False, "approximate_ttl_s": 1.0}, {"predicted_ttl_s": 1.0})
    ]
    for n, (kind, worker_id, prompt) in enumerate(steps):
        for scene in scenes:
            one_step(scene, f"r{n}", kind, worker_id, prompt)
        real, guess, both = (depths(scene, [*prompt, 9]) for scene in scenes)
        assert both == [max(pair) for pair in zip(real, guess, strict=True)]


def one_step(scene: Scene, name: str, kind: str, worker_id: int, prompt: list[int]) -> None:
    if kind == "send":
        scene.send(name, 64 * len(prompt), prompt, hint=worker_id)
        scene.finish(name)
    elif kind == "stored":
        scene.stored(worker_id, prompt)
    elif kind == "removed":
        scene.removed(worker_id, prompt, lo=len(prompt) // 2)
    elif kind == "cleared":
        scene.cleared(worker_id)
    elif kind == "wait":
        scene.wait(0.6)
    else:
        scene.lost(worker_id)
        scene.up(worker_id, epoch=int(name[1:]) + 1)


def depths(scene: Scene, prompt: list[int]) -> list[int]:
    """What a decision would see for a prompt on workers 0 and 1."""
    policy = scene.policy
    assert isinstance(policy, Kv)
    asked = RequestArrived(at_s=scene.now_s, request_id=RequestId("?"), isl=64 * len(prompt), blocks=scene.path(prompt))
    return [candidate.overlap_blocks or 0 for candidate in policy._explain(asked, scene.view.live)]
