"""A worker of TensorRT-LLM: its settings from a pool, and a pool from its flags and its file of options.

Attention data parallelism there is all ranks or none; batch sizes and tokens are those of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiconfig.candidate import Pool
from aiconfig.emit.found import Found, Shape, kept, model_of
from aiconfig.emit.plan import DEFAULT, SEARCH, Item, Plan
from policies.errors import CapabilityError
from twin.config import KIND_DEFAULTS
from twin.perf.layout import Layout


def items(plan: Plan, pool: Pool) -> Iterator[Item]:
    """The settings of one worker, in the order in which they are written."""
    layout = pool.layout
    if layout.dp > 1 and layout.tp > 1:
        raise CapabilityError(
            f"trtllm has attention data parallelism over all {layout.ranks} ranks or none, not tp = {layout.tp} with "
            f"dp = {layout.dp}"
        )
    yield Item(key="model", value=plan.loads, origin=plan.loads_origin)
    yield Item(key="backend", value="pytorch", origin=DEFAULT)
    yield Item(key="tp", value=layout.ranks, origin=SEARCH)
    yield Item(key="pp", value=layout.pp, origin=SEARCH)
    if layout.ep > 1:
        yield Item(key="ep", value=layout.ep, origin=SEARCH)
    yield Item(key="max_num_seqs", value=pool.max_num_seqs, origin=SEARCH)
    yield Item(key="max_num_batched_tokens", value=pool.max_num_batched_tokens, origin=SEARCH)
    yield plan.max_model_len
    yield Item(key="kv", value=pool.kv, origin=SEARCH)
    yield plan.setting(pool, "gpu_memory_utilization", "memory_share")
    yield plan.setting(pool, "prefix_caching")
    block = plan.setting(pool, "block_size")
    if block.value != KIND_DEFAULTS["trtllm"]["block_size"]:
        yield block
    yield Item(key="dp_attention", value=layout.dp > 1, origin=SEARCH)
    yield plan.setting(pool, "chunked_prefill")
    yield Item(key="graph_padding", value=True, origin=DEFAULT)
    yield Item(key="graph_batch", value=pool.max_num_seqs, origin=SEARCH)
    yield plan.setting(pool, "capacity_policy")
    if plan.candidate.nextn:
        yield Item(key="draft_algorithm", value="mtp", origin=SEARCH)
        yield Item(key="draft_steps", value=plan.candidate.nextn, origin=SEARCH)
    if pool.role != "mixed":
        longest = plan.max_model_len
        yield Item(key="transfer", value="DEFAULT", origin=DEFAULT)
        yield Item(key="transfer_tokens", value=longest.value, origin=longest.origin)
    if pool.role == "prefill":
        yield Item(key="no_overlap", value=True, origin=f"{DEFAULT}: context servers do not overlap")


def shape(found: Found) -> Shape:
    """What flags and options say of one worker."""
    ranks = found.integer("tp", 1)
    spread = found.on("dp_attention")
    kv, kv_notice = found.ours("kv", "bf16")
    seqs, tokens, notices = found.sizes()
    algorithm, nextn, drafts_notice = found.text("draft_algorithm"), 0, None
    if algorithm == "MTP":
        nextn = found.integer("draft_steps", 1)
    elif algorithm is not None:
        drafts_notice = f"speculative_config.decoding_type {algorithm} has no counterpart here: left out"
    role = None
    if "transfer" not in found.values:
        role = "mixed"
    elif found.on("no_overlap"):
        role = "prefill"
    return Shape(
        model=model_of(found),
        layout=Layout(
            tp=1 if spread else ranks,
            pp=found.integer("pp", 1),
            dp=ranks if spread else 1,
            ep=found.integer("ep", 1),
        ),
        kv=kv,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        nextn=nextn,
        role=role,
        notices=(*notices, *kept(kv_notice, drafts_notice)),
    )
