"""The modes without cost: whom they choose, what they refuse, how they explain it; pins and fences in every mode."""

from __future__ import annotations

import itertools

import pytest
from builders import Scene, router, router_settings

from policies.cluster.actions import Candidate, Dispatch, Reject
from policies.errors import ConfigError
from policies.router.build import MODES, build
from policies.router.round_robin import RoundRobin

ALL = sorted(MODES)


def test_round_robin_goes_round_the_live_ones() -> None:
    """Case C10: after a loss the turn goes on among the others."""
    scene = Scene(router("round-robin"), workers=3)
    assert [scene.send(f"r{n}") for n in range(3)] == [0, 1, 2]
    scene.lost(1)
    later = [scene.send(f"r{n}") for n in range(3, 7)]
    assert sorted(later) == [0, 0, 2, 2]
    assert all(a != b for a, b in itertools.pairwise(later))
    scene.up(1, epoch=1)
    assert 1 in [scene.send(f"r{n}") for n in range(7, 10)]


def test_round_robin_takes_no_notice_of_load() -> None:
    scene = Scene(router("round-robin"), workers=2)
    for n in range(4):
        assert scene.send(f"busy{n}", hint=0) == 0
    assert [scene.send(f"r{n}") for n in range(4)] == [0, 1, 0, 1]


def test_least_loaded_counts_what_is_open() -> None:
    scene = Scene(router("least-loaded", tie_break="lowest_id"), workers=3)
    assert [scene.send(f"r{n}") for n in range(4)] == [0, 1, 2, 0]
    scene.finish("r1")
    assert scene.send("r4") == 1
    scene.fail("r2")
    scene.cancel("r4")
    assert [scene.send(f"r{n}") for n in (5, 6)] == [1, 2]


def test_least_loaded_says_whether_it_was_a_tie() -> None:
    scene = Scene(router("least-loaded", tie_break="lowest_id"), workers=2)
    rules = [scene.arrive(f"r{n}").rule for n in range(2)]  # type: ignore[union-attr]
    assert rules == ["tie", "min"]


@pytest.mark.parametrize("mode", ["least-loaded", "kv"])
def test_least_recent_takes_turns_among_idle_workers(mode: str) -> None:
    scene = Scene(router(mode, tie_break="least_recent"), workers=3)

    def alone(request_id: str) -> int:
        at = scene.send(request_id)
        scene.finish(request_id)
        return at

    assert [alone(f"r{n}") for n in range(5)] == [0, 1, 2, 0, 1]
    scene.lost(1)
    scene.up(1, epoch=1)
    assert alone("back") == 1  # new under its old id: never used


def test_power_of_two_never_draws_the_same_worker_twice() -> None:
    scene = Scene(router("power-of-two"), workers=2)
    for n in range(20):
        scene.send(f"r{n}")
    assert [w.in_flight for w in scene.view.live] == [10, 10]  # with two workers it is least loaded


def test_power_of_two_with_one_worker() -> None:
    assert Scene(router("power-of-two"), workers=1).send("r1") == 0


def test_random_draws_by_request_and_not_by_order() -> None:
    forwards, backwards = Scene(router("random"), 4), Scene(router("random"), 4)
    names = [f"r{n}" for n in range(30)]
    chosen = {name: forwards.send(name) for name in names}
    assert chosen == {name: backwards.send(name) for name in reversed(names)}
    assert set(chosen.values()) == {0, 1, 2, 3}


def test_direct_goes_where_the_client_says() -> None:
    scene = Scene(router("direct"), workers=3)
    sent = scene.arrive("r1", hint=2)
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.rule) == (2, "pin")


@pytest.mark.parametrize(
    ("workers", "hint", "code"), [(3, None, "bad_hint"), (0, None, "bad_hint"), (3, 7, "unknown_pin")]
)
def test_direct_refuses_what_it_cannot_do(workers: int, hint: int | None, code: str) -> None:
    scene = Scene(router("direct"), workers=workers)
    refused = scene.arrive("r1", hint=hint)
    assert isinstance(refused, Reject)
    assert refused.code == code
    assert scene.policy.counters() == {"decisions": 0, f"rejected_{code}": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [m for m in ALL if m != "direct"])
