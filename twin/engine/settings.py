"""What one simulated engine is configured with. Defaults live in `twin/config.py`."""

from __future__ import annotations

from policies.frozen import frozen


@frozen
class Speculation:
    """Draft tokens that a decode step verifies: the k-th holds with chance `accept_rates[k]` if all before it did.

    `seed` is the run's. `in_prefill`: the step that completes a prompt emits a burst too and pays for a decode, as the
    reference simulator has it (docs/parity.md).
    """

    accept_rates: tuple[float, ...]
    seed: int
    in_prefill: bool = False


@frozen
class HostTierSettings:
    """`blocks` of `block_bytes` in host memory, loaded at `load_bytes_per_s` where loads cross no links of the run.
    `trigger`: blocks go down when they are evicted from the device ("on_evict"), or as soon as they are complete
    ("on_store"). `overlap` (SGLang): the step that needs them computes layer by layer behind their loads, else after
    them. With ranks, each has such a tier.
    """

    blocks: int
    block_bytes: int
    load_bytes_per_s: float
    trigger: str
    overlap: bool = True


@frozen
class Layers:
    """Layers of a pipeline `stage` (the deepest) and of the whole `model`; the same without a pipeline."""

    stage: int
    model: int


@frozen
class EngineSettings:
    """Sizes of one engine: `blocks` of `block_size` tokens, at most `max_num_seqs` running requests and
    `max_num_batched_tokens` tokens in a step.

    `exclusive_prefill`: a step is one whole prompt or a decode step, prompts first. `preemption` is "lifo" or "fifo".
    `fifo_skip` and `abort_when_stuck` are behaviours of the reference simulator (docs/parity.md). `leap` False computes
    every step on its own; the results are the same. `ranks` > 1: attention data parallelism, all sizes are those of one
    rank; `prefill_interval` is then the number of steps between chances for new prompts of a rank that decodes, and
    `balance_wait` (0: off) between those of prompts for which there are none on some other rank.
    `max_loras`: adapters in one batch at most (None: no limit). `tiers`: a block manager keeps tiers below the pool;
    with `layers` a prompt is computed layer by layer behind what comes up for it, else when all has come.
    """

    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefix_caching: bool
    chunked_prefill: bool
    exclusive_prefill: bool
    preemption: str
    fifo_skip: bool = False
    abort_when_stuck: bool = False
    leap: bool = True
    ranks: int = 1
    prefill_interval: int = 1
    balance_wait: int = 0
    speculation: Speculation | None = None
    host: HostTierSettings | None = None
    max_loras: int | None = None
    tiers: bool = False
    layers: Layers | None = None

    @property
    def longest_prompt_tokens(self) -> int:
        """The longest prompt that the pool can hold and go on with."""
        return self.blocks * self.block_size


@frozen
class SglangSettings(EngineSettings):
    """`schedule_policy` is "fifo" or "lpm" (longest cached prefix first). A prefill step computes at most
    `chunked_prefill_size` tokens and lets in at most `max_prefill_tokens`; after one, `prefill_decode_interval` decode
    steps let nobody in. Of a request's outputs still to come, `clip_max_new_tokens` count for admission. While requests
    decode, new ones are seen every `recv_interval` steps.
    `free_recompute`: on a decode worker, computing again after a retraction takes no time (the reference's rule).
    """

    schedule_policy: str
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_conservativeness: float
    clip_max_new_tokens: int
    prefill_decode_interval: int
    free_recompute: bool = False
    recv_interval: int = 1
