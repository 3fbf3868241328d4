"""A worker of vLLM: its settings from a pool, and a pool from its flags.

vLLM counts sequences and tokens per data-parallel rank, and splits experts over all ranks or not at all. Both roles of
a disaggregated deployment have the same flags; a router in front of them makes the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiconfig.candidate import Pool
from aiconfig.emit.flags import Plain
from aiconfig.emit.found import Found, Shape, kept, model_of, stated_weights
from aiconfig.emit.plan import DEFAULT, SEARCH, Item, Plan, quantised
from policies.errors import CapabilityError, ConfigError
from twin.config import EngineConfig
from twin.perf.layout import Layout

NIXL: Plain = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def items(plan: Plan, pool: Pool) -> Iterator[Item]:
    """The settings of one worker, in the order in which they are written."""
    layout = pool.layout
    if layout.ep > 1 and layout.ep != layout.ranks:
        raise CapabilityError(
            f"vllm splits experts over all {layout.ranks} ranks or over none; ep = {layout.ep} has no flag"
        )
    yield Item(key="model", value=plan.loads, origin=plan.loads_origin)
    yield Item(key="tp", value=layout.tp, origin=SEARCH)
    if layout.pp > 1:
        yield Item(key="pp", value=layout.pp, origin=SEARCH)
    if layout.dp > 1:
        yield Item(key="dp", value=layout.dp, origin=SEARCH)
    if layout.ep > 1:
        yield Item(key="expert_parallel", value=True, origin=SEARCH)
    yield from quantised(plan, pool)
    yield Item(key="kv", value=pool.kv, origin=SEARCH)
    yield plan.max_model_len
    yield Item(key="max_num_seqs", value=pool.max_num_seqs, origin=SEARCH)
    yield Item(key="max_num_batched_tokens", value=pool.max_num_batched_tokens, origin=SEARCH)
    yield plan.setting(pool, "gpu_memory_utilization", "memory_share")
    block_size = plan.setting(pool, "block_size")
    if block_size.value != EngineConfig().block_size:  # left alone, vLLM takes what its attention backend likes
        yield block_size
    yield plan.setting(pool, "prefix_caching")
    yield plan.setting(pool, "chunked_prefill")
    if plan.candidate.nextn:
        method = str(plan.flags["draft_method"].spelled("mtp"))
        drafts: Plain = {"method": method, "num_speculative_tokens": plan.candidate.nextn}
        yield Item(key="speculation", value=drafts, origin=SEARCH)
    if pool.role != "mixed":
        yield Item(key="kv_transfer", value=NIXL, origin=DEFAULT)


def shape(found: Found) -> Shape:
    """What the flags say of one worker."""
    ranks = found.integer("tp", 1) * found.integer("dp", 1)
    kv, kv_notice = found.ours("kv", "bf16")
    seqs, tokens, notices = found.sizes()
    weights, weights_notice = stated_weights(found)
    layout = Layout(
        tp=found.integer("tp", 1),
        pp=found.integer("pp", 1),
        dp=found.integer("dp", 1),
        ep=ranks if found.on("expert_parallel") else 1,
    )
    nextn, drafts_notice = _drafts(found)
    transfer_notice = None
    if "kv_transfer" in found.values and "role" not in found.facts:
        transfer_notice = "vllm has the same flags for prefill and decode workers; say --role"
    return Shape(
        model=model_of(found),
        layout=layout,
        kv=kv,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        nextn=nextn,
        weights=weights,
        notices=(*notices, *kept(kv_notice, weights_notice, drafts_notice, transfer_notice)),
    )


def _drafts(found: Found) -> tuple[int, str | None]:
    config = found.values.get("speculation")
    if config is None:
        return 0, None
    assert isinstance(config, dict)
    method, count = config.get("method"), config.get("num_speculative_tokens")
    if method not in ("mtp", "deepseek_mtp"):
        return 0, f"--speculative-config method {method!r} has no counterpart here: left out"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{found.where}: --speculative-config num_speculative_tokens {count!r} is not a count")
    return count, None
