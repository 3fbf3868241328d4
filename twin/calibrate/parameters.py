"""What is fitted: coefficients, with what is expected of them before any measurement and how far they may be from it.

Single figures trade against one another, so each is held near its prior by a ridge, and near its kin in other blocks.
"""

from __future__ import annotations

import math

from policies.frozen import frozen


@frozen
class Parameter:
    """A coefficient: `prior`, the spread (of its logarithm) from block to block, and its physical limit."""

    name: str
    prior: float
    spread: float
    limit: float = math.inf


# Priors are round figures near the fits of an earlier prototype; limits: no rate beyond the data sheet. Reading weights
# gets 5 % more, since the sheets round bandwidths.
PARAMETERS = (
    Parameter(name="e_bw", prior=0.85, spread=0.125, limit=1.05),
    Parameter(name="e_gemm", prior=0.75, spread=0.15, limit=1.0),
    Parameter(name="e_moe_bw", prior=0.7, spread=0.15, limit=1.0),
    Parameter(name="e_moe", prior=0.3, spread=0.25, limit=1.0),
    Parameter(name="e_kv", prior=0.7, spread=0.2, limit=1.0),
    Parameter(name="e_attn", prior=0.4, spread=0.25, limit=1.0),
    Parameter(name="alpha_s", prior=4e-6, spread=0.4),
    Parameter(name="e_link", prior=0.5, spread=0.3, limit=1.0),
    Parameter(name="t_launch_s", prior=30e-6, spread=0.4),
    Parameter(name="t_moe_s", prior=20e-6, spread=0.4),
    Parameter(name="h0_s", prior=1e-3, spread=0.5),
    Parameter(name="h_seq_s", prior=10e-6, spread=0.4),
    Parameter(name="h_prefill_s", prior=5e-3, spread=0.4),
    Parameter(name="t_half_tokens", prior=60.0, spread=0.4),
    Parameter(name="expert_imbalance", prior=1.0, spread=0.25),
    Parameter(name="client_s", prior=30e-3, spread=0.45),
    Parameter(name="client_s_per_token", prior=5e-6, spread=0.5),
)
NAMES = tuple(parameter.name for parameter in PARAMETERS)
OUTSIDE = ("client_s", "client_s_per_token")
"""The path outside the engine: part of a measured TTFT, never of a step."""

COMMON_SPREAD = 1.0
"""How far what all blocks have in common may be from the prior, in spreads of a block.

Wider spreads (twice for blocks, 5 times for what is common) explain configurations outside the fit no better and models
outside it worse: 29 % mean TPOT error instead of 23."""

FACTORS = ("m_decode", "m_prefill", "m_client")
"""Factors of one model, the same in all blocks: device time of decode steps, of steps with prompts; its `client_s`."""
FACTOR_SPREADS = (0.2, 0.25, 0.6)

CLIENT_PRIOR, CLIENT_SPREAD = 0.02, 0.4
"""Constant of a way of measuring other than the most frequent one, in seconds: one in each block. No factor of a model
applies to it."""

TTFT_SCALE, TPOT_SCALE = 0.2, 0.1
"""Relative errors up to which a residual counts by its square, beyond which by its size."""
TTFT_WEIGHT, TPOT_WEIGHT = 0.5, 1.0
