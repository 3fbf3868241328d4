"""Block hashes: xxh3-64 over the tokens of a block, chained over the blocks before it.

Two blocks are the same KV content exactly when their *chain* hashes are equal; the local hash of a block says nothing
about what stands before it and must never be used for matching. Everything here is a pure function of its arguments,
and agrees with NVIDIA Dynamo 1.6.1 on the golden vectors of the tests.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import xxhash

from policies.cluster.ids import BlockHash
from policies.errors import ConfigError

BASE_SEED = 1337
"""Seed of local hashes without LoRA or cache namespace, and of every chain step."""

FIRST_PLACEHOLDER_TOKEN = 1_000_000
"""Placeholder tokens of images lie in [1_000_000, 1_000_000 + 2**30)."""

_U32 = 4
_U64_MASK = 2**64 - 1
_PLACEHOLDER_MASK = 2**30 - 1
_IMAGE_HASH_DIGITS = 64
_TRACE_TOKEN_MASK = 0x7FFF_FFFF

_hash = xxhash.xxh3_64_intdigest
_pair = struct.Struct("<2Q").pack
_run = struct.Struct("<Q2I").pack


def base_seed(lora: str | None = None, namespace: str | None = None) -> int:
    """Seed of the local hashes of an adapter and a cache namespace; "" means the same as None."""
    seed = BASE_SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if namespace:
        seed += xxhash.xxh3_64_intdigest(namespace.encode(), 1)
    return seed & _U64_MASK


def local_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    seed: int = BASE_SEED,
    image_hashes: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Hash of each complete block of `block_size` tokens by itself; a partial last block has none.

    Tokens in an array("I") are hashed as they lie, others are packed first. `image_hashes` maps a block's index to the
    hashes of the images in it, in any order. Raises ConfigError for a block size below 1 or a token that does not fit
    32 bits.
    """
    _check_block_size(block_size)
    packed = _packed(tokens)
    width = block_size * _U32
    count = len(packed) // width
    if image_hashes:
        return [
            _hash(packed[i * width : (i + 1) * width] + _sorted_images(image_hashes.get(i, ())), seed)
            for i in range(count)
        ]
    return [_hash(block, seed) for (block,) in struct.iter_unpack(f"{width}s", packed[: count * width])]


def eagle_hashes(tokens: Sequence[int], block_size: int, *, seed: int = BASE_SEED) -> list[int]:
    """Local hashes for EAGLE drafting: windows of `block_size` + 1 tokens, one every `block_size` tokens."""
    _check_block_size(block_size)
    packed = _packed(tokens)
    stride = block_size * _U32
    starts = range(0, max(len(tokens) - 1, 0) // block_size * stride, stride)
    return [_hash(packed[lo : lo + stride + _U32], seed) for lo in starts]


def chain_hashes(local: Sequence[int]) -> list[BlockHash]:
    """Names of the blocks with all that stands before them: S0 = L0, Si = xxh3(S[i-1], L[i])."""
    if not local:
        return []
    last = local[0]
    chain = [last]
    for link in local[1:]:
        last = _hash(_pair(last, link), BASE_SEED)
        chain.append(last)
    return cast("list[BlockHash]", chain)


def image_hash(image_id: str) -> int:
    """64-bit hash of an image: the first 16 digits of an id of 64 hex digits, otherwise the hash of the id."""
    if len(image_id) == _IMAGE_HASH_DIGITS and all(c in "0123456789abcdefABCDEF" for c in image_id):
        return int(image_id[:16], 16)
    return xxhash.xxh3_64_intdigest(image_id.encode(), 0)


def placeholder_token(image: int) -> int:
    """The token id that stands for an image of that hash in a prompt."""
    return FIRST_PLACEHOLDER_TOKEN + (image & _PLACEHOLDER_MASK)


def trace_tokens(hash_ids: Sequence[int], key_tokens: int, isl: int) -> list[int]:
    """The tokens that a trace's hash ids stand for, `key_tokens` per id, cut to `isl` tokens.

    For engines that want token ids; the simulator compares the ids themselves (`blocks.ContentTree`), with equal
    results. Raises ConfigError when the ids do not reach `isl`.
    """
    covered = len(hash_ids) * key_tokens
    if covered < isl:
        raise ConfigError(
            f"{len(hash_ids)} hash ids of {key_tokens} tokens cover {covered} tokens, the prompt has {isl}; "
            "give the trace's own tokens per hash id"
        )
    return [
        xxhash.xxh3_64_intdigest(struct.pack("<QI", hash_ids[i // key_tokens], i % key_tokens), BASE_SEED)
        & _TRACE_TOKEN_MASK
        for i in range(isl)
    ]


def trace_hashes(keys: Sequence[int], first_key: int, key_tokens: int, block_size: int, lo: int, hi: int) -> list[int]:
    """Local hashes of blocks `lo` to `hi` of a trace's prompt, without its tokens: `keys` are its hash ids from the
    `first_key`-th on, `key_tokens` tokens each.

    A block is hashed by the stretches of hash ids that it covers. Of two blocks at the same place these are equal
    exactly when their tokens (`trace_tokens`) are.
    """
    found = []
    for block in range(lo, hi):
        at, end = block * block_size, (block + 1) * block_size
        runs = b""
        while at < end:
            key, offset = divmod(at, key_tokens)
            upto = min(end, at - offset + key_tokens)
            runs += _run(keys[key - first_key] & _U64_MASK, offset, offset + upto - at)
            at = upto
        found.append(_hash(runs, BASE_SEED))
    return found


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size} tokens, at least 1 is needed; 16 is usual")


def _sorted_images(images: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(images)}Q", *sorted(images))


def _packed(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian 32-bit numbers; an array of such numbers is only copied."""
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        try:
            tokens = array("I", tokens)
        except OverflowError:
            at, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < 2**32)
            raise ConfigError(
                f"token {token} at position {at} does not fit 32 bits; ids are 0 to {2**32 - 1}"
            ) from None
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()
