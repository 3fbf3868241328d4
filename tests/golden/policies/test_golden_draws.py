"""Golden numbers of the counter-based draws: seed 42, requests r1 to r4, and what each use makes of them."""

from __future__ import annotations

import pytest
from builders import Scene, router

from policies.cluster.draws import attempt_key, draw, pick
from policies.router.select import softmax

REQUESTS = ("r1", "r2", "r3", "r4")


def draws(purpose: str, k: int = 0) -> list[float]:
    return [draw(42, purpose, request_id, k) for request_id in REQUESTS]


def about(*numbers: float) -> object:
    return pytest.approx(list(numbers), abs=5e-7)


def test_seed_zero_to_the_last_bit() -> None:
    assert draw(0, "tie", "r1", 0) == 0.8158864820947772


def test_tie() -> None:
    us = draws("tie")
    assert us == about(0.110399, 0.440397, 0.861788, 0.291871)
    assert [pick(u, 3) for u in us] == [0, 1, 2, 0]
    assert [pick(u, 2) for u in us] == [0, 0, 1, 0]


def test_softmax() -> None:
    us = draws("softmax")
    assert us == about(0.548681, 0.535913, 0.856489, 0.621165)
    assert [softmax(u, [14, 10, 11], 0.5) for u in us] == [1, 1, 2, 1]


def test_random() -> None:
    assert draws("random") == about(0.452628, 0.205788, 0.400866, 0.364991)
    scene = Scene(router("random", seed=42), workers=3)
    assert [scene.send(r) for r in REQUESTS] == [1, 0, 1, 1]


def test_power_of_two_pairs() -> None:
    assert draws("p2c", 0) == about(0.402010, 0.402773, 0.345042, 0.532075)
    assert draws("p2c", 1) == about(0.461628, 0.758403, 0.771607, 0.489551)
    pairs = {"r1": (1, 2), "r2": (1, 3), "r3": (1, 3), "r4": (2, 1)}
    for request_id, (first, second) in pairs.items():
        idle = Scene(router("power-of-two", seed=42), workers=4)
        assert idle.send(request_id) == first  # a tie goes to the first of the pair
        busy = Scene(router("power-of-two", seed=42), workers=4)
        busy.send("busy", hint=first)
        assert busy.send(request_id) == second


def test_a_later_attempt_draws_other_numbers() -> None:
    assert attempt_key("r1", 0) == "r1"
    assert attempt_key("r1", 2) == "r1#2"
    assert draw(42, "tie", attempt_key("r1", 1)) != draw(42, "tie", "r1")
