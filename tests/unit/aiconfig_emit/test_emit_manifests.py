"""Manifests against schemas of the fields that we emit (tests/data/schemas), and against what they are for.

Kubernetes' own schemas are asked as well where the package kubernetes-validate is installed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import fastjsonschema
import pytest
import yaml
from emit_builders import ENGINE_NAMES, agg, disagg, plan, plans, pool, wide
from hypothesis import given

from aiconfig.candidate import Candidate
from aiconfig.emit.files import emit
from aiconfig.emit.plan import Plan
from policies.errors import CapabilityError
from twin.perf.layout import Layout

SCHEMAS = Path(__file__).resolve().parents[2] / "data" / "schemas"


def checker(name: str) -> Callable[[object], object]:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(schema)


CHECKS = {path.stem: checker(path.stem) for path in sorted(SCHEMAS.glob("*.json"))}


def documents(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


def check(text: str) -> None:
    for one in documents(text):
        CHECKS[one["kind"].lower()](one)
        if one["kind"] == "ConfigMap":
            for options in one["data"].values():
                CHECKS["trtllm"](yaml.safe_load(options))


@given(plans())
def test_kubernetes_objects_keep_their_schema(made: Plan) -> None:
    check(emit(made, "k8s")["k8s/deployment.yaml"])


@given(plans())
def test_dynamo_deployments_keep_their_schema(made: Plan) -> None:
    check(emit(made, "dynamo")["k8s/dynamo.yaml"])


@given(plans())
def test_llmd_values_keep_their_schema(made: Plan) -> None:
    if made.engine == "trtllm":
        with pytest.raises(CapabilityError, match="use --as dynamo"):
            emit(made, "llm-d")
        return
    CHECKS["llmd"](yaml.safe_load(emit(made, "llm-d")["k8s/llm-d-values.yaml"]))


@given(plans())
def test_options_of_trtllm_keep_their_schema(made: Plan) -> None:
    for name, text in emit(made, made.engine).items():
        if name.endswith((".yml", ".yaml")) and "router" not in name:
            CHECKS["trtllm"](yaml.safe_load(text))


def broken(tree: object) -> Iterator[object]:
    """The tree with one thing wrong, everywhere: a key too many, a string for a number, a number for a string."""

    def walk(node: object, path: tuple) -> Iterator[tuple[tuple, object]]:
        yield path, node
        inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in inner:
            yield from walk(value, (*path, key))

    free = ("labels", "annotations", "matchLabels", "selector", "data", "services")
    for path, node in list(walk(tree, ())):
        changed = copy.deepcopy(tree)
        at = changed
        for key in path[:-1]:
            at = at[key]
        if isinstance(node, dict) and not {"services", *free} & set(path[-1:]):
            inner = at[path[-1]] if path else changed
            inner["notAField"] = 1
        elif path and isinstance(node, int | str) and not isinstance(node, bool):
            at[path[-1]] = [node]
        else:
            continue
        yield changed


@pytest.mark.parametrize("kind", ["k8s", "dynamo"])
def test_the_schemas_see_a_field_that_is_wrong(kind: str) -> None:
    (text,) = emit(plan(disagg("vllm")), kind).values()
    tried = 0
    for one in documents(text):
        for wrong in broken(one):
            if wrong == one or "kind" not in wrong or not isinstance(wrong["kind"], str):
                continue
            with pytest.raises(fastjsonschema.JsonSchemaValueException):
                CHECKS[one["kind"].lower()](wrong)
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("make", [agg, disagg])
def test_kubernetes_own_schemas_accept_them(engine: str, make: Callable[[str], Candidate]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (22 MB) to check")
    for one in documents(emit(plan(make(engine)), "k8s")["k8s/deployment.yaml"]):
        validate.validate(one, "1.30", strict=True)


# ---------------------------------------------------------------- what they are for


def by_kind(text: str, kind: str) -> list[dict]:
    return [one for one in documents(text) if one["kind"] == kind]


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_each_role_has_a_deployment_with_its_gpus_and_a_service_that_finds_it(engine: str) -> None:
    text = emit(plan(disagg(engine)), "k8s")["k8s/deployment.yaml"]
    found = {}
    for one in by_kind(text, "Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        (service,) = [s for s in by_kind(text, "Service") if s["spec"]["selector"].items() <= labels.items()]
        (container,) = one["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in one["spec"]["template"]["spec"]["volumes"]
        }
        limits = container["resources"]["limits"]
        found[labels["app.kubernetes.io/component"]] = (one["spec"]["replicas"], limits)
    assert found == {"prefill": (2, {"nvidia.com/gpu": "2"}), "decode": (1, {"nvidia.com/gpu": "4"})}


def test_a_worker_that_takes_two_hosts_is_a_leader_worker_set() -> None:
    text = emit(plan(agg("sglang", layout=Layout(tp=16))), "k8s")["k8s/deployment.yaml"]
    (one,) = by_kind(text, "LeaderWorkerSet")
    group = one["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert container["args"][-6:] == [
            "--nnodes", "2", "--node-rank", "$(NODE_RANK)", "--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000"
        ]  # fmt: skip
    assert "readinessProbe" in group["leaderTemplate"]["spec"]["containers"][0]
    assert "readinessProbe" not in group["workerTemplate"]["spec"]["containers"][0]
    (service,) = by_kind(text, "Service")
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    check(text)


def test_data_parallel_ranks_of_vllm_fill_the_second_host_without_a_server() -> None:
    text = emit(plan(wide("vllm")), "k8s")["k8s/deployment.yaml"]
    group = by_kind(text, "LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[part]["spec"]["containers"][0]["args"] for part in ("leaderTemplate", "workerTemplate"))
    assert leader[-2:] == ["--data-parallel-start-rank", "0"]
    assert worker[-3:] == ["--data-parallel-start-rank", "8", "--headless"]
    check(text)


def test_a_dynamo_worker_on_two_hosts_says_so_and_asks_for_the_gpus_of_one() -> None:
    text = emit(plan(agg("trtllm", layout=Layout(tp=16))), "dynamo")["k8s/dynamo.yaml"]
    (one,) = by_kind(text, "DynamoGraphDeployment")
    service = one["spec"]["services"]["TrtllmWorker"]
    assert service["multinode"] == {"nodeCount": 2}
    assert service["resources"] == {"limits": {"gpu": "8"}}
    check(text)


def test_trays_of_a_rack_count_as_hosts() -> None:
    assert plan(agg(gpu="gb200", layout=Layout(tp=8))).hosts_of(pool(gpu="gb200", layout=Layout(tp=8))) == 2


def test_gpus_of_amd_are_asked_for_by_their_name() -> None:
    text = emit(plan(agg("sglang", gpu="mi300x")), "k8s")["k8s/deployment.yaml"]
    assert "amd.com/gpu" in text
    assert "nvidia.com" not in text


@pytest.mark.parametrize(
    ("candidate", "kind", "text"),
    [
        (agg("trtllm", layout=Layout(tp=16)), "k8s", "use --as dynamo"),
        (agg("vllm", layout=Layout(tp=4, dp=4, ep=4)), "vllm", "ep = 4 has no flag"),
        (agg("trtllm", layout=Layout(tp=2, dp=2)), "trtllm", "over all 4 ranks or none"),
        (agg("vllm", layout=Layout(tp=12)), "k8s", "does not fill hosts of 8"),
        (agg("vllm", layout=Layout(tp=16, dp=2)), "vllm", "do not fill hosts of 8 evenly"),
        (agg("vllm", layout=Layout(tp=1, dp=32, ep=32)), "k8s", "first rank on each"),
    ],
)
def test_what_has_no_flag_is_refused_with_the_way_out(candidate: Candidate, kind: str, text: str) -> None:
    with pytest.raises(CapabilityError, match=text):
        emit(plan(candidate), kind)
