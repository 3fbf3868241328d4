"""What a worker's steps ask of its GPUs, in the few figures that an estimate of their energy takes.

They are seconds of one GPU at its data-sheet rates, so that a step's share of a rate is such seconds over its length.
Nothing here is measured, and nothing here knows how long a step took.
"""

from __future__ import annotations

from typing import Final

from policies.frozen import frozen
from twin.perf.coefficients import Coefficients
from twin.perf.costs import step_costs
from twin.perf.memory import Placement

_FULL_RATES: Final = Coefficients(
    e_bw=1.0, e_gemm=1.0, e_moe_bw=1.0, e_moe=1.0, e_kv=1.0, e_attn=1.0, alpha_s=0.0, e_link=1.0, t_launch_s=0.0
)


@frozen
class Power:
    """Of one GPU of a worker: its rated power, and seconds at full rate of what steps do, an even share for each GPU.

    `token_multiply_s` per token of the worker's step; reading: `step_read_s` of dense weights per step,
    `ctx_token_read_s` per token of context of the worker's decodes, `experts_read_s` for all routed experts, of which a
    step of t tokens reads the share 1 - `expert_missed` ** t.
    """

    tdp_w: float
    token_multiply_s: float
    step_read_s: float
    ctx_token_read_s: float
    experts_read_s: float
    expert_missed: float


def power(placed: Placement) -> Power:
    """The figures of a model on the GPUs of one worker; prefill attention and window layers' KV are left out."""
    costs = step_costs(placed, _FULL_RATES)
    layout = placed.layout
    multiply_s = costs.token_s / layout.dp + (costs.experts.token_s if costs.experts else 0.0)
    return Power(
        tdp_w=placed.gpu.tdp_w,
        token_multiply_s=multiply_s / layout.pp,
        step_read_s=costs.weights_s / layout.pp,
        ctx_token_read_s=costs.ctx_token_s / (layout.dp * layout.pp),
        experts_read_s=costs.experts.read_s / layout.pp if costs.experts else 0.0,
        expert_missed=costs.experts.missed if costs.experts else 1.0,
    )
