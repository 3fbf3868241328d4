"""Number formats that a search may choose among: what checkpoints exist in, and what a GPU and an engine can run.

Quality is not modelled: a smaller format is never called equal to the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twin.perf.formats import MATH_RATE
from twin.perf.hardware import Gpu
from twin.perf.models import Model

CHECKPOINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt-oss-20b": ("mxfp4",),
    "gpt-oss-120b": ("mxfp4",),
    "deepseek-v3": ("fp8", "int4", "nvfp4"),
    "kimi-k2": ("fp8", "int4", "nvfp4"),
}
"""Formats in which models are published that were never published in BF16; the first one is the model's own."""

USUAL: Final = ("bf16", "fp8", "int8", "int4", "nvfp4", "fp16")
"""Formats of all other models: their own, and those that tools make of it."""

WEIGHT_ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("fp8", "mxfp4", "nvfp4", "int4"),
    "sglang": ("fp8", "mxfp4", "int4"),
    "trtllm": ("mxfp4", "int4"),
}
"""Formats that an engine multiplies in BF16 on a GPU that lacks their rate. Read off the engines' documents in 2025;
not checked against every version."""

AMD: Final = ("cdna3", "cdna4")
"""GPU families that TensorRT-LLM does not run on."""

BLOCKS: Final[Mapping[str, int]] = {"fp8": 128, "int4": 128, "nvfp4": 16}
"""Values that share a scale along the width that tensor parallelism splits; engines pad MXFP4 themselves."""


def checkpoint_formats(model: Model) -> tuple[str, ...]:
    """Weight formats that the model is to be had in, its own first."""
    return CHECKPOINTS.get(model.name, USUAL)


def searched_weights(model: Model, gpu: Gpu) -> tuple[str, ...]:
    """What is tried if the user names no format: the model's own, and FP8 where the GPU multiplies it."""
    own, *others = checkpoint_formats(model)
    return (own, *(("fp8",) if "fp8" in others and gpu.fp8_flops else ()))


def searched_kv(model: Model, gpu: Gpu) -> tuple[str, ...]:
    """What is tried if the user names no KV format."""
    return ("bf16", "fp8") if gpu.fp8_flops else ("bf16",)


def has_rate(gpu: Gpu, weights: str) -> bool:
    """Whether the GPU multiplies weights of this format at the format's own rate."""
    rates = {"fp8": gpu.fp8_flops, "fp4": gpu.fp4_flops, "int8": gpu.int8_flops, "bf16": gpu.bf16_flops}
    rate = MATH_RATE.get(weights, "bf16")
    return rates[rate] is not None


def weights_refusal(engine: str, model: Model, gpu: Gpu, weights: str) -> str | None:
    """Why the engine cannot serve these weights on this GPU, or None."""
    if engine == "trtllm" and gpu.family in AMD:
        return f"trtllm does not run on {gpu.name}"
    if weights not in checkpoint_formats(model):
        return f"{model.name} is not to be had in {weights}, only in {', '.join(checkpoint_formats(model))}"
    if not has_rate(gpu, weights) and weights not in WEIGHT_ONLY[engine]:
        return f"{gpu.name} does not multiply {weights}, and {engine} cannot do it in BF16 instead"
    return None


def kv_refusal(engine: str, model: Model, gpu: Gpu, kv: str) -> str | None:
    """Why the engine cannot keep KV in this format on this GPU, or None."""
    if kv == "fp8_ds_mla" and (model.latent is None or engine == "trtllm"):
        return f"fp8_ds_mla is a layout of latent attention in vllm and sglang, not for {model.name} on {engine}"
    if kv.startswith("fp8") and not gpu.fp8_flops:
        return f"{gpu.name} has no FP8"
    return None
