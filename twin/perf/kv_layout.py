"""Who sends which KV heads to whom when prefill and decode workers have different tensor parallelism.

Every decode rank needs its heads once; where several prefill ranks hold one, decode ranks take turns among them. What
cannot be mapped is refused with its numbers before anything runs, never rounded. It knows bytes and ranks, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.formats import FLASH_MLA_BYTES, kv_bytes
from twin.perf.models import Model


@frozen
class KvCache:
    """The KV of one sequence as it is moved. `unit_bytes`: of one token in one layer: of one head (key and value), or
    of the one latent vector where `heads` is None. `state_bytes` of all linear layers, per sequence."""

    heads: int | None
    layers: int  # that keep every token
    unit_bytes: float
    window_layers: int = 0
    window_tokens: int = 0
    state_bytes: int = 0

    def layer_tokens(self, tokens: int) -> int:
        """Tokens to move, summed over the layers."""
        return self.layers * tokens + self.window_layers * min(tokens, self.window_tokens)

    @property
    def pieces_per_block(self) -> int:
        """Separate pieces of memory that one block is: per layer its keys and its values, or its latent."""
        return (self.layers + self.window_layers) * (1 if self.heads is None else 2)


def kv_cache(model: Model, kv: str) -> KvCache:
    """What a model in KV format `kv` keeps per sequence."""
    width = kv_bytes(kv)
    if model.latent:
        unit = float(FLASH_MLA_BYTES) if kv == "fp8_ds_mla" else (model.latent.kv_rank + model.latent.rope_dim) * width
        return KvCache(
            heads=None,
            layers=model.attention_layers,
            unit_bytes=unit + (model.indexer.dim if model.indexer else 0),
        )
    state = 2 * (model.linear.state_values + model.linear.conv_values) if model.linear else 0
    return KvCache(
        heads=model.kv_heads,
        layers=model.attention_layers - model.window_layers,
        unit_bytes=2 * model.head_dim * width,
        window_layers=model.window_layers,
        window_tokens=model.window.tokens if model.window else 0,
        state_bytes=state,
    )


class Pair(NamedTuple):
    """One prefill rank sends to one decode rank: these heads (none of latent KV, which goes whole)."""

    prefill_rank: int
    decode_rank: int
    heads: tuple[int, ...]

    @property
    def units(self) -> int:
        """Heads, or the one latent."""
        return len(self.heads) or 1


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """The hand-off between one prefill and one decode worker; pairs in order of (decode rank, prefill rank)."""

    cache: KvCache
    prefill_tp: int
    decode_tp: int
    pairs: tuple[Pair, ...]

    def pair_bytes(self, pair: Pair, tokens: int) -> int:
        """What one pair moves for a sequence of `tokens` tokens."""
        kv = pair.units * self.cache.layer_tokens(tokens) * self.cache.unit_bytes
        return round(kv) + self.cache.state_bytes // self.prefill_tp

    def descriptors(self, blocks: int) -> int:
        """Pieces of memory that one pair moves for `blocks` blocks: of each its layers, keys and values apart."""
        return blocks * self.cache.pieces_per_block

    def wire_bytes(self, tokens: int) -> int:
        """What all pairs move: more than the cache where heads are replicated."""
        return sum(self.pair_bytes(pair, tokens) for pair in self.pairs)

    @cached_property
    def senders(self) -> Mapping[int, tuple[int, ...]]:
        """By decode rank: the prefill ranks that it reads from."""
        return {d: tuple(p.prefill_rank for p in self.pairs if p.decode_rank == d) for d in range(self.decode_tp)}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """By prefill rank: the decode ranks that read from it. Its blocks are held until all of them have them."""
        return {p: tuple(x.decode_rank for x in self.pairs if x.prefill_rank == p) for p in range(self.prefill_tp)}

    @cached_property
    def even(self) -> bool:
        """Whether rank i sends to rank i alone and all send alike: one pair then stands for the whole hand-off."""
        return all(pair.prefill_rank == pair.decode_rank for pair in self.pairs) and len(self.pairs) == self.prefill_tp

    def time_s(
        self,
        tokens: int,
        out_bytes_per_s: float,
        *,
        in_bytes_per_s: float | None = None,
        setup_s: float = 0.0,
        desc_cost_s: float = 0.0,
        block_size: int | None = None,
    ) -> float:
        """How long it takes alone: the slowest rank's bytes over its own link, set-up and descriptors.

        `in_bytes_per_s` caps what a decode rank takes in (None: no limit). Descriptors need `block_size`.
        """
        blocks = -(-tokens // block_size) if block_size else 0
        per_pair_s = self.descriptors(blocks) * desc_cost_s
        out: dict[int, float] = {}
        into: dict[int, float] = {}
        for pair in self.pairs:
            moved = self.pair_bytes(pair, tokens)
            out[pair.prefill_rank] = out.get(pair.prefill_rank, 0.0) + moved / out_bytes_per_s + per_pair_s
            if in_bytes_per_s is not None:
                into[pair.decode_rank] = into.get(pair.decode_rank, 0.0) + moved / in_bytes_per_s
        return setup_s + max(max(out.values()), max(into.values(), default=0.0))


def plan_layout(cache: KvCache, prefill_tp: int, decode_tp: int) -> KvLayout:
    """Which prefill rank sends which heads to which decode rank. Raises ConfigError where heads cannot be dealt out."""
    _check(cache, prefill_tp, decode_tp)
    sent: dict[tuple[int, int], list[int]] = {}
    if cache.heads is None:
        sent = {(d, d % prefill_tp): [] for d in range(decode_tp)}
    else:
        owners: dict[int, list[int]] = {}
        for rank in range(prefill_tp):
            for head in heads_of(rank, prefill_tp, cache.heads):
                owners.setdefault(head, []).append(rank)
        for rank in range(decode_tp):
            for head in heads_of(rank, decode_tp, cache.heads):
                owner = owners[head][rank % len(owners[head])]
                sent.setdefault((rank, owner), []).append(head)
    pairs = tuple(Pair(owner, rank, tuple(heads)) for (rank, owner), heads in sorted(sent.items()))
    return KvLayout(cache=cache, prefill_tp=prefill_tp, decode_tp=decode_tp, pairs=pairs)


def heads_of(rank: int, tp: int, heads: int) -> range:
    """The KV heads that a rank holds: its share, or one that others hold as well."""
    if tp <= heads:
        return range(rank * heads // tp, (rank + 1) * heads // tp)
    return range(rank * heads // tp, rank * heads // tp + 1)


def _check(cache: KvCache, prefill_tp: int, decode_tp: int) -> None:
    large, small = max(prefill_tp, decode_tp), min(prefill_tp, decode_tp)
    if large % small:
        raise ConfigError(
            f"KV hand-off from prefill tp {prefill_tp} to decode tp {decode_tp}: {small} does not divide {large}; "
            "give one side a multiple of the other's"
        )
    if cache.state_bytes and prefill_tp != decode_tp:
        raise ConfigError(
            f"KV hand-off from prefill tp {prefill_tp} to decode tp {decode_tp}: the model has linear-attention state, "
            "and how engines split it anew is not known; give both sides the same tp"
        )
    for side, tp in (("prefill", prefill_tp), ("decode", decode_tp)):
        if cache.heads is not None and cache.heads % tp and tp % cache.heads:
            raise ConfigError(
                f"KV hand-off: {side} tp {tp} and {cache.heads} KV heads: neither divides the other, "
                "so heads cannot be dealt out evenly; choose a tp that divides them or is a multiple of them"
            )
