"""What engines send about their KV blocks, decoded and nothing more: bytes or JSON in, records out.

vLLM and SGLang publish msgpack over ZMQ, TensorRT-LLM answers with a JSON list. What cannot be read becomes a `Refused`
with its reason; nothing is guessed. Block ids are taken modulo 2**64, since SGLang sends signed ones. Nothing here
counts, numbers or hashes: `kv_books` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgpack

from policies.cluster.ids import BlockHash, Tier
from policies.cluster.kv_events import TIER_OF_MEDIUM
from policies.errors import EngineError
from policies.frozen import frozen

_U64 = 2**64
_UNSTATED_MEDIUM = "GPU"  # fields at their default are left out, and blocks begin on the device

_REMOTE = "REMOTE"
"""What vLLM calls a store that is not on the worker's host: its locality, of medium STORAGE; or a medium of its own."""

_INDEXED_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""KV groups that need every block of a prefix; a window or a state says nothing about how far a prefix goes."""

TRTLLM_TIERS: Mapping[int, Tier] = {0: Tier.G1_DEVICE, 1: Tier.G2_HOST}
"""Cache levels of TensorRT-LLM."""


@frozen
class Stored:
    """Blocks `exts` came into a tier, the first below `parent`, each other below the one before it.

    `tokens` are those of all the blocks, `block_size` each; none where the engine tells ids alone. `salt` is that of
    the cache namespace, where it is told.
    """

    exts: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: Sequence[int]
    block_size: int
    tier: Tier
    group: int = 0
    lora: str | None = None
    salt: str | None = None


@frozen
class Removed:
    """Blocks left a tier (None: every tier)."""

    exts: tuple[BlockHash, ...]
    tier: Tier | None
    group: int = 0


@frozen
class Cleared:
    """Every block left a tier."""

    tier: Tier


@frozen
class Refused:
    """Something that cannot be taken, and why."""

    what: str


Said: TypeAlias = Stored | Removed | Cleared | Refused


@frozen
class Batch:
    """What one engine step brought: `sent_s` of the engine's clock, its rank (None: not told), and what it said."""

    sent_s: float
    dp_rank: int | None
    said: tuple[Said, ...]


def unsigned(block_hash: int | str | bytes) -> BlockHash:
    """A block id as 64 bits without sign: a number, a number in hexadecimal digits, or the last bytes of a digest."""
    match block_hash:
        case int():
            return BlockHash(block_hash % _U64)
        case str():
            return BlockHash(int(block_hash, 16) % _U64)
        case bytes():
            return BlockHash(int.from_bytes(block_hash[-8:], "big"))
    raise EngineError(f"block id {block_hash!r} is neither a number nor text nor bytes")


# ---------------------------------------------------------------- vLLM and SGLang


def batch(payload: bytes) -> Batch:
    """The third frame of a message: `[seconds, [event, ...], rank]`. Raises EngineError for anything else."""
    try:
        sent_s, events, *rest = msgpack.unpackb(payload, strict_map_key=False)
        return Batch(sent_s=float(sent_s), dp_rank=rest[0] if rest else None, said=tuple(map(_read, events)))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise EngineError(
            f"a KV event message of {len(payload)} bytes is not [seconds, events, rank] in msgpack ({error}); "
            "is the publisher vLLM or SGLang?"
        ) from error


def _read(event: Any) -> Said:
    try:
        return _said(event)
    except (KeyError, TypeError, ValueError, EngineError) as error:
        return Refused(what=f"an event has not the form that is known ({error!r})")


def _said(event: Any) -> Said:
    if not isinstance(event, dict):
        name = event[0] if isinstance(event, list) and event else type(event).__name__
        return Refused(what=f"{name} as an array: releases that send arrays are not read; use one that sends maps")
    kind = event.get("type")
    if kind == "AllBlocksCleared":
        return Cleared(tier=Tier.G1_DEVICE)  # of the device's pool alone
    medium = event.get("medium") or _UNSTATED_MEDIUM
    tier = TIER_OF_MEDIUM.get(_REMOTE if event.get("locality") == _REMOTE else medium)
    if tier is None:
        return Refused(what=f"{kind} in medium {medium!r}, which is none of {', '.join(TIER_OF_MEDIUM)}")
    match kind:
        case "BlockStored":
            return _stored(event, tier)
        case "BlockRemoved":
            return Removed(
                exts=tuple(map(unsigned, event["block_hashes"])), tier=tier, group=event.get("group_idx") or 0
            )
        case other:
            return Refused(what=f"event {other!r} is not known")


