"""Why a candidate is not in the answer: a code, and the two numbers that were compared.

Codes are counted in every result and listed with `--explain`. None is raised as an error: a space that is empty is an
answer too.
"""

from __future__ import annotations

from policies.frozen import frozen

REASONS = {
    "heads_not_divisible": "attention heads are not divisible by tp",
    "ffn_quant_block": "a rank's share of the feed-forward width is no multiple of the quantisation block",
    "experts_not_divisible": "experts are not divisible by ep",
    "moe_grid": "the engine cannot split experts so",
    "layers_too_few": "fewer layers than pipeline stages",
    "dtype_unsupported": "the GPU or the engine lacks the number format",
    "draft_unsupported": "the model has no draft layers",
    "step_too_small": "a step has fewer tokens than the engine must be able to put into it",
    "weights_do_not_fit": "weights are larger than the memory",
    "kv_too_small": "the KV pool holds too few tokens",
    "context_too_long": "one request is longer than the KV pool",
    "uncalibrated": "outside the calibrated range of the step times, and the search is strict",
    "over_gpu_budget": "more GPUs than there are",
    "host_memory": "the KV tier is larger than the memory of the hosts",
    "layout_not_transferable": "KV cannot be handed from the prefill to the decode layout",
    "ttft_bound": "an idle deployment misses the TTFT limit",
    "tpot_bound": "an idle deployment misses the TPOT limit",
    "e2e_bound": "an idle deployment misses the limit on whole requests",
    "unstable": "the queue grows at this load",
    "dominated": "another candidate is at least as good in everything",
    "not_simulated": "scored by formula, and not among the best that were simulated",
    "failed": "the simulation refused it",
    "no_effect": "so served it would do what it does when served plainly",
}
"""Every code with what it means; tests show that each is reached."""


@frozen
class Rejection:
    """Why a candidate (by `name`) was left out: `needs` against `has`, both in `unit`, with `detail` for people."""

    name: str
    reason: str
    needs: float | None = None
    has: float | None = None
    unit: str = ""
    detail: str = ""

    def line(self) -> str:
        """One line for people."""
        compared = ""
        if self.needs is not None and self.has is not None:
            unit = f" {self.unit}" if self.unit else ""
            compared = f": needs {self.needs:.6g}{unit}, has {self.has:.6g}{unit}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}: {self.reason}, {REASONS[self.reason]}{compared}{detail}"
