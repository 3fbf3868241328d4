"""Who may get a request, in which order the filters speak, what a client may ask for, and who is preferred."""

from __future__ import annotations

from math import exp, tanh

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Dispatch, Reject
from policies.cluster.events import BusyThresholdsChanged, Hints, TaintWeight, Threshold
from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from policies.router.build import MODES
from policies.router.overload import BusySettings
from policies.router.refusals import REFUSALS, Counted

PROMPT = list(range(10))
EVERY = [mode for mode in MODES if mode != "direct"]


def refused(action: object) -> tuple[str, str]:
    assert isinstance(action, Reject), action
    return action.code, action.reason


def taints(**weights: float) -> Hints:
    return Hints(preferred_taints=tuple(TaintWeight(taint=t, weight=w) for t, w in weights.items()))


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize("mode", EVERY)
def test_only_workers_that_are_allowed(mode: str) -> None:
    scene = Scene(router(mode), 4)
    hints = Hints(allowed=(WorkerId(1), WorkerId(3), WorkerId(9)))
    assert {scene.send(f"r{n}", hints=hints) for n in range(20)} == {1, 3}
    assert refused(scene.arrive("p", hint=0, hints=hints)) == (
        "pinned_not_allowed",
        "worker 0 was asked for and is not among the workers allowed",
    )
    scene.draining(1)
    scene.draining(3)
    assert refused(scene.arrive("x", hints=hints))[0] == "all_fenced"


@pytest.mark.parametrize("mode", EVERY)
def test_a_required_taint(mode: str) -> None:
    ups = [worker(0), worker(1, taints=("zone=a", "new")), worker(2, taints=("zone=a",))]
    scene = Scene(router(mode, required_taints=("zone=a",)), ups)
    assert {scene.send(f"r{n}") for n in range(20)} == {1, 2}
    both = Hints(required_taints=("new",))
    assert {scene.send(f"s{n}", hints=both) for n in range(5)} == {1}
    assert refused(scene.arrive("x", hints=Hints(required_taints=("gone",)))) == (
        "missing_taint",
        "no worker has the required taint gone",
    )
    assert refused(scene.arrive("p", hint=0)) == (
        "pinned_not_allowed",
        "worker 0 was asked for and is without the required taint zone=a",
    )


def test_models_of_workers() -> None:
    scene = Scene(router(), [worker(0, models=("a",)), worker(1, models=("a", "b")), worker(2)])
    assert {scene.send(f"r{n}", hints=Hints(model="b")) for n in range(4)} == {1, 2}
    scene.lost(2)
    assert refused(scene.arrive("x", hints=Hints(model="c"))) == ("unknown_model", "no worker serves model 'c'")
    assert scene.send("any") in (0, 1)


def test_turns_of_a_model_are_its_own() -> None:
    scene = Scene(router(), [worker(0, models=("a", "b")), worker(1, models=("a", "b")), worker(2, models=("a",))])
    sent = [scene.send(f"r{n}", hints=Hints(model="ab"[n % 2])) for n in range(12)]
    assert sent[0::2] == [0, 1, 2, 0, 1, 2]
    assert sent[1::2] == [0, 1, 0, 1, 0, 1]


def test_the_first_filter_that_fails_is_the_reason() -> None:
    limits = BusySettings(engine_running=1, engine_queue=2)
    ups = [worker(n, taints=("x",) if n else ()) for n in range(4)]
    scene = Scene(router("least-loaded", busy=limits, explain=True), ups)
    for n in range(3):
        scene.send(f"full{n}", hint=2)
    scene.draining(0)
    scene.draining(3)
    allowed = tuple(WorkerId(n) for n in (1, 2, 3))
    sent = scene.arrive("r", hints=Hints(allowed=allowed, required_taints=("x",)))
    assert isinstance(sent, Dispatch)
    assert [(c.worker_id, c.why_not) for c in sent.candidates] == [
        (0, "not among the workers allowed"),
        (1, None),
        (2, "full: 3 requests there"),
        (3, "draining"),
    ]


@pytest.mark.parametrize("mode", EVERY)
def test_a_preference_is_met_if_it_may_be(mode: str) -> None:
    scene = Scene(router(mode), 3)
    like = Hints(preferred=WorkerId(2))
    sent = scene.arrive("r0", hints=like)
    assert isinstance(sent, Dispatch)
    assert (sent.worker_id, sent.rule) == (2, "preferred")
    scene.draining(2)
    assert scene.send("r1", hints=like) in (0, 1)