def _stored(event: Mapping[str, Any], tier: Tier) -> Said:
    kind, lora = event.get("kv_cache_spec_kind"), event.get("lora_name")
    if kind not in _INDEXED_KINDS:
        return Refused(what=f"KV group {event.get('group_idx')} of kind {kind!r} does not say how far a prefix goes")
    extra = [key for keys in event.get("extra_keys") or () for key in keys or () if key != lora]
    if len(extra) > 1 or not all(isinstance(key, str) for key in extra):
        return Refused(what=f"blocks with {len(extra)} extra keys (images, embeddings): prompts are not hashed by them")
    parent = event.get("parent_block_hash")
    return Stored(
        exts=tuple(map(unsigned, event["block_hashes"])),
        parent=unsigned(parent) if parent is not None else None,
        tokens=event.get("token_ids") or (),
        block_size=event.get("block_size") or 0,
        tier=tier,
        group=event.get("group_idx") or 0,
        lora=lora,
        salt=extra[0] if extra else event.get("cache_salt"),
    )


# ---------------------------------------------------------------- TensorRT-LLM


@frozen
class Numbered:
    """What one event of TensorRT-LLM says; `number` rises by one from each to the next. `window` is the attention
    window, in tokens, of the blocks that it is about."""

    number: int
    dp_rank: int
    window: int | None
    said: tuple[Said, ...]


def trtllm(event: Mapping[str, Any], block_size: int) -> Numbered:
    """One item of the list that `/kv_cache_events` answers with. Raises EngineError for one of another form."""
    try:
        return Numbered(
            number=event["event_id"],
            dp_rank=event.get("attention_dp_rank") or 0,
            window=event.get("window_size"),
            said=tuple(_trtllm_said(event["data"], block_size)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"a KV event of TensorRT-LLM has not the form that is known ({error!r})") from error


def _trtllm_said(data: Mapping[str, Any], block_size: int) -> Iterator[Said]:
    match data["type"]:
        case "created":
            return
        case "stored":
            yield from _trtllm_stored(data, block_size)
        case "removed":
            yield Removed(exts=tuple(map(unsigned, data["block_hashes"])), tier=None)
        case "updated":
            yield from _trtllm_moved(data)
        case other:
            yield Refused(what=f"event {other!r} is not known")


def _trtllm_stored(data: Mapping[str, Any], block_size: int) -> Iterator[Said]:
    """A block that is not full yet ends the chain: it is not told, since only full blocks are ever found again."""
    parent = unsigned(data["parent_hash"]) if data.get("parent_hash") is not None else None
    for level, run in groupby(data["blocks"], key=lambda block: block.get("cache_level", 0)):
        if level not in TRTLLM_TIERS:
            yield Refused(what=f"cache level {level} is none of {', '.join(map(str, TRTLLM_TIERS))}")
            return
        blocks = [block for block in run if len(block["tokens"]) == block_size]
        tokens = [token for block in blocks for token in block["tokens"]]
        if any(token.get("token_extra_id") for token in tokens):
            yield Refused(what="blocks with extra token ids (images): prompts are not hashed by them")
            return
        if blocks:
            exts = tuple(unsigned(block["block_hash"]) for block in blocks)
            ids = [token["token_id"] for token in tokens]
            yield Stored(exts=exts, parent=parent, tokens=ids, block_size=block_size, tier=TRTLLM_TIERS[level])
            parent = exts[-1]


def _trtllm_moved(data: Mapping[str, Any]) -> Iterator[Said]:
    """A block went from one level to another; a change of priority says nothing here."""
    move = data.get("cache_level")
    if not move:
        return
    old, new = TRTLLM_TIERS.get(move["old_value"]), TRTLLM_TIERS.get(move["new_value"])
    if old is None or new is None:
        yield Refused(what=f"a block went from cache level {move['old_value']} to {move['new_value']}")
        return
    exts = (unsigned(data["block_hash"]),)
    yield Stored(exts=exts, parent=None, tokens=(), block_size=0, tier=new)
    yield Removed(exts=exts, tier=old)
