"""Each legality rule with a worker that keeps it and one that breaks it, and the two numbers that were compared."""

from __future__ import annotations

import pytest

from aiconfig.candidate import Pool
from aiconfig.formats import checkpoint_formats, searched_weights
from aiconfig.legality import Worker, budget_rejection, pair_rejection, worker_rejection
from aiconfig.reasons import REASONS, Rejection
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.models import find_model


def pool(*, gpu: str = "h100_sxm", role: str = "mixed", weights: str = "bf16", kv: str = "bf16", **layout: int) -> Pool:
    return Pool(
        role=role,
        gpu=gpu,
        layout=Layout(**layout),
        replicas=1,
        weights=weights,
        kv=kv,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )


def broken(
    model: str,
    *,
    engine: str = "vllm",
    gpu: str = "h100_sxm",
    weights: str = "bf16",
    kv: str = "bf16",
    nextn: int = 0,
    **layout: int,
) -> Rejection | None:
    worker = Worker(
        name="x",
        engine=engine,
        model=find_model(model),
        gpu=find_gpu(gpu),
        pool=pool(gpu=gpu, weights=weights, kv=kv, **layout),
        nextn=nextn,
    )
    return worker_rejection(worker)


def reason(model: str, **worker: object) -> str | None:
    found = broken(model, **worker)  # type: ignore[arg-type]
    return found.reason if found else None


@pytest.mark.parametrize(
    ("rule", "keeps", "breaks"),
    [
        ("heads_not_divisible", ("llama-3.1-8b", {"tp": 8}), ("qwen2.5-7b", {"tp": 8})),
        ("layers_too_few", ("llama-3.1-8b", {"pp": 32}), ("llama-3.1-8b", {"pp": 33})),
        ("experts_not_divisible", ("mixtral-8x7b", {"tp": 8, "ep": 8}), ("mixtral-8x7b", {"tp": 16, "ep": 16})),
        ("moe_grid", ("qwen3-30b-a3b", {"tp": 4, "ep": 4}), ("qwen3-30b-a3b", {"tp": 4, "ep": 2})),
        ("moe_grid", ("qwen3-30b-a3b", {"tp": 4, "ep": 2, "engine": "trtllm"}), ("qwen3-30b-a3b", {"tp": 2, "ep": 4})),
        ("moe_grid", ("deepseek-v3", {"dp": 8, "ep": 8, "weights": "fp8"}), ("llama-3.1-8b", {"dp": 2})),
        ("moe_grid", ("deepseek-v3", {"dp": 8, "pp": 2, "weights": "fp8"}),
         ("deepseek-v3", {"dp": 8, "pp": 2, "weights": "fp8", "engine": "sglang"})),
        ("moe_grid", ("deepseek-v3", {"dp": 8, "ep": 8, "weights": "fp8", "engine": "trtllm"}),
         ("deepseek-v3", {"tp": 2, "dp": 4, "ep": 8, "weights": "fp8", "engine": "trtllm"})),
        ("ffn_quant_block", ("qwen3-30b-a3b", {"tp": 2, "weights": "fp8"}),
         ("qwen3-30b-a3b", {"tp": 4, "weights": "fp8"})),
        ("ffn_quant_block", ("qwen3-30b-a3b", {"tp": 4, "ep": 4, "weights": "fp8"}),
         ("qwen3-30b-a3b", {"tp": 8, "weights": "fp8"})),
        ("ffn_quant_block", ("qwen3-30b-a3b", {"tp": 4}), ("mixtral-8x7b", {"dp": 3})),  # 14336 / 3, BF16
        ("dtype_unsupported", ("llama-3.1-8b", {"weights": "fp8"}), ("llama-3.1-8b", {"weights": "mxfp4"})),
        ("dtype_unsupported", ("llama-3.1-8b", {"weights": "fp8", "gpu": "a100_sxm_80"}),
         ("llama-3.1-8b", {"weights": "fp8", "gpu": "a100_sxm_80", "engine": "trtllm"})),
        ("dtype_unsupported", ("llama-3.1-8b", {"weights": "nvfp4", "gpu": "b200_sxm", "engine": "sglang"}),
         ("llama-3.1-8b", {"weights": "nvfp4", "engine": "sglang"})),
        ("dtype_unsupported", ("llama-3.1-8b", {"gpu": "mi300x"}),
         ("llama-3.1-8b", {"gpu": "mi300x", "engine": "trtllm"})),
        ("dtype_unsupported", ("llama-3.1-8b", {"kv": "fp8"}), ("llama-3.1-8b", {"kv": "fp8", "gpu": "a100_sxm_80"})),
        ("dtype_unsupported", ("deepseek-v3", {"kv": "fp8_ds_mla", "weights": "fp8"}),
         ("llama-3.1-8b", {"kv": "fp8_ds_mla"})),
        ("draft_unsupported", ("deepseek-v3", {"nextn": 1, "weights": "fp8"}), ("llama-3.1-8b", {"nextn": 1})),
    ],
)  # fmt: skip
def test_a_rule_passes_one_and_refuses_another(
    rule: str, keeps: tuple[str, dict[str, object]], breaks: tuple[str, dict[str, object]]
) -> None:
    assert reason(keeps[0], **keeps[1]) is None
    assert reason(breaks[0], **breaks[1]) == rule
    assert rule in REASONS


