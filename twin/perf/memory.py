"""What fits: KV bytes per token, and the KV pool that an engine has left beside the weights.

Sizes are bytes of one rank (GPU) unless they say worker. Never returns a pool that does not exist: what does not fit
is refused with what is needed and what there is.
"""

from __future__ import annotations

from pathlib import Path

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.adapters import NO_ADAPTERS, Adapters
from twin.perf.formats import FLASH_MLA_BYTES, kv_bytes
from twin.perf.hardware import Gpu, find_gpu
from twin.perf.layout import Layout, Stage, rank_weight_bytes, stages
from twin.perf.models import Model, find_model
from twin.perf.names import pick

GIB = 2**30
NON_KV_BYTES = int(2.5 * GIB)
"""Activations, graphs and runtime of a rank where nothing was measured: our estimate."""
NON_KV_TP_BYTES = int(0.4 * GIB)
"""More of it if ranks communicate."""
MEMORY_SHARE = {"vllm": 0.9, "sglang": 0.88, "trtllm": 0.9}
"""Default of each engine's knob: gpu_memory_utilization, mem_fraction_static, free_gpu_memory_fraction."""


class MemoryShortage(ConfigError):
    """A model that does not fit: what one rank needs for weights and one KV block, and has for them, in bytes."""

    def __init__(self, text: str, *, weight_bytes: float, block_bytes: float, has_bytes: float) -> None:
        super().__init__(text)
        self.weight_bytes = weight_bytes
        self.block_bytes = block_bytes
        self.has_bytes = has_bytes


