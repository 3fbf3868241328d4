"""Number formats of weights and KV: bytes per value, and the tensor rate that multiplies them. No GPU or model here."""

from __future__ import annotations

from typing import Literal

from twin.perf.names import pick

Rate = Literal["bf16", "int8", "fp8", "fp4"]

WEIGHT_BYTES: dict[str, float] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0 + 4.0 / 16384.0,  # one FP32 scale per 128 x 128 block
    "int8": 1.0,
    "int4": 0.516,  # groups of 128 with scale and zero point, as AWQ and GPTQ store them
    "mxfp4": 0.53125,  # one 8-bit scale per 32 values
    "nvfp4": 0.5625,  # one FP8 scale per 16 values
}

KV_BYTES: dict[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_ds_mla": 1.0}
"""`fp8_ds_mla` is FlashMLA's layout of latent attention: see `FLASH_MLA_BYTES`; elsewhere it is plain FP8."""

FLASH_MLA_BYTES = 656
"""Bytes of one token and layer in FlashMLA's FP8 layout: 512 latent values, 16 of scales, 64 BF16 rope values."""

MATH_RATE: dict[str, Rate] = {"fp8": "fp8", "int8": "int8", "mxfp4": "fp4", "nvfp4": "fp4"}
"""Tensor rate of a weight format; every other one is weight-only and multiplies in BF16."""


def weight_bytes(weights: str) -> float:
    """Bytes per weight, scales included."""
    return pick("weight format", weights, WEIGHT_BYTES)


def kv_bytes(kv: str) -> float:
    """Bytes per value in the KV cache."""
    return pick("KV format", kv, KV_BYTES)
