"""What LoRA adapters take of a GPU's memory: two thin matrices beside every projection of attention and dense MLP.

Sliced over the ranks as vLLM does without `fully_sharded_loras`: what a projection splits, its adapter splits on that
side, the other matrix is whole on every rank. Never counts routed experts, embedding or head.
"""

from __future__ import annotations

from policies.errors import CapabilityError
from policies.frozen import frozen
from twin.perf.layout import Layout, Stage
from twin.perf.models import Model

VALUE_BYTES = 2
"""Adapters are kept in 16 bits, whatever the format of the weights."""


@frozen
class Adapters:
    """`count` adapters in GPU memory, room for each up to `rank`."""

    count: int
    rank: int

    def rank_bytes(self, model: Model, layout: Layout, stage: Stage) -> int:
        """Bytes on one GPU of a pipeline stage. Raises CapabilityError for attention that is not grouped-query."""
        if not self.count:
            return 0
        if model.latent or model.linear:
            raise CapabilityError(
                f"loras: what adapters of {model.name} take in memory is not known (latent or linear attention); "
                "give engine.kv_blocks"
            )
        mlp_layers = stage.mlp_layers if model.ffn else 0
        widths = stage.attention_layers * _attention(model, layout.tp) + mlp_layers * _mlp(model, layout.tp)
        return VALUE_BYTES * self.count * self.rank * widths


NO_ADAPTERS = Adapters(count=0, rank=1)


def _attention(model: Model, tp: int) -> int:
    """Widths of both matrices of q, k, v (split by output) and o (split by input) of one layer on one rank."""
    query = model.heads * model.head_dim // tp
    value = -(-model.kv_heads // tp) * model.head_dim
    gates = 2 if model.gated_query else 1
    return (model.hidden + gates * query) + 2 * (model.hidden + value) + (query + model.hidden)


def _mlp(model: Model, tp: int) -> int:
    """The same of gate and up (split by output) and down (split by input)."""
    inner = -(-model.ffn // tp)
    return 2 * (model.hidden + inner) + (inner + model.hidden)