@frozen
class KvShape:
    """KV of one rank: bytes per token in full layers, in window layers (`window_tokens` at most), and per sequence."""

    full_bytes: int
    window_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that one sequence of `tokens` tokens holds."""
        return self.full_bytes * tokens + self.window_bytes * min(tokens, self.window_tokens) + self.state_bytes


def kv_shape(model: Model, kv: str = "bf16", tp: int = 1, stage: Stage | None = None) -> KvShape:
    """KV of one rank of `stage` (None: all layers). Below one key-value head per rank heads are repeated, not split;
    latent KV is whole on every rank."""
    if stage is None:
        stage = next(stages(model, 1))
    width = kv_bytes(kv)
    if model.latent:
        latent = model.latent.kv_rank + model.latent.rope_dim
        per_layer = FLASH_MLA_BYTES if kv == "fp8_ds_mla" else int(latent * width)
        if model.indexer:
            per_layer += model.indexer.dim  # FP8
        return KvShape(full_bytes=stage.attention_layers * per_layer)
    per_layer = int(2 * -(-model.kv_heads // tp) * model.head_dim * width)
    state = 0
    if model.linear:
        values = (model.linear.state_values + model.linear.conv_values) * stage.linear_layers // model.linear.layers
        state = 2 * values // tp  # 16 bits, whatever the KV format
    return KvShape(
        full_bytes=(stage.attention_layers - stage.window_layers) * per_layer,
        window_bytes=stage.window_layers * per_layer,
        window_tokens=model.window.tokens if model.window else 0,
        state_bytes=state,
    )


@frozen
class KvPool:
    """The KV pool of one worker (all its ranks together hold `blocks` blocks), and how it came about, per rank."""

    blocks: int
    block_size: int
    room_bytes: int  # for KV, on the tightest rank
    room_tokens: int  # what they hold, before rounding to blocks
    token_bytes: int
    weight_bytes: int
    non_kv_bytes: int  # activations, graphs, runtime; what windows and states of all sequences take; adapters

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


@frozen
class Placement:
    """A model in its formats on the GPUs of one worker."""

    model: Model
    gpu: Gpu
    layout: Layout
    weights: str
    kv: str

    def label(self) -> str:
        return f"{self.model.name} {self.weights} on {self.gpu.name} {self.layout.label()}"


def kv_pool(
    placed: Placement,
    *,
    engine: str,
    block_size: int,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float | None = None,
    non_kv_bytes: int | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> KvPool:
    """The pool on the tightest pipeline stage.

    `gpu_memory_utilization` is the engine's memory knob (None: its default); `non_kv_bytes` replaces our estimate by a
    measured figure, `adapters` come on top. Window layers and states of linear layers are set aside for `max_num_seqs`
    sequences. With attention data parallelism each rank has a pool of its own, and the worker has their sum. Raises
    `MemoryShortage` if it does not fit.
    """
    placed.layout.check(placed.model)
    usual = pick("engine", engine, MEMORY_SHARE)
    share = usual if gpu_memory_utilization is None else gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization = {share}: it is a share of the memory, more than 0 and at most 1")
    if non_kv_bytes is None:
        non_kv_bytes = NON_KV_BYTES + (NON_KV_TP_BYTES if placed.layout.tp > 1 else 0)
    pools = [
        _stage_pool(
            placed,
            stage,
            engine,
            share,
            block_size,
            max_num_seqs,
            non_kv_bytes,
            adapters.rank_bytes(placed.model, placed.layout, stage),
        )
        for stage in stages(placed.model, placed.layout.pp)
    ]
    return min(pools, key=lambda pool: pool.blocks)


def kv_pool_tokens(
    *,
    engine: str,
    model: str,
    gpu: str,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    weights: str = "bf16",
    kv: str = "bf16",
    block_size: int,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float | None = None,
    hardware: Path | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> int:
    """Tokens in the KV pool of one worker, in whole blocks: `kv_pool` for things given by name."""
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep)
    placed = Placement(model=find_model(model), gpu=find_gpu(gpu, hardware), layout=layout, weights=weights, kv=kv)
    return kv_pool(
        placed,
        engine=engine,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        adapters=adapters,
    ).tokens


def _stage_pool(
    placed: Placement,
    stage: Stage,
    engine: str,
    share: float,
    block_size: int,
    max_num_seqs: int,
    non_kv_bytes: int,
    adapter_bytes: int,
) -> KvPool:
    weight_bytes = rank_weight_bytes(placed.model, placed.layout, placed.weights, stage)
    shape = kv_shape(placed.model, placed.kv, placed.layout.tp, stage)
    if shape.full_bytes == 0:  # every layer has a window: engines then size the pool as if none had
        shape = KvShape(full_bytes=shape.window_bytes, state_bytes=shape.state_bytes)
    held = min(shape.window_tokens + block_size, shape.window_tokens * block_size)  # a window and a partial block
    held_bytes = max_num_seqs * (shape.window_bytes * held + shape.state_bytes)
    non_kv_bytes = (0 if engine == "sglang" else non_kv_bytes) + held_bytes + adapter_bytes
    mem_bytes = float(placed.gpu.mem_bytes)
    if engine == "trtllm":  # its share is of what weights and activations leave free
        has_bytes = mem_bytes - non_kv_bytes
        room_bytes = (has_bytes - weight_bytes) * share
    else:  # SGLang's activations live in the rest of the memory
        has_bytes = mem_bytes * share - non_kv_bytes
        room_bytes = has_bytes - weight_bytes
    room_tokens = int(room_bytes // shape.full_bytes)
    blocks = room_tokens // block_size
    if blocks < 1:
        raise _refusal(placed, weight_bytes, has_bytes, shape.full_bytes * block_size, adapter_bytes)
    return KvPool(
        blocks=blocks * placed.layout.dp,
        block_size=block_size,
        room_bytes=int(room_bytes),
        room_tokens=room_tokens,
        token_bytes=shape.full_bytes,
        weight_bytes=int(weight_bytes),
        non_kv_bytes=non_kv_bytes,
    )


def _refusal(
    placed: Placement, weight_bytes: float, has_bytes: float, block_bytes: int, adapter_bytes: int
) -> MemoryShortage:
    beside = f" beside {adapter_bytes / GIB:.1f} GiB of adapters" if adapter_bytes else ""
    has_bytes = max(has_bytes, 0.0)
    text = (
        f"{placed.label()} does not fit: a GPU needs {weight_bytes / GIB:.1f} GiB for weights and "
        f"{block_bytes / GIB:.3f} GiB for one KV block, and has {has_bytes / GIB:.1f} GiB for them "
        f"of its {placed.gpu.mem_bytes / GIB:.1f} GiB{beside}; raise tp or pp, or take a smaller format or a larger GPU"
    )
    return MemoryShortage(text, weight_bytes=weight_bytes, block_bytes=block_bytes, has_bytes=has_bytes)
