"""What most of a deployment's time goes to, in one word for people: from the parts of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from aiconfig.steps import Steps
from twin.perf.protocol import PrefillChunk
from twin.perf.roofline import StepParts


def binding(steps: Steps, decoding: float, prompts_too: bool, gaps: float) -> str:
    """The largest of the `shares` of a step of so many decodes, with its part of the prompts if they are computed on
    the same rank."""
    shares = dict(step_shares(steps, max(1, round(decoding))))
    if prompts_too:
        per_step = max(1, round(decoding)) / max(1.0, gaps)
        for name, seconds in prompt_shares(steps).items():
            shares[name] = shares.get(name, 0.0) + per_step * seconds
    return max(sorted(shares), key=lambda name: shares[name])


def step_shares(steps: Steps, batch: int) -> Mapping[str, float]:
    """Seconds of a step of `batch` decodes on each rank: reading weights, products, reading KV, links, host, layers."""
    dp = steps.placed.layout.dp
    ctx_tokens = round(batch * dp * steps.ctx_tokens)
    return _named(steps, steps.base.parts((), batch * dp, ctx_tokens, 0, 0), batch)


def prompt_shares(steps: Steps) -> Mapping[str, float]:
    """Seconds of a step of one prompt on an idle rank."""
    chunk = PrefillChunk(steps.new_tokens, steps.past_tokens, 0, True)
    return _named(steps, steps.base.parts((chunk,), 0, 0, 0, 0), steps.new_tokens)


def _named(steps: Steps, parts: StepParts, tokens: int) -> Mapping[str, float]:
    costs = steps.base.costs
    reads = costs.weights_s >= costs.token_s * tokens
    return {
        "weights": (parts.gemm_s if reads else 0.0) + parts.experts_s,
        "compute": (0.0 if reads else parts.gemm_s) + parts.attention_prefill_s,
        "kv": parts.attention_decode_s,
        "links": parts.comm_s,
        "host": parts.host_s,
        "layers": parts.layers_s,
    }
