"""Acceptance cases about moving KV: who sends what to whom (C15), and the link's part of the hand-over (C16).

The figures can be checked by hand: cache = 2 x layers x heads x 128 values x 2 bytes x tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.mocker.clock import Clock
from twin.mocker.links import Link, Network, Part
from twin.perf.kv_layout import KvCache, kv_cache, plan_layout
from twin.perf.models import find_model

TOKENS = 1000
NIC_BYTES_PER_S = 50e9


def grouped(heads: int) -> KvCache:
    return KvCache(heads=heads, layers=32, unit_bytes=2 * 128 * 2)


LATENT = KvCache(heads=None, layers=61, unit_bytes=576 * 2)

# cache, prefill tp, decode tp; pairs, senders of each decode rank, readers of each prefill rank; bytes, bytes, ms
TABLE = {
    "T1": (grouped(8), 4, 2, 4, {2}, {1}, 32_768_000, 131_072_000, 0.65536),
    "T2": (grouped(8), 2, 4, 4, {1}, {2}, 32_768_000, 131_072_000, 1.31072),
    "T3": (grouped(2), 1, 4, 4, {1}, {4}, 16_384_000, 65_536_000, 1.31072),
    "T4": (grouped(8), 1, 1, 1, {1}, {1}, 131_072_000, 131_072_000, 2.62144),
    "T5": (grouped(8), 8, 2, 8, {4}, {1}, 16_384_000, 131_072_000, 0.32768),
    "T6": (grouped(8), 2, 8, 8, {1}, {4}, 16_384_000, 131_072_000, 1.31072),
    "T7": (grouped(4), 8, 2, 4, {2}, {0, 1}, 16_384_000, 65_536_000, 0.32768),
    "T9": (LATENT, 2, 4, 4, {1}, {2}, 70_272_000, 281_088_000, 2.81088),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_who_sends_what_to_whom(row: tuple) -> None:
    cache, prefill_tp, decode_tp, pairs, senders, readers, pair_bytes, wire_bytes, ms = row
    layout = plan_layout(cache, prefill_tp, decode_tp)
    assert len(layout.pairs) == pairs
    assert {len(ranks) for ranks in layout.senders.values()} == senders
    assert {len(ranks) for ranks in layout.readers.values()} == readers
    assert {layout.pair_bytes(pair, TOKENS) for pair in layout.pairs} == {pair_bytes}
    assert layout.wire_bytes(TOKENS) == wire_bytes
    assert layout.time_s(TOKENS, NIC_BYTES_PER_S) * 1e3 == pytest.approx(ms, rel=1e-12)


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_simulated_over_the_ranks_own_links_it_takes_as_long(row: tuple) -> None:
    cache, prefill_tp, decode_tp, *_, ms = row
    layout = plan_layout(cache, prefill_tp, decode_tp)
    clock = Clock()
    network = Network(clock, [Link(name=f"p{rank}", bytes_per_s=NIC_BYTES_PER_S) for rank in range(prefill_tp)])
    parts = [Part((f"p{pair.prefill_rank}",), layout.pair_bytes(pair, TOKENS)) for pair in layout.pairs]
    ends = []
    network.start_all(parts, on_done=lambda: ends.append(clock.now))
    clock.run()
    assert ends == [pytest.approx(ms / 1e3, abs=1e-9)]


@pytest.mark.shared
def test_c15_different_tp_on_the_two_sides(shared: Path) -> None:
    given = json.loads((shared / "cases" / "inputs" / "c15_layouts.json").read_text(encoding="utf-8"))
    expected = {
        "a": (4, 2, 32_768_000, 131_072_000, 0.65536),
        "b": (4, 1, 32_768_000, 131_072_000, 1.31072),
        "c": (4, 1, 16_384_000, 65_536_000, 1.31072),
    }
    for case in given["cases"]:
        unit_bytes = 2 * given["head_dim"] * given["kv_dtype_bytes"]
        cache = KvCache(heads=case["kv_heads"], layers=given["layers"], unit_bytes=unit_bytes)
        layout = plan_layout(cache, case["prefill_tp"], case["decode_tp"])
        (pair_bytes,) = {layout.pair_bytes(pair, given["tokens"]) for pair in layout.pairs}
        (senders,) = {len(ranks) for ranks in layout.senders.values()}
        wire_bytes = layout.wire_bytes(given["tokens"])
        ms = round(layout.time_s(given["tokens"], NIC_BYTES_PER_S) * 1e3, 9)
        assert (len(layout.pairs), senders, pair_bytes, wire_bytes, ms) == expected[case["name"]]


@pytest.mark.shared
def test_c16_the_hand_over_is_set_up_and_bytes(shared: Path) -> None:
    clock = Clock()
    network = Network(clock, [Link(name="nic", bytes_per_s=NIC_BYTES_PER_S)])
    layout = plan_layout(kv_cache(find_model("llama-3.1-8b"), "bf16"), 1, 1)
    assert layout.wire_bytes(TOKENS) == 131_072_000
    assert layout.time_s(TOKENS, NIC_BYTES_PER_S, setup_s=1e-3) == pytest.approx(3.62144e-3, abs=1e-12)
    network.start(("nic",), layout.wire_bytes(TOKENS), setup_s=1e-3, on_done=lambda: None)
    clock.run()
    assert clock.now == 0.00362144


# ---------------------------------------------------------------- what is refused (T8)


@pytest.mark.parametrize(
    ("cache", "prefill_tp", "decode_tp", "words"),
    [
        (grouped(8), 3, 4, "prefill tp 3 to decode tp 4: 3 does not divide 4"),
        (grouped(8), 3, 3, "prefill tp 3 and 8 KV heads"),
        (grouped(4), 6, 12, "prefill tp 6 and 4 KV heads"),
        (grouped(4), 2, 6, "decode tp 6 and 4 KV heads"),
    ],
)
def test_t8_what_cannot_be_dealt_out_is_refused_with_its_numbers(
    cache: KvCache, prefill_tp: int, decode_tp: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_layout(cache, prefill_tp, decode_tp)


def test_linear_attention_state_moves_only_between_equal_layouts() -> None:
    cache = kv_cache(find_model("qwen3.5-397b-a17b"), "bf16")
    whole = plan_layout(cache, 1, 1).wire_bytes(8192)
    assert whole == 251_658_240 + cache.state_bytes
    assert plan_layout(cache, 2, 2).wire_bytes(8192) == whole
    with pytest.raises(ConfigError, match="linear-attention state"):
        plan_layout(cache, 2, 4)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8, 16])
def test_every_decode_rank_gets_its_heads_once_from_somebody_who_has_them(
    heads: int, prefill_tp: int, decode_tp: int
) -> None:
    layout = plan_layout(grouped(heads), prefill_tp, decode_tp)
    for rank in range(decode_tp):
        got = [head for pair in layout.pairs if pair.decode_rank == rank for head in pair.heads]
        first, last = rank * heads // decode_tp, max(rank * heads // decode_tp + 1, (rank + 1) * heads // decode_tp)
        assert sorted(got) == list(range(first, last))
    for pair in layout.pairs:
        for head in pair.heads:
            assert pair.prefill_rank in (
                range(head * prefill_tp // heads, (head + 1) * prefill_tp // heads) or [head * prefill_tp // heads]
            )
    copies = max(1, decode_tp // heads)
    assert layout.wire_bytes(TOKENS) == copies * 2 * 32 * heads * 128 * 2 * TOKENS
    busy = [len(ranks) for ranks in layout.readers.values() if ranks]
    assert max(busy) - min(busy) <= 1, "replicas take turns"


def test_decode_ranks_that_take_in_more_than_they_can_are_the_limit() -> None:
    """T1: each of two decode ranks takes in two parts of 32,768,000 bytes."""
    layout = plan_layout(grouped(8), 4, 2)
    assert layout.time_s(TOKENS, 50e9, in_bytes_per_s=50e9) == pytest.approx(1.31072e-3)


def test_descriptors_are_layers_times_blocks_keys_and_values_apart() -> None:
    layout = plan_layout(grouped(8), 1, 1)
    assert layout.descriptors(1) == 64
    assert plan_layout(LATENT, 1, 1).descriptors(10) == 610
    alone_s = layout.time_s(64, 32e9, desc_cost_s=2e-6, block_size=64)
    assert alone_s == pytest.approx(0.390144e-3)


def test_windows_are_moved_only_as_far_as_they_reach() -> None:
    layout = plan_layout(kv_cache(find_model("gpt-oss-120b"), "bf16"), 1, 1)
    assert layout.wire_bytes(4096) == 36_864 * 4096 + 36_864 * 128
    assert layout.wire_bytes(100) == 2 * 36_864 * 100


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "even"), [(4, 4, True), (1, 1, True), (4, 2, False), (2, 4, False)]
)
def test_equal_layouts_pair_rank_with_rank(prefill_tp: int, decode_tp: int, even: bool) -> None:
    assert plan_layout(grouped(8), prefill_tp, decode_tp).even is even
    assert plan_layout(grouped(2), 4, 4).even, "replicated heads too"