def test_a_rejection_carries_the_two_numbers() -> None:
    found = broken("qwen2.5-7b", tp=8)
    assert found is not None
    assert (found.needs, found.has) == (8, 28)
    assert (
        found.line() == "x: heads_not_divisible, attention heads are not divisible by tp: needs 8 heads, has 28 heads"
    )
    narrow = broken("qwen3-30b-a3b", tp=4, weights="fp8")
    assert narrow is not None
    assert (narrow.needs, narrow.has) == (128, 192)


def test_more_key_value_heads_than_ranks_is_no_condition() -> None:
    assert reason("qwen3-235b-a22b", tp=8) is None  # 4 heads: they are repeated


def test_the_budget() -> None:
    assert budget_rejection("x", 8, 8) is None
    found = budget_rejection("x", 16, 8)
    assert found is not None
    assert (found.reason, found.needs, found.has) == ("over_gpu_budget", 16, 8)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "gpu", "told"),
    [
        ("llama-3.1-8b", {"tp": 1}, {"tp": 4}, "h100_sxm", None),
        ("llama-3.1-8b", {"tp": 2}, {"tp": 3}, "h100_sxm", "2 does not divide 3"),
        ("llama-3.1-8b", {"tp": 1, "pp": 2}, {"tp": 1, "pp": 2}, "h100_sxm", None),
        ("llama-3.1-8b", {"tp": 1, "pp": 2}, {"tp": 2}, "h100_sxm", "2 pipeline stages"),
        ("llama-3.1-8b", {"kv": "fp8"}, {}, "h100_sxm", "KV is fp8"),
        ("qwen3.5-397b-a17b", {"tp": 4}, {"tp": 8}, "h100_sxm", "linear-attention state"),
        ("llama-3.1-8b", {}, {}, "rtx_4090", "no network card"),
    ],
)
def test_what_can_be_handed_over(model: str, prefill: dict, decode: dict, gpu: str, told: str | None) -> None:
    found = pair_rejection("x", find_model(model), pool(**prefill), pool(**decode), find_gpu(gpu))
    if told is None:
        assert found is None
    else:
        assert found is not None
        assert found.reason == "layout_not_transferable"
        assert told in found.detail


def test_formats_follow_the_checkpoint_and_the_gpu() -> None:
    assert checkpoint_formats(find_model("gpt-oss-120b")) == ("mxfp4",)
    assert searched_weights(find_model("gpt-oss-120b"), find_gpu("h100_sxm")) == ("mxfp4",)
    assert searched_weights(find_model("deepseek-v3"), find_gpu("h200_sxm")) == ("fp8",)
    assert searched_weights(find_model("llama-3.1-70b"), find_gpu("h100_sxm")) == ("bf16", "fp8")
    assert searched_weights(find_model("llama-3.1-70b"), find_gpu("a100_sxm_80")) == ("bf16",)
