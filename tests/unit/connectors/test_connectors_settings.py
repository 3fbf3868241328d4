"""Settings of connectors: what each mistake says, dry runs without a cluster, and advice that orders nothing."""

from __future__ import annotations

import asyncio
import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from connector_builders import GROUPS, Scaled, SteppedClock, scaled

from executors.assemble import Host, LiveCluster
from executors.connectors.build import open_connector
from executors.connectors.kubernetes_objects import KNOWN, patch_line, read_scaled
from executors.connectors.kubernetes_objects import Scaled as Scales
from executors.connectors.settings import ConnectorSettings, KubernetesSettings, VirtualSettings
from executors.starter import Model
from policies.cluster.events import WorkerStartCancelled
from policies.cluster.ids import Role
from policies.cluster.scaling import ScaleFailed
from policies.cluster.ticks import Demand, PlanReason, RoleTick, Tick
from policies.errors import CapabilityError, ConfigError, TwinError
from twin.config import Config

ROLES = {name: Role(group.role) for name, group in GROUPS.items()}
OBJECTS = {"decode": "Deployment/d", "prefill": "StatefulSet/p"}


def opened(**planner: Any) -> Any:
    return open_connector(ConnectorSettings.of(planner), ROLES, SteppedClock())


def test_processes_of_this_host_are_the_usual_way() -> None:
    assert opened() is None
    assert not ConnectorSettings().needs_discovery


@pytest.mark.parametrize(
    ("planner", "said"),
    [
        ({"connector": "nomad"}, "planner.connector is 'nomad', it must be one of local, virtual, kubernetes"),
        ({"virtual": {}}, '[planner.virtual] is given and planner.connector is local: set connector = "virtual"'),
        ({"connector": "virtual"}, "planner.virtual.store is missing"),
        ({"connector": "virtual", "virtual": {"store": "redis://x"}}, "write etcd://host:2379 without a user, or a"),
        ({"connector": "virtual", "virtual": {"store": "/no/such/folder"}}, "is no folder"),
        ({"connector": "virtual", "virtual": {"stroe": "x"}}, "planner.virtual.stroe is not known; known here: store"),
        ({"connector": "virtual", "virtual": {"store": "x", "poll_s": 0}}, "planner.virtual.poll_s is 0, it must be"),
        ({"connector": "virtual", "virtual": {"store": "x", "poll_s": "1"}}, "planner.virtual.poll_s = '1' is not a"),
        ({"connector": "virtual", "virtual": {"store": 5}}, "planner.virtual.store = 5 is not a text"),
        ({"connector": "virtual", "virtual": 5}, "planner.virtual = 5 is no table"),
        ({"connector": "kubernetes"}, "planner.kubernetes.objects is missing"),
        ({"connector": "kubernetes", "kubernetes": {"objects": {"decode": 4}}}, 'write { GROUP = "Deployment/NAME" }'),
        (
            {"connector": "kubernetes", "kubernetes": {"objects": {"decoed": "Deployment/d"}}},
            "names group 'decoed'; the worker groups are prefill, decode",
        ),
        (
            {"connector": "kubernetes", "kubernetes": {"objects": {"decode": "Pod/d"}}},
            "planner.kubernetes.objects.decode = 'Pod/d': write KIND/NAME with KIND one of Deployment, StatefulSet",
        ),
        (
            {"connector": "kubernetes", "kubernetes": {"objects": dict.fromkeys(ROLES, "Deployment/d")}},
            "groups prefill and decode are one object, Deployment default/d; give each its own",
        ),
        (
            {"connector": "kubernetes", "kubernetes": {"objects": OBJECTS, "drift_policy": "fight"}},
            "planner.kubernetes.drift_policy is 'fight', it must be one of adopt, enforce",
        ),
        (
            {"connector": "kubernetes", "kubernetes": {"objects": OBJECTS, "dry_run": "yes"}},
            "planner.kubernetes.dry_run is 'yes', it must be one of off, server, print",
        ),
    ],
)  # fmt: skip
def test_each_mistake_says_what_to_do(planner: dict[str, Any], said: str) -> None:
    with pytest.raises(TwinError) as caught:
        opened(**planner)
    assert said in str(caught.value)


def test_two_groups_of_one_number_are_refused(tmp_path: Any) -> None:
    settings = ConnectorSettings(connector="virtual", virtual=VirtualSettings(store=str(tmp_path)))
    with pytest.raises(ConfigError, match="has one num_decode, and groups a and b would both be it"):
        open_connector(settings, {"a": Role.DECODE, "b": Role.MIXED}, SteppedClock())


