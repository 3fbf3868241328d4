"""Manifests against schemas of the fields that we emit (tests/data/schemas), and against what they are for.

Kubernetes' own schemas are asked as well where the package kubernetes-validate is installed.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
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


def component(one: dict) -> str:
    return str(one["metadata"].get("labels", {}).get("app.kubernetes.io/component"))


def check(text: str) -> None:
    for one in documents(text):
        of_router = component(one) == "router"
        CHECKS["router" if of_router and one["kind"] == "Deployment" else one["kind"].lower()](one)
        if one["kind"] == "ConfigMap" and not of_router:
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
        if component(one) == "router":
            continue
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


def test_gpus_of_amd_are_asked_for_by_their_name_and_get_images_for_them() -> None:
    made = plan(agg("vllm", gpu="mi300x"), engine_version="0.32.0")
    text = emit(made, "k8s")["k8s/deployment.yaml"]
    assert "amd.com/gpu" in text
    assert "nvidia.com" not in text
    (one,) = by_kind(text, "Deployment")
    assert one["spec"]["template"]["spec"]["containers"][0]["image"] == "vllm/vllm-openai-rocm:v0.32.0"
    values = yaml.safe_load(emit(made, "llm-d")["k8s/llm-d-values.yaml"])
    assert values["accelerator"] == {"type": "amd"}
    assert values["decode"]["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}


def test_an_image_that_cannot_be_named_has_to_be_given() -> None:
    amd = agg("sglang", gpu="mi300x")
    with pytest.raises(CapabilityError, match="give --image"):
        emit(plan(amd), "k8s")
    text = emit(plan(amd, image="registry.test/sglang:rocm"), "k8s")["k8s/deployment.yaml"]
    assert "image: registry.test/sglang:rocm" in text


def test_hosts_of_a_group_find_their_leader_by_the_service_that_its_controller_makes() -> None:
    """LeaderWorkerSet makes a headless Service of its own name unless there is one: ours must not take the name."""
    for engine in ("vllm", "sglang"):
        text = emit(plan(wide(engine)), "k8s")["k8s/deployment.yaml"]
        groups = {one["metadata"]["name"] for one in by_kind(text, "LeaderWorkerSet")}
        services = {one["metadata"]["name"] for one in by_kind(text, "Service")}
        assert groups
        assert services
        assert not groups & services


def test_the_router_of_sglang_finds_every_worker_and_the_port_where_prefill_workers_introduce_themselves() -> None:
    candidate = disagg("sglang")
    prefill = pool("prefill", layout=Layout(tp=16), replicas=1)
    text = emit(plan(replace(candidate, pools=(prefill, candidate.pools[1]))), "k8s")["k8s/deployment.yaml"]
    (router,) = [one for one in by_kind(text, "Deployment") if component(one) == "router"]
    pod = router["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    (group,) = by_kind(text, "LeaderWorkerSet")
    leader = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]
    assert selected(args, "--prefill-selector") == {**leader["labels"], LEADER: "0"}
    (decode,) = [one for one in by_kind(text, "Deployment") if component(one) == "decode"]
    assert selected(args, "--decode-selector") == decode["spec"]["template"]["metadata"]["labels"]
    assert leader["annotations"] == {"sglang.ai/bootstrap-port": "8998"}
    (role,), (binding,) = by_kind(text, "Role"), by_kind(text, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [pod["serviceAccountName"]]
    check(text)


LEADER = "leaderworkerset.sigs.k8s.io/worker-index"


def selected(args: list[str], flag: str) -> dict[str, str]:
    """The labels that stand behind the flag, up to the next flag."""
    behind = args[args.index(flag) + 1 :]
    return dict(word.split("=") for word in itertools.takewhile(lambda word: not word.startswith("--"), behind))


def test_the_router_of_trtllm_is_told_the_services_of_both_roles() -> None:
    text = emit(plan(disagg("trtllm")), "k8s")["k8s/deployment.yaml"]
    names = {component(one): one["metadata"]["name"] for one in by_kind(text, "Service")}
    (options,) = [one for one in by_kind(text, "ConfigMap") if component(one) == "router"]
    told = yaml.safe_load(options["data"]["router.yml"])
    assert told["context_servers"]["urls"] == [f"{names['prefill']}:8000"]
    assert told["generation_servers"]["urls"] == [f"{names['decode']}:8000"]
    (router,) = [one for one in by_kind(text, "Deployment") if component(one) == "router"]
    (volume,) = router["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == options["metadata"]["name"]


def test_what_vllm_lacks_in_front_of_prefill_and_decode_workers_is_said() -> None:
    text = emit(plan(disagg("vllm")), "k8s")["k8s/deployment.yaml"]
    assert "vLLM brings no router" in text
    assert "vllm-router\n  --vllm-pd-disaggregation" in emit(plan(disagg("vllm")), "vllm")["launch/router.sh"]


def test_the_sidecar_of_llm_d_speaks_the_engines_way_of_handing_over() -> None:
    proxies = {
        engine: yaml.safe_load(emit(plan(disagg(engine)), "llm-d")["k8s/llm-d-values.yaml"])["routing"]["proxy"]
        for engine in ("vllm", "sglang")
    }
    assert proxies["sglang"]["connector"] == "sglang"
    assert "connector" not in proxies["vllm"]
    agg_values = yaml.safe_load(emit(plan(agg("sglang")), "llm-d")["k8s/llm-d-values.yaml"])
    assert agg_values["routing"]["proxy"]["enabled"] is False


@pytest.mark.parametrize(
    ("dynamo", "engine", "flag", "absent"),
    [
        ("1.3.0", "sglang", "--enable-dp-attention", "--attn-dp-size"),  # its image brings SGLang 0.5.14
        ("0.9.0", "vllm", "--kv-cache-dtype\n", "float16"),  # vLLM 0.14.1
    ],
)
def test_workers_of_dynamo_take_the_flags_of_the_engine_in_its_image(
    dynamo: str, engine: str, flag: str, absent: str
) -> None:
    text = emit(plan(wide(engine), dynamo_version=dynamo), "dynamo")["k8s/dynamo.yaml"]
    assert flag in text
    assert absent not in text
    assert f"-runtime:{dynamo}" in text


def test_another_engine_than_that_of_dynamos_image_is_said() -> None:
    text = emit(plan(wide("sglang"), engine_version="0.5.23"), "dynamo")["k8s/dynamo.yaml"]
    assert "note: flags are those of sglang 0.5.23, and the image of Dynamo brings 0.5.14" in text
    own = emit(plan(wide("sglang"), engine_version="0.5.23", image="mine:1"), "dynamo")["k8s/dynamo.yaml"]
    assert "the image of Dynamo brings" not in own


@pytest.mark.parametrize(
    ("candidate", "kind", "text"),
    [
        (agg("trtllm", layout=Layout(tp=16)), "k8s", "use --as dynamo"),
        (agg("vllm", layout=Layout(tp=4, dp=4, ep=4)), "vllm", "ep = 4 has no flag"),
        (agg("trtllm", layout=Layout(tp=2, dp=2)), "trtllm", "over all 4 ranks or none"),
        (agg("vllm", layout=Layout(tp=12)), "k8s", "does not fill hosts of 8"),
        (agg("vllm", layout=Layout(tp=16, dp=2)), "vllm", "do not fill hosts of 8 evenly"),
        (agg("vllm", layout=Layout(tp=1, dp=32, ep=32)), "k8s", "first rank on each"),
        (agg("vllm", gpu="mi300x"), "dynamo", "GPUs of NVIDIA; use --as k8s"),
    ],
)
def test_what_has_no_flag_is_refused_with_the_way_out(candidate: Candidate, kind: str, text: str) -> None:
    with pytest.raises(CapabilityError, match=text):
        emit(plan(candidate), kind)
