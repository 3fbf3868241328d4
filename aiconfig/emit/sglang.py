"""A worker of SGLang: its settings from a pool, and a pool from its flags.

SGLang's tensor-parallel size counts all ranks of a stage, of which attention data parallelism takes a part. Running
requests and tokens of a chunk are those of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aiconfig.candidate import Pool
from aiconfig.emit.found import Found, Shape, kept, model_of, stated_weights
from aiconfig.emit.plan import BOOTSTRAP_PORT, DEFAULT, SEARCH, Item, Plan, quantised
from policies.errors import CapabilityError, ConfigError
from twin.config import KIND_DEFAULTS
from twin.perf.layout import Layout

NO_CHUNKS = -1
"""`--chunked-prefill-size` that turns chunks off."""


def items(plan: Plan, pool: Pool) -> Iterator[Item]:
    """The settings of one worker, in the order in which they are written."""
    layout, flags = pool.layout, plan.flags
    yield Item(key="model", value=plan.loads, origin=plan.loads_origin)
    yield Item(key="tp", value=layout.ranks, origin=SEARCH)
    if layout.pp > 1:
        yield Item(key="pp", value=layout.pp, origin=SEARCH)
    if layout.dp > 1:
        yield Item(key="dp", value=layout.dp, origin=SEARCH)
        if "dp_old" not in flags:
            yield Item(key="dp_attention", value=True, origin=SEARCH)
    if layout.ep > 1:
        if "ep_moe" in flags and layout.ep != layout.ranks:
            raise CapabilityError(
                f"sglang {flags.version} splits experts over all {layout.ranks} ranks or none, not ep = {layout.ep}"
            )
        yield Item(key="ep", value=layout.ep, origin=SEARCH)
        if "ep_moe" in flags:
            yield Item(key="ep_moe", value=True, origin=SEARCH)
    yield from quantised(plan, pool)
    yield Item(key="kv", value=pool.kv, origin=SEARCH)
    yield plan.max_model_len
    yield Item(key="max_num_seqs", value=pool.max_num_seqs * layout.dp, origin=SEARCH + _each(layout))
    yield from _chunks(plan, pool)
    yield plan.setting(pool, "gpu_memory_utilization", "memory_share")
    page = plan.setting(pool, "block_size")
    if page.value != KIND_DEFAULTS["sglang"]["block_size"]:
        yield page
    if not plan.engine_of(pool).prefix_caching:
        off = plan.setting(pool, "prefix_caching")
        yield Item(key="no_prefix_caching", value=True, origin=off.origin)
    yield plan.setting(pool, "schedule_policy")
    yield plan.setting(pool, "schedule_conservativeness")
    yield from _drafts(plan)
    if pool.role != "mixed":
        yield Item(key="role", value=pool.role, origin=SEARCH)
        yield Item(key="transfer", value="nixl", origin=DEFAULT)
    if pool.role == "prefill":
        yield Item(key="bootstrap_port", value=BOOTSTRAP_PORT, origin=DEFAULT)


def _each(layout: Layout) -> str:
    return f", of {layout.dp} ranks together" if layout.dp > 1 else ""


def _chunks(plan: Plan, pool: Pool) -> Iterator[Item]:
    tokens, dp = pool.max_num_batched_tokens, pool.layout.dp
    origin = SEARCH + _each(pool.layout)
    if plan.engine_of(pool).chunked_prefill:
        yield Item(key="max_num_batched_tokens", value=tokens * dp, origin=origin)
        prefill = plan.setting(pool, "max_prefill_tokens")
        yield replace(prefill, origin=origin) if prefill.value == tokens * dp else prefill
    else:
        yield Item(key="max_num_batched_tokens", value=NO_CHUNKS, origin=plan.setting(pool, "chunked_prefill").origin)
        yield Item(key="max_prefill_tokens", value=tokens, origin=SEARCH)


def _drafts(plan: Plan) -> Iterator[Item]:
    drafts = plan.candidate.nextn
    if drafts:
        yield Item(key="draft_algorithm", value="mtp", origin=SEARCH)
        yield Item(key="draft_steps", value=drafts, origin=SEARCH)
        yield Item(key="draft_topk", value=1, origin=DEFAULT)
        yield Item(key="draft_tokens", value=drafts + 1, origin=SEARCH)


def shape(found: Found) -> Shape:
    """What the flags say of one worker."""
    ranks = found.integer("tp", 1)
    dp = _attention_dp(found)
    if ranks % dp:
        raise ConfigError(f"{found.where}: {dp} ranks of attention data parallelism do not divide --tp-size {ranks}")
    kv, kv_notice = found.ours("kv", "bf16")
    seqs, tokens, notices = found.sizes()
    if found.values.get("max_num_batched_tokens") == NO_CHUNKS:
        tokens = found.integer("max_prefill_tokens", 16_384) * dp
    for name, total in (("--max-running-requests", seqs), ("--chunked-prefill-size", tokens)):
        if total % dp:
            notices = (*notices, f"{name} {total} over {dp} ranks: rounded down")
    weights, weights_notice = stated_weights(found)
    role = found.ours("role", "mixed")[0]
    nextn, drafts_notice = _read_drafts(found)
    ep = found.integer("ep", ranks if found.on("ep_moe") else 1)
    return Shape(
        model=model_of(found),
        layout=Layout(tp=ranks // dp, pp=found.integer("pp", 1), dp=dp, ep=ep),
        kv=kv,
        max_num_seqs=seqs // dp if "max_num_seqs" in found.values else seqs,
        max_num_batched_tokens=tokens // dp if "max_num_batched_tokens" in found.values else tokens,
        nextn=nextn,
        role=role,
        weights=weights,
        notices=(*notices, *kept(kv_notice, weights_notice, drafts_notice)),
    )


def _attention_dp(found: Found) -> int:
    old, new = found.integer("dp_old", 1) if "dp_old" in found.flags else 1, found.integer("dp", 1)
    if "dp_old" not in found.flags:
        old, new = new, 1
    if old > 1 and not found.on("dp_attention"):
        raise ConfigError(
            f"{found.where}: --dp-size {old} without data-parallel attention is {old} workers of their own behind one "
            f"address; import one of them (without --dp-size) with --replicas {old}"
        )
    return max(old, new)


def _read_drafts(found: Found) -> tuple[int, str | None]:
    algorithm = found.text("draft_algorithm")
    if algorithm is None:
        return 0, None
    if algorithm not in ("NEXTN", "EAGLE"):
        return 0, f"--speculative-algorithm {algorithm} has no counterpart here: left out"
    return found.integer("draft_steps", 1), None
