"""Recordings of real engines: decoded, counted and indexed, they end where the engines' own pools ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kv_index import RANK, Asking

from executors.engines.kv_books import KvBooks
from executors.engines.kv_wire import Batch, Stored, batch
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import Tier
from policies.router.chains.feed import FeedMode

pytestmark = pytest.mark.shared
BLOCK_SIZE = 32


def recorded(shared: Path, name: str) -> list[Batch]:
    with (shared / "live" / "data" / f"{name}.jsonl").open(encoding="utf-8") as lines:
        return [batch(bytes.fromhex(json.loads(line)["frames"][-1])) for line in lines]


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("kv_events_vllm", {Tier.G1_DEVICE: 124}),
        ("kv_events_vllm_tiers", {Tier.G1_DEVICE: 38, Tier.G2_HOST: 20, Tier.G3_DISK: 45}),
        ("kv_events_sglang", {Tier.G1_DEVICE: 27}),
    ],
)
def test_copies_end_as_the_engine_has_them(shared: Path, name: str, copies: dict[Tier, int]) -> None:
    books = KvBooks(RANK, 0, BLOCK_SIZE)
    index = Asking.of(books)
    index.up()
    for news in recorded(shared, name):
        for event in books.take(news.said, 0.0):
            index.on(event)
    assert books.copies() == copies
    assert books.counts.refused == books.counts.unknown_removals == books.counts.unjoined == 0
    assert index.mode is FeedMode.LIVE
    assert index.index.counters()["orphans"] == index.index.counters()["adopted"]


def test_prompts_are_found_by_their_tokens(shared: Path) -> None:
    books = KvBooks(RANK, 0, BLOCK_SIZE)
    index = Asking.of(books)
    index.up()
    news = recorded(shared, "kv_events_vllm")
    for one in news:
        for event in books.take(one.said, 0.0):
            index.on(event)
    first = next(said for one in news for said in one.said if isinstance(said, Stored) and said.parent is None)
    prompt = [*first.tokens, 1, 2, 3]
    assert index.depth(local_hashes(prompt, BLOCK_SIZE)) == len(first.exts)
    assert index.depth(local_hashes([7, *prompt[1:]], BLOCK_SIZE)) == 0


def test_a_dump_holds_what_the_events_made(shared: Path) -> None:
    books = KvBooks(RANK, 0, BLOCK_SIZE)
    followed, late = (Asking.of(books) for _ in range(2))
    followed.up()
    for news in recorded(shared, "kv_events_vllm_tiers"):
        for event in books.take(news.said, 0.0):
            followed.on(event)
    late.up()
    assert late.index.sizes == followed.index.sizes
    assert late.index.counters()["orphans"] == 0