def test_no_workers_no_dispatch(mode: str) -> None:
    scene = Scene(router(mode), workers=2)
    scene.lost(0)
    scene.draining(1)
    fenced = scene.arrive("r1", keys=[1] * 10)
    assert isinstance(fenced, Reject)
    assert fenced.code == "all_fenced"
    scene.lost(1)
    refused = scene.arrive("r2", keys=[1] * 10)
    assert isinstance(refused, Reject)
    assert refused.code == "no_endpoints"
    scene.invariants.finish()


@pytest.mark.parametrize("mode", ALL)
def test_a_pin_skips_the_choice_but_no_fence(mode: str) -> None:
    scene = Scene(router(mode), workers=3)
    assert [scene.send(f"r{n}", hint=1) for n in range(3)] == [1, 1, 1]
    scene.draining(1)
    scene.lost(2)
    for n, (hint, code) in enumerate([(1, "pinned_dead"), (2, "pinned_dead"), (9, "unknown_pin")]):
        refused = scene.arrive(f"x{n}", hint=hint)
        assert isinstance(refused, Reject)
        assert refused.code == code
    scene.up(2, epoch=1)
    assert scene.send("back", hint=2) == 2


@pytest.mark.parametrize("mode", [m for m in ALL if m != "direct"])
def test_a_lost_or_draining_worker_gets_nothing_more(mode: str) -> None:
    scene = Scene(router(mode), workers=4)
    for n in range(8):
        scene.send(f"a{n}", keys=[n] * 10)
    scene.lost(1)
    scene.draining(2)
    assert {scene.send(f"b{n}", keys=[n] * 10) for n in range(40)} == {0, 3}


def test_explained_modes_show_every_worker() -> None:
    scene = Scene(router("round-robin", explain=True), workers=3)
    scene.send("r1")
    scene.draining(1)
    sent = scene.arrive("r2")
    assert isinstance(sent, Dispatch)
    assert sent.candidates == (
        Candidate(worker_id=0, in_flight=1),  # type: ignore[arg-type]
        Candidate(worker_id=1, in_flight=0, why_not="draining"),  # type: ignore[arg-type]
        Candidate(worker_id=2, in_flight=0),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("mode", ALL)
def test_every_dispatch_says_why_in_one_line(mode: str) -> None:
    sent = Scene(router(mode), workers=3).arrive("r1", keys=[1] * 10, hint=0 if mode == "direct" else None)
    assert sent.reason
    assert "\n" not in sent.reason
    assert isinstance(sent, Dispatch)
    assert sent.candidates == ()


# ---------------------------------------------------------------- building


def test_mode_names_in_any_usual_spelling() -> None:
    assert isinstance(router("Round_Robin"), RoundRobin)


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'least-loadd', which is not a mode; did you mean 'least-loaded'"):
        router("least-loadd")
    with pytest.raises(ConfigError, match=r"known are .*round-robin.*mine"):
        build(router_settings("zzz"), {"mine": RoundRobin})


def test_a_plugin_is_a_mode() -> None:
    assert isinstance(build(router_settings("mine"), {"mine": RoundRobin}), RoundRobin)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("block_size", 0, "1 or more"),
        ("overlap_score_credit", -0.5, "0 or more"),
        ("overlap_score_weight", float("nan"), "0 or more"),
        ("router_temperature", float("inf"), "0 or more"),
        ("host_cache_hit_weight", 1.5, "0 to 1"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("tie_break", "coin", "one of seeded, lowest_id, least_recent"),
        ("decode_basis", "both", "one of potential, active"),
        ("index_policy", "lfu", "one of ttl, lru"),
        ("approximate_ttl_s", 0.0, "1e-09 or more"),
        ("predicted_ttl_s", float("nan"), "1e-09 or more"),
    ],
)
def test_a_setting_out_of_range_is_named(key: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_settings("kv", **{key: value})
    assert f"router.{key} is {value!r}" in str(caught.value)
    assert limit in str(caught.value)
