"""What a deployment's GPUs draw at a load, in closed form: what `reports.energy` says of runs, from means of steps.

Power is an estimate in a simulation too, from rated power and what steps ask of a GPU; nothing of it was measured.
"""

from __future__ import annotations

import math

from aiconfig.candidate import Candidate
from aiconfig.engines import tokens_per_step
from aiconfig.estimate import Estimate
from aiconfig.steps import Steps
from aiconfig.workload import Workload
from reports.energy import READING_SHARE, energy_j


def power_w(candidate: Candidate, workload: Workload, estimate: Estimate, steps: tuple[Steps, ...]) -> float | None:
    """Watts of all GPUs that are used, idle ones of a busy deployment included; None where the estimate has no TPOT to
    tell decode steps from. `steps` are those of each pool."""
    total_w = 0.0
    for pool, one in zip(candidate.pools, steps, strict=True):
        rps = estimate.requests_per_s / pool.replicas
        used = _prompts(one, rps) if pool.role != "decode" else 0.0
        if pool.role != "prefill" and workload.mean_osl > 1.0:
            tpot_s = estimate.value("tpot", "mean")
            if tpot_s is None:
                return None
            used += _decodes(candidate, workload, one, rps, tpot_s)
        total_w += pool.replicas * energy_j(1.0, min(1.0, used), pool.worker_gpus, one.power.tdp_w)
    return total_w


def _prompts(steps: Steps, rps: float) -> float:
    """Seconds at full power, a second, of a worker's prompts: products of their tokens, or one reading of weights."""
    power, tokens = steps.power, steps.new_tokens
    touched = 1.0 - power.expert_missed**tokens
    read_s = power.step_read_s + power.experts_read_s * touched
    return rps * max(power.token_multiply_s * tokens, READING_SHARE * read_s)


def _decodes(candidate: Candidate, workload: Workload, steps: Steps, rps: float, tpot_s: float) -> float:
    """The same of its decode steps: as many as follow from TPOT while anybody decodes. Who asks again when
    answered leaves no gaps; else requests come at random."""
    power, gaps = steps.power, workload.mean_osl - 1.0
    decoding_s = tpot_s * gaps
    batch = rps * decoding_s
    of_request = gaps / tokens_per_step(candidate.nextn)
    busy = min(1.0, batch) if workload.arrivals == "closed" else -math.expm1(-batch)
    steps_rate = of_request / decoding_s * busy
    if not steps_rate:
        return 0.0
    in_step = of_request * rps / steps_rate  # requests
    tokens = in_step * (candidate.nextn + 1)
    touched = 1.0 - power.expert_missed**tokens
    read_s = power.step_read_s + power.experts_read_s * touched + power.ctx_token_read_s * in_step * steps.ctx_tokens
    return float(steps_rate * max(power.token_multiply_s * tokens, READING_SHARE * read_s))
