"""The space: what is enumerated, in which order, and that nothing is twice or over the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiconfig.candidate import Candidate
from aiconfig.layouts import layouts_of, ratios
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest, search_request
from aiconfig.space import Legal, Space
from aiconfig.workload import Workload


def legal(**given: object) -> list[Candidate]:
    return [one.candidate for one in Space(search_request(given)).legal()]


def reasons(**given: object) -> set[str]:
    return {one.reason for one in Space(search_request(given)) if isinstance(one, Rejection)}


def test_one_gpu_has_one_layout() -> None:
    found = legal(gpus=1, modes=("agg",), weights=("bf16",), kv=("bf16",), max_num_batched_tokens=(8192,))
    assert [one.name for one in found] == ["vllm-agg-1xtp1-h100_sxm-bf16-kvbf16-b1024-t8192"]


def test_replicas_fill_the_budget_and_fewer_are_there_too() -> None:
    found = legal(gpus=8, modes=("agg",), weights=("bf16",), kv=("bf16",), max_num_batched_tokens=(8192,))
    sizes = [(one.pools[0].layout.label(), one.pools[0].replicas) for one in found]
    assert [n for label, n in sizes if label == "TP1"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [n for label, n in sizes if label == "TP4"] == [1, 2]
    assert [n for label, n in sizes if label == "TP2 PP4"] == [1]


def test_ratios_are_units_and_their_multiples() -> None:
    assert ratios(4, 1, 1) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    assert ratios(26, 2, 4)[-1][0] <= 13
    assert (7, 3) in ratios(26, 2, 4)
    assert ratios(1, 1, 1) == []
    assert (9, 1) not in ratios(64, 1, 1)
    assert (16, 2) in ratios(64, 1, 1)


def test_prefill_and_decode_workers_may_be_on_different_gpus() -> None:
    found = legal(gpus=4, modes=("disagg",), prefill_gpu="h200_sxm", kv=("bf16",), weights=("bf16",))
    assert {tuple(pool.gpu for pool in one.pools) for one in found} == {("h200_sxm", "h100_sxm")}


def test_the_same_request_gives_the_same_order() -> None:
    request = search_request({"model": "qwen3-30b-a3b", "engines": ("vllm", "trtllm"), "gpus": 4})
    assert list(Space(request)) == list(Space(request))


def test_the_larger_batch_is_tried_only_where_there_is_room_for_it() -> None:
    small = legal(modes=("agg",), gpus=1, weights=("bf16",), kv=("bf16",), workload=Workload(isl=8000, osl=1000))
    assert {one.pools[0].max_num_seqs for one in small} == {256}
    assert {one.pools[0].max_num_seqs for one in legal(modes=("agg",), gpus=1, max_num_seqs=(64, 512))} == {64, 512}


def test_whole_prompts_have_room_in_a_step() -> None:
    found = legal(engines=("trtllm",), workload=Workload(isl=10_000, osl=10))
    assert {pool.max_num_batched_tokens for one in found for pool in one.pools} == {11_264}


def test_a_step_has_room_for_what_the_engine_must_put_into_it() -> None:
    small: dict[str, object] = {"modes": ("agg",), "gpus": 1, "max_num_batched_tokens": (512,)}
    assert {one.pools[0].max_num_seqs for one in legal(**small)} == {256}, "1,024 sequences would not start"
    assert reasons(**(small | {"max_num_seqs": (513,)})) == {"step_too_small", "over_gpu_budget"}
    assert legal(**(small | {"max_num_seqs": (512,)}))
    whole = {"engines": ("trtllm",), **small}
    assert "step_too_small" in reasons(**whole, workload=Workload(isl=513, osl=8))
    assert legal(**whole, workload=Workload(isl=512, osl=8))


def test_reasons_of_a_space() -> None:
    assert reasons(gpus=2) == {"over_gpu_budget"}
    assert "weights_do_not_fit" in reasons(model="llama-3.1-70b")
    assert "context_too_long" in reasons(workload=Workload(isl=600_000, osl=10))
    assert "heads_not_divisible" in reasons(model="qwen2.5-7b")
    assert "layout_not_transferable" in reasons(model="qwen3.5-397b-a17b", gpu="b200_sxm", modes=("disagg",), gpus=16)
    assert "moe_grid" in reasons(model="qwen3-30b-a3b", engines=("sglang",), modes=("agg",))
    assert "ffn_quant_block" in reasons(model="qwen3-30b-a3b", weights=("fp8",))
    assert "dtype_unsupported" in reasons(gpu="a100_sxm_80", kv=("fp8",))
    assert "draft_unsupported" in reasons(nextn=(1,), modes=("agg",))


def test_wide_expert_parallelism_crosses_hosts_only_as_far_as_there_are_gpus() -> None:
    request = search_request({"model": "deepseek-v3", "gpu": "h200_sxm", "gpus": 32})
    assert max(layout.ranks for layout in layouts_of(request, "vllm")) == 32
    assert max(layout.tp for layout in layouts_of(request, "vllm")) == 8


def test_a_large_space_says_so() -> None:
    assert not Space(SearchRequest()).is_large
    assert Space(
        search_request({"model": "deepseek-v3", "gpu": "b200_sxm", "gpus": 32, "engines": ("trtllm",)})
    ).is_large


def test_dimensions_name_what_is_varied() -> None:
    found = Space(SearchRequest()).dimensions()
    assert found["engine"] == ("vllm",)
    assert found["weights.mixed"] == ("bf16", "fp8")
    assert len(found["layout.vllm"]) == 12  # tp 1 to 8, pp 1, 2, 4


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
@settings(max_examples=15)
@given(gpus=st.integers(1, 12), engine=st.sampled_from(["vllm", "sglang", "trtllm"]))
def test_nothing_is_twice_and_nothing_over_the_budget(model: str, gpus: int, engine: str) -> None:
    found = list(Space(search_request({"model": model, "gpus": gpus, "engines": (engine,)})))
    names = [one.candidate.name for one in found if isinstance(one, Legal)]
    assert len(set(names)) == len(names)
    assert all(one.candidate.gpus <= gpus for one in found if isinstance(one, Legal))


@settings(max_examples=20)
@given(gpus=st.integers(1, 20), more=st.integers(0, 8), engine=st.sampled_from(["vllm", "trtllm"]))
def test_more_gpus_never_take_a_legal_point_away(gpus: int, more: int, engine: str) -> None:
    fewer = {one.name for one in legal(gpus=gpus, engines=(engine,), kv=("bf16",))}
    assert fewer <= {one.name for one in legal(gpus=gpus + more, engines=(engine,), kv=("bf16",))}
