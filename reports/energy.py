"""An estimate of the energy that GPUs draw, from the steps that they did: never measured, and shown as an estimate.

It knows the rated power and what steps ask of a GPU (handed over in `PowerMeta`), not what the GPU is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from reports.columns import F64, Bools, Columns
from reports.report import PowerMeta

IDLE_SHARE: Final = 0.25
"""Of the rated power: what a GPU draws that does nothing."""
READING_SHARE: Final = 0.6
"""A GPU that only reads memory draws this share of what one that multiplies draws, above idle."""

ENERGY_COLUMNS: Final = ("worker_id", "kind", "start_s", "end_s", "steps", "decodes", "ctx_tokens", "prefill_tokens")


def use_s(batch: Columns, rows: Bools, power: PowerMeta) -> F64:
    """Seconds at full power of each step or leap: its length times max(multiply share, 0.6 * bandwidth share)."""
    length_s = (batch.floats("end_s") - batch.floats("start_s"))[rows]
    steps, decodes = batch.floats("steps")[rows], batch.floats("decodes")[rows]
    tokens = decodes * steps + batch.floats("prefill_tokens")[rows]
    ctx_tokens = batch.floats("ctx_tokens")[rows] * steps + decodes * steps * (steps - 1) / 2
    multiply_s = power.token_multiply_s * tokens
    touched = 1.0 - power.expert_missed ** (tokens / np.maximum(steps, 1.0))
    read_s = steps * (power.step_read_s + power.experts_read_s * touched) + power.ctx_token_read_s * ctx_tokens
    used: F64 = np.minimum(np.maximum(multiply_s, READING_SHARE * read_s), length_s)
    return used


def energy_j(held_s: float, used_s: float, gpus: int, tdp_w: float) -> float:
    """Energy = idle power * time held + (rated - idle power) * time at full power, for each GPU of a worker; idle power
    is a quarter of the rated one. An estimate: nothing of it was measured.
    """
    return gpus * tdp_w * (IDLE_SHARE * held_s + (1.0 - IDLE_SHARE) * used_s)
