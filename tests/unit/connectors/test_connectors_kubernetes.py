"""The Kubernetes connector: the official client against an API server of the test's, and the world's own events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from connector_builders import Scaled, scaled
from kubernetes_server import ApiServer, recorded, serving

from executors.connectors.kubernetes import KubernetesConnector
from executors.connectors.settings import ConnectorSettings, KubernetesSettings
from policies.cluster.events import (
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.scaling import ScaleDone, ScaleFailed
from policies.errors import ConfigError

pytestmark = pytest.mark.optional
pytest.importorskip("kubernetes", reason="needs the official client: pip install 'dynatwin[kubernetes]'")

OBJECTS = {"decode": "Deployment/vllm-decode", "prefill": "LeaderWorkerSet/sglang-prefill"}
Play = Callable[[Scaled, ApiServer], Coroutine[Any, Any, None]]


def settings(api: ApiServer, folder: Path, **more: Any) -> ConnectorSettings:
    given = {"objects": OBJECTS, "namespace": "serving", "kubeconfig": api.kubeconfig(folder), **more}
    return ConnectorSettings(connector="kubernetes", kubernetes=KubernetesSettings(**given))


def play(folder: Path, main: Play, api: ApiServer | None = None, **more: Any) -> ApiServer:
    """Two decode workers and a prefill worker are there, and the connector is open."""
    api = api or ApiServer()
    api.add("deployment")
    api.add("leaderworkerset")

    async def body(world: Scaled) -> None:
        async with serving(api):
            await world.connect(settings(api, folder, **more))
            for group in ("decode", "decode", "prefill"):
                await world.come(group)
            await main(world, api)

    scaled(body)
    return api


def connector(world: Scaled) -> KubernetesConnector:
    found = world.world.scaling.carrier.connector  # type: ignore[attr-defined]
    assert isinstance(found, KubernetesConnector)
    return found


def deployment(api: ApiServer) -> dict[str, Any]:
    return next(one for one in api.objects.values() if one["kind"] == "Deployment")


async def written(world: Scaled, api: ApiServer, n: int) -> None:
    await world.until(lambda: len(api.patches()) >= n)


def test_one_decision_is_one_patch_of_each_role(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=2, prefill=1)
        starting = world.heard(WorkerStarting)
        assert [(one.group, one.gpus) for one in starting] == [("decode", 1), ("decode", 1), ("prefill", 2)]
        await written(world, api, 2)
        for group in ("decode", "prefill", "decode"):
            await world.come(group)
        assert {up.worker_id for up in world.heard(WorkerUp)[3:]} == {one.worker_id for one in starting}
        await world.until(world.ends)
        assert [type(end) for end in world.ends()] == [ScaleDone]

    api = play(tmp_path, main)
    assert sorted(api.patches()) == [
        ("sglang-prefill", {"spec": {"replicas": 2}}),
        ("vllm-decode", {"spec": {"replicas": 4}}),
    ]
    patch = next(call for call in api.calls if call.method == "PATCH")
    assert (patch.content_type, patch.query["fieldManager"]) == ("application/merge-patch+json", "dynatwin-planner")


def test_done_needs_the_platform_and_the_workers(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=1)
        await written(world, api, 1)
        await world.until(lambda: deployment(api)["status"]["readyReplicas"] == 3)
        for _ in range(3):
            await world.clock.step()
        assert not world.ends(), "the pod is ready, and nobody has seen the worker"
        await world.come("decode")
        await world.until(world.ends)

    play(tmp_path, main)


def test_a_status_of_an_older_generation_is_not_believed(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=1)
        await written(world, api, 1)
        await world.come("decode")
        deployment(api)["status"].update(observedGeneration=4, replicas=3, readyReplicas=3)  # its controller is slow
        deployment(api)["x-steps"] = 50
        for _ in range(3):
            await world.clock.step()
        await world.clock.waiting()
        assert not world.ends()
        assert "has not seen generation 5" in world.world.scaling.carrier.waits_for  # type: ignore[attr-defined]
        await world.until(world.ends)

    play(tmp_path, main)


def test_a_decision_takes_from_what_was_asked_for_not_from_what_is_up(tmp_path: Path) -> None:
    """Four replicas, of which two are up: one more is five, and takes nobody away."""

    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=1)
        await written(world, api, 1)

    api = ApiServer()
    original = api.add
    api.add = lambda name: api.set(original(name), 4) or api  # type: ignore[method-assign,return-value,assignment,func-returns-value]
    play(tmp_path, main, api)
    assert api.patches() == [("vllm-decode", {"spec": {"replicas": 5}})]


def test_who_goes_is_the_choice_of_the_platform(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        first, second, _ = world.world.fleet.workers.values()
        world.drain(1, first)
        await written(world, api, 1)
        world.go(second)
        assert [stays.worker_id for stays in world.heard(WorkerRecalled)] == [first.worker_id]
        await world.until(world.ends)
        assert isinstance(world.ends()[0], ScaleDone)
        assert list(world.world.controller.view.workers) == [first.worker_id, 2]

    api = play(tmp_path, main)
    assert api.patches() == [("vllm-decode", {"spec": {"replicas": 1}})]


def test_a_conflict_is_read_again_and_the_change_added_to_what_is_there(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.refuse["PATCH", "scale"] = [409]
        api.between = lambda: api.set(deployment(api), 5)
        world.add(1, decode=1)
        await written(world, api, 2)
        assert api.patches()[-1] == ("vllm-decode", {"spec": {"replicas": 6}})

    play(tmp_path, main)


def test_the_fourth_conflict_is_the_last(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.refuse["PATCH", "scale"] = [409] * 9
        world.add(1, decode=1)
        await world.until(world.ends)
        (failed,) = world.ends()
        assert isinstance(failed, ScaleFailed)
        assert "409" in failed.reason
        assert len(world.heard(WorkerStartFailed)) == 1
        assert api.refuse["PATCH", "scale"] == [409] * 5

    play(tmp_path, main)


def test_a_busy_server_is_asked_again_later(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.refuse["PATCH", "scale"] = [429, 503]
        await world.clock.waiting()
        begin_s = world.clock.now()
        world.add(1, decode=1)
        await written(world, api, 3)
        assert world.clock.now() - begin_s >= 9.0, "7 s as the server said, then 2 s of its own"
        assert connector(world)._api.retried == 2

    api = play(tmp_path, main)
    assert api.patches()[-1] == ("vllm-decode", {"spec": {"replicas": 3}})


def test_half_a_decision_is_taken_back(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.refuse["PATCH", "scale"] = [200, 403]
        world.add(1, decode=1, prefill=1)
        await world.until(world.ends)
        assert isinstance(world.ends()[0], ScaleFailed)
        assert deployment(api)["spec"]["replicas"] == 2

    play(tmp_path, main)


def test_replicas_that_never_get_ready_are_given_up_with_their_reason(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.stuck = True
        world.add(1, decode=1)
        await world.until(world.ends)
        (failed,) = world.ends()
        assert isinstance(failed, ScaleFailed)
        assert "not so after 60 s (decode 2 of 3)" in failed.reason
        assert "Unschedulable: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu." in failed.reason
        assert len(world.heard(WorkerStartFailed)) == 1
        await written(world, api, 2)
        assert deployment(api)["spec"]["replicas"] == 2, "GPUs that never came are not waited for any more"
        world.add(2, prefill=1)  # the other role still scales
        await written(world, api, 3)

    play(tmp_path, main, timeout_s=60.0)


def test_a_start_that_is_called_off_is_not_asked_for_any_more(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=2)
        await written(world, api, 1)
        one, _ = world.heard(WorkerStarting)
        world.cancel(one.worker_id)
        assert [gone.worker_id for gone in world.heard(WorkerStartCancelled)] == [one.worker_id]
        await written(world, api, 2)

    api = play(tmp_path, main)
    assert [body["spec"]["replicas"] for _, body in api.patches()] == [4, 3]


@pytest.mark.parametrize(("policy", "replicas", "said"), [("adopt", 5, "adopted"), ("enforce", 2, "set back")])
def test_a_hand_edit_is_seen_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, replicas: int, said: str
) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        api.set(deployment(api), 5)
        for _ in range(4):
            await world.clock.step()
        await world.clock.waiting()
        assert deployment(api)["spec"]["replicas"] == replicas
        assert connector(world).external_changes == 1

    with caplog.at_level(logging.WARNING):
        play(tmp_path, main, drift_policy=policy)
    told = [one.message for one in caplog.records if "somebody" in one.message]
    assert told == [f"Deployment serving/vllm-decode: somebody set replicas from 2 to 5: {said}"]


def test_an_edit_under_an_open_decision_is_what_it_waits_for(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=1)
        await written(world, api, 1)
        api.set(deployment(api), 4)
        for _ in range(2):
            await world.come("decode")
        await world.until(world.ends)
        assert isinstance(world.ends()[0], ScaleDone)

    play(tmp_path, main)


def test_an_order_that_a_hand_edit_has_overtaken_ends(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=1)
        await written(world, api, 1)
        api.set(deployment(api), 2)
        await world.until(world.ends)
        assert isinstance(world.ends()[0], ScaleDone)
        assert len(world.heard(WorkerStartCancelled)) == 1

    play(tmp_path, main)


# ---------------------------------------------------------------- what is refused at the start


def fails_to_open(folder: Path, api: ApiServer, **more: Any) -> str:
    async def main(world: Scaled, api: ApiServer) -> None:
        raise AssertionError("it opened")

    with pytest.raises(ConfigError) as caught:
        play(folder, main, api, **more)
    assert api.patches() == []
    return str(caught.value)


@pytest.mark.parametrize("call", [("GET", "scale"), ("PATCH", "scale"), ("GET", "horizontalpodautoscalers")])
def test_a_right_that_is_missing_is_named_with_its_rule(tmp_path: Path, call: tuple[str, str]) -> None:
    said = fails_to_open(tmp_path, ApiServer(refuse={call: [403]}))
    assert "403" in said
    assert '{"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]}' in said


def test_an_object_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = fails_to_open(tmp_path, ApiServer(), objects={"decode": "Deployment/typo"})
    assert "404" in said
    assert "Is there Deployment serving/typo, of apps/v1?" in said


def test_an_autoscaler_of_the_same_object_is_refused(tmp_path: Path) -> None:
    said = fails_to_open(tmp_path, ApiServer(autoscalers=recorded("autoscalers")))
    assert "Deployment serving/vllm-decode is scaled by HorizontalPodAutoscaler decode-hpa already" in said


def test_no_cluster_is_said(tmp_path: Path) -> None:
    async def main(world: Scaled) -> None:
        missing = str(tmp_path / "no-such-kubeconfig")
        kubernetes = KubernetesSettings(objects=OBJECTS, kubeconfig=missing)
        with pytest.raises(ConfigError, match="no Kubernetes cluster is configured"):
            await world.connect(ConnectorSettings(connector="kubernetes", kubernetes=kubernetes))

    scaled(main)


# ---------------------------------------------------------------- dry runs


def test_a_dry_run_is_checked_by_the_server_and_changes_nothing(tmp_path: Path) -> None:
    async def main(world: Scaled, api: ApiServer) -> None:
        world.add(1, decode=2)
        await world.until(world.ends)
        (failed,) = world.ends()
        assert isinstance(failed, ScaleFailed)
        assert failed.reason == (
            'dry run: PATCH /apis/apps/v1/namespaces/serving/deployments/vllm-decode/scale {"spec":{"replicas":4}}'
        )
        assert len(world.heard(WorkerStartCancelled)) == 2

    api = play(tmp_path, main, dry_run="server")
    assert api.patches() == []
    last = [call for call in api.calls if call.method == "PATCH"][-1]
    assert (last.query["dryRun"], last.body) == ("All", {"spec": {"replicas": 4}})