# ---------------------------------------------------------------- taints that are preferred


@pytest.mark.parametrize(
    ("weights", "cost"),
    [({"fast": 1.0}, 9.33843), ({"fast": -1.0}, 42.83375), ({"fast": 0.5, "near": 0.5, "old": -0.25}, 10.59713)],
)
def test_k14_preferred_taints_through_the_whole_policy(weights: dict[str, float], cost: float) -> None:
    """K1 costs 20; a worker with the taints costs that times exp(-tanh(their sum)), one without them 20."""
    ups = [worker(0), worker(1, taints=("fast", "near", "old"))]
    scene = Scene(router("kv", explain=True), ups)
    sent = scene.arrive("r", hints=taints(**weights))
    assert isinstance(sent, Dispatch)
    assert [c.cost for c in sent.candidates] == [20.0, pytest.approx(cost, abs=5e-6)]
    assert sent.worker_id == (1 if cost < 20 else 0)


def test_preferred_taints_of_the_router_and_of_the_request_add_up() -> None:
    settings = {"preferred_taints": (TaintWeight(taint="fast", weight=0.5),), "explain": True}
    scene = Scene(router("kv", **settings), [worker(0), worker(1, taints=("fast",))])
    sent = scene.arrive("r", hints=taints(fast=0.25))
    assert isinstance(sent, Dispatch)
    assert [c.cost for c in sent.candidates] == [20.0, 20.0 * exp(-tanh(0.75))]


# ---------------------------------------------------------------- load


def test_k15_a_shared_prompt_does_not_flood_the_worker_that_has_it() -> None:
    scene = Scene(router("kv", explain=True), 2)
    prompt = list(range(101))
    scene.stored(0, prompt[:100])
    for n in range(2):
        scene.send(f"hot{n}", isl=6400, hint=0, keys=list(range(1000 + 100 * n, 1100 + 100 * n)))
    sent = scene.arrive("r", isl=6464, keys=prompt)
    assert isinstance(sent, Dispatch)
    assert sent.worker_id == 1


@pytest.mark.parametrize(
    ("limits", "isl", "most"),
    [
        (BusySettings(decode_blocks_share=0.02), 640, 3),  # above 20 of 1000 blocks: after the third of 10
        (BusySettings(prefill_tokens=1280), 640, 3),
        (BusySettings(prefill_share=0.15625), 640, 3),  # 1280 of 8192
        (BusySettings(engine_running=1, engine_queue=2), 640, 3),
    ],
)
@pytest.mark.parametrize("mode", EVERY)
def test_an_overloaded_worker_gets_nothing_even_if_others_are_free(
    mode: str, limits: BusySettings, isl: int, most: int
) -> None:
    scene = Scene(router(mode, busy=limits), 2)
    for n in range(most):
        assert scene.send(f"r{n}", isl=isl, hint=0, keys=list(range(100 * n, 100 * n + 10))) == 0
    code, _ = refused(scene.arrive("pinned", hint=0))
    assert code == ("engine_limit" if limits.engine_queue else "all_busy")
    assert {scene.send(f"x{n}", isl=64) for n in range(2)} == {1}
    for n in range(most):
        scene.first_token(f"r{n}")
        scene.finish(f"r{n}")
    assert scene.send("again", hint=0) == 0


def test_when_all_are_overloaded_requests_are_shed() -> None:
    scene = Scene(router(busy=BusySettings(prefill_tokens=600)), 2)
    assert [scene.send(f"r{n}") for n in range(2)] == [0, 1]
    assert refused(scene.arrive("x")) == (
        "all_busy",
        "all 2 workers that could are overloaded or full; one is overloaded: 640 prompt tokens to compute",
    )
    assert scene.policy.counters() == {"decisions": 2, "rejected_all_busy": 1, "unknown_totals": 0}  # type: ignore[attr-defined]
    scene.first_token("r1")
    assert scene.send("y") == 1


def test_shared_blocks_count_once_against_the_limit() -> None:
    scene = Scene(router(busy=BusySettings(decode_blocks_share=0.015)), 1)
    for n in range(30):
        assert scene.send(f"same{n}", keys=PROMPT) == 0  # 10 blocks, whoever shares them
    scene.send("other", isl=384, keys=list(range(100, 106)))
    assert refused(scene.arrive("x"))[0] == "all_busy"