def test_without_the_client_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(CapabilityError, match=r"pip install 'dynatwin\[kubernetes\]'"):
        opened(connector="kubernetes", kubernetes={"objects": OBJECTS})


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("Deployment/d", "/apis/apps/v1/namespaces/ns/deployments/d/scale"),
        ("statefulset/d", "/apis/apps/v1/namespaces/ns/statefulsets/d/scale"),
        ("LeaderWorkerSet/d", "/apis/leaderworkerset.x-k8s.io/v1/namespaces/ns/leaderworkersets/d/scale"),
        (
            "DynamoGraphDeploymentScalingAdapter/d",
            "/apis/nvidia.com/v1alpha1/namespaces/ns/dynamographdeploymentscalingadapters/d/scale",
        ),
        (
            "dynamographdeploymentscalingadapters.v1beta1.nvidia.com/d",
            "/apis/nvidia.com/v1beta1/namespaces/ns/dynamographdeploymentscalingadapters/d/scale",
        ),
        ("rollouts.v1alpha1.argoproj.io/d", "/apis/argoproj.io/v1alpha1/namespaces/ns/rollouts/d/scale"),
    ],
)
def test_whatever_has_a_scale_can_be_named(text: str, path: str) -> None:
    scaled_object = read_scaled(text, "ns", "here")
    assert patch_line(scaled_object, 3) == f'PATCH {path} {{"spec":{{"replicas":3}}}}'


PRINTED = ConnectorSettings(connector="kubernetes", kubernetes=KubernetesSettings(objects=OBJECTS, dry_run="print"))


def test_a_dry_run_without_a_cluster_prints_the_patches(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: Scaled) -> None:
        await world.connect(PRINTED)
        await world.come("decode")
        world.add(1, decode=2, prefill=1)
        await world.until(world.ends)
        assert [type(end) for end in world.ends()] == [ScaleFailed]
        assert len(world.heard(WorkerStartCancelled)) == 3

    with caplog.at_level(logging.INFO):
        scaled(main)
    said = [one.message for one in caplog.records if one.message.startswith("dry run: PATCH")]
    assert said == [
        'dry run: PATCH /apis/apps/v1/namespaces/default/deployments/d/scale {"spec":{"replicas":3}}',
        'dry run: PATCH /apis/apps/v1/namespaces/default/statefulsets/p/scale {"spec":{"replicas":1}}',
    ]


def advice(final: int, reason: PlanReason = PlanReason.ADVISORY) -> Tick:
    demand = Demand(kind=None, age_s=None, num_req=None, fed=None, isl=None, osl=None, hit_rate=0.0, accept_length=1.0)
    role = RoleTick(
        role=Role.DECODE, ready=1, pending=0, draining=0, throughput=None, load=final, lookahead=None, wanted=final,
        bounded=final, final=final, reason=reason,
    )  # fmt: skip
    return Tick(number=1, due=("load",), demand=demand, forecasts=(), models=(), roles=(role,), gpus=1, budget=None)


def test_advice_is_rehearsed_once_and_never_written(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: Scaled) -> None:
        await world.connect(PRINTED)
        await world.come("decode")
        for tick in (advice(1, PlanReason.NO_CHANGE), advice(3), advice(3), advice(2)):
            world.world.scaling.advise(tick)
            await world.clock.step()
        await world.clock.waiting()
        assert not world.ends()

    with caplog.at_level(logging.INFO):
        scaled(main)
    said = [one.message[-7:] for one in caplog.records if one.message.startswith("dry run: PATCH")]
    assert said == ['as":3}}', 'as":2}}']


def test_an_order_of_no_decision_is_refused_where_counts_are_kept() -> None:
    async def main(world: Scaled) -> None:
        await world.connect(PRINTED)
        with pytest.raises(CapabilityError, match="give AddWorker a decision_id"):
            world.add(None, decode=1)

    scaled(main)


def test_a_group_without_an_object_is_refused() -> None:
    async def main(world: Scaled) -> None:
        settings = KubernetesSettings(objects={"decode": "Deployment/d"}, dry_run="print")
        await world.connect(ConnectorSettings(connector="kubernetes", kubernetes=settings))
        with pytest.raises(ConfigError, match="scales decode, and a worker of group 'prefill' was ordered"):
            world.add(1, prefill=1)

    scaled(main)


def test_workers_that_come_by_themselves_need_discovery(tmp_path: Path) -> None:
    """Nothing is opened, and nothing is written."""
    virtual = ConnectorSettings(connector="virtual", virtual=VirtualSettings(store=str(tmp_path)))

    async def main() -> None:
        host = Host(model=Model(checkpoint="", served_as="m"), pythons={}, attached={}, mock=True, connector=virtual)
        cluster = LiveCluster(Config(), host)
        try:
            with pytest.raises(ConfigError, match="say where they register, with --discovery"):
                await cluster.start()
        finally:
            await cluster.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_the_example_of_a_role_grants_what_is_asked_for(root: Path) -> None:
    text = (root / "docs" / "examples" / "planner-rbac.yaml").read_text(encoding="utf-8")
    role = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Role")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group, resource, verb in product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }
    asked = set()
    for resource in KNOWN:
        for rule in yaml.safe_load(Scales(resource=resource, namespace="ns", name="x").rule()):
            asked |= set(product(rule["apiGroups"], rule["resources"], rule["verbs"]))
    assert granted == asked