def test_a_limit_that_cannot_be_told_does_not_count_and_is_counted() -> None:
    limits = BusySettings(decode_blocks_share=0.0, prefill_share=0.0)
    scene = Scene(router(busy=limits), [worker(0, total_blocks=None, max_batched_tokens=None)])
    assert [scene.send(f"r{n}") for n in range(3)] == [0, 0, 0]
    assert scene.policy.counters()["unknown_totals"] == 6  # type: ignore[attr-defined]


def test_limits_change_while_it_runs_and_null_clears_one() -> None:
    scene = Scene(router(busy=BusySettings(prefill_tokens=10, engine_running=1, engine_queue=2)), 1)

    def change(**limits: float | None) -> None:
        changes = tuple(Threshold(name=name, limit=limit) for name, limit in limits.items())
        scene.post(BusyThresholdsChanged(at_s=scene.next_s, changes=changes))

    scene.send("a")
    assert refused(scene.arrive("x0"))[0] == "all_busy"
    change(prefill_tokens=None)
    assert [scene.send(f"r{n}") for n in range(2)] == [0, 0]
    assert refused(scene.arrive("x1"))[0] == "engine_limit"  # not named, so it stands
    change(engine_queue=None, decode_blocks_share=0.02)
    assert refused(scene.arrive("x2"))[0] == "all_busy"
    change(decode_blocks_share=0.5)
    assert scene.send("b") == 0
    with pytest.raises(ConfigError, match="no limit 'kv'; it has decode_blocks_share"):
        change(kv=1)


@pytest.mark.parametrize("limits", [{"engine_queue": 1}, {"engine_running": 0}, {"prefill_tokens": -1}])
def test_limits_have_limits(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"router\.busy"):
        BusySettings(**limits)


# ---------------------------------------------------------------- refusals


def test_every_refusal_has_a_status_and_is_counted_as_something() -> None:
    shed = {code for code, kind in REFUSALS.items() if kind.counted is Counted.OVERLOAD}
    assert shed == {"all_busy", "queue_limit", "engine_limit", "queue_timeout"}
    assert {REFUSALS[code].status for code in ("no_endpoints", "all_fenced", "pinned_dead", "missing_taint")} == {503}
    assert {REFUSALS[code].status for code in ("pinned_not_allowed", "unknown_pin", "bad_hint")} == {400}
    assert (REFUSALS["unknown_model"].status, REFUSALS["all_busy"].status) == (404, None)


# ---------------------------------------------------------------- prefill decay


def test_a_prompt_weighs_less_the_longer_it_is_computed() -> None:
    scene = Scene(router("kv", explain=True, prefill_tokens_per_s=1000.0), 1)
    scene.send("a", isl=1000)
    scene.wait(0.499)
    scene.send("b", isl=2000)
    scene.wait(0.249)

    def seen(name: str) -> float:
        action = scene.arrive(name, isl=64)
        assert isinstance(action, Dispatch)
        scene.cancel(name)
        return action.candidates[0].active_prefill_tokens

    assert seen("x") == pytest.approx(250 + 2000)
    scene.first_token("a")
    before_s = scene.now_s
    scene.wait(1.0)
    assert seen("y") == pytest.approx(2000 - 1000 * (scene.now_s - before_s), abs=1.1)
    scene.wait(5.0)
    assert seen("z") == 0


# ---------------------------------------------------------------- device-aware-weighted


def mixed(cpu_open: int, gpu_open: int, **more: object) -> Scene:
    ups = [worker(0, on_cpu=True), worker(1, on_cpu=True), worker(2), worker(3)]
    scene = Scene(router("device-aware-weighted", tie_break="lowest_id", **more), ups)
    for n in range(cpu_open):
        scene.send(f"cpu{n}", hint=n % 2)
    for n in range(gpu_open):
        scene.send(f"gpu{n}", hint=2 + n % 2)
    return scene


@pytest.mark.parametrize(("cpu", "gpu", "chosen"), [(4, 40, 0), (5, 40, 2), (0, 7, 3), (0, 8, 0), (0, 0, 2)])
def test_workers_without_gpus_get_their_share(cpu: int, gpu: int, chosen: int) -> None:
    assert mixed(cpu, gpu).send("r") == chosen


def test_one_kind_of_workers_alone() -> None:
    for on_cpu in (True, False):
        scene = Scene(
            router("device-aware-weighted", tie_break="lowest_id"), [worker(n, on_cpu=on_cpu) for n in (0, 1)]
        )
        assert [scene.send(f"r{n}") for n in range(4)] == [0, 1, 0, 1]


def test_the_ratio_is_needed() -> None:
    with pytest.raises(ConfigError, match="device_ratio is not given"):
        router("device-aware-weighted", device_ratio=None)
