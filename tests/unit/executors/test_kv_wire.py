"""Decoding of KV events: what is taken, what is refused by name, and what the books make of it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from kv_index import RANK

from executors.engines.kv_books import KvBooks
from executors.engines.kv_wire import Cleared, Refused, Removed, Said, Stored, batch, trtllm, unsigned
from policies.cluster.actions import RequestIndexDump
from policies.cluster.hashing import base_seed, local_hashes
from policies.cluster.ids import Tier
from policies.cluster.kv_events import (
    IndexDump,
    IndexRecoveryFailed,
    KvCleared,
    KvEvent,
    KvRefused,
    KvRemoved,
    KvStored,
)
from policies.errors import EngineError

TOKENS = list(range(100, 116))


def stored(*exts: int, parent: int | None = None, medium: str = "GPU", **more: Any) -> dict[str, Any]:
    tokens = TOKENS[: 4 * len(exts)]
    fields = {"block_hashes": list(exts), "parent_block_hash": parent, "token_ids": tokens, "block_size": 4}
    return {"type": "BlockStored", "medium": medium, **fields, **more}


def removed(*exts: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(exts), "medium": medium}


def read(*events: object) -> tuple[Said, ...]:
    return batch(msgpack.packb([1.5, list(events), 0])).said


class Books:
    """Books with blocks of 4 tokens, and every event that they made."""

    def __init__(self) -> None:
        self.books = KvBooks(RANK, 0, 4)
        self.made: list[KvEvent] = []

    def take(self, *events: object) -> list[KvEvent]:
        return self.say(*read(*events))

    def say(self, *said: Said) -> list[KvEvent]:
        new = list(self.books.take(said, 0.0))
        self.made += new
        assert [event.event_id for event in self.made] == list(range(len(self.made)))
        return new

    def dump(self) -> IndexDump | IndexRecoveryFailed:
        order = RequestIndexDump(worker_id=RANK.worker_id, dp_rank=0, epoch=0, ask=1, reason="")
        answer = self.books.answer(order, 0.0)
        assert isinstance(answer, IndexDump | IndexRecoveryFailed)
        return answer


# ---------------------------------------------------------------- the wire


@pytest.mark.parametrize(
    ("told", "block_hash"),
    [(-1, 2**64 - 1), (5, 5), (2**64 - 1, 2**64 - 1), ("ff", 255), (bytes(24) + (7).to_bytes(8, "big"), 7)],
)
def test_block_ids_are_64_bits_without_sign(told: int | str | bytes, block_hash: int) -> None:
    assert unsigned(told) == block_hash


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (["BlockStored", [1], None, [1, 2, 3, 4], 4], "BlockStored as an array"),
        (stored(1, medium="TAPE"), "'TAPE'"),
        ({"type": "BlockSplit"}, "'BlockSplit'"),
        (stored(1, kv_cache_spec_kind="sliding_window", group_idx=1), "'sliding_window'"),
        (stored(1, extra_keys=[[["image", 3]]]), "extra keys"),
        ({"type": "BlockRemoved"}, "block_hashes"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(event: object, word: str) -> None:
    (said,) = read(event)
    assert isinstance(said, Refused)
    assert word in said.what


def test_media_are_tiers() -> None:
    media = {"GPU": Tier.G1_DEVICE, "CPU": Tier.G2_HOST, "STORAGE": Tier.G3_DISK, "EXTERNAL": Tier.G4_REMOTE}
    assert [one.tier for one in read(*(removed(1, medium=name) for name in media))] == list(media.values())  # type: ignore[union-attr]
    assert read({"type": "AllBlocksCleared"}) == (Cleared(tier=Tier.G1_DEVICE),)


def test_an_adapter_among_the_extra_keys_is_no_salt() -> None:
    (said,) = read(stored(1, 2, lora_name="a", extra_keys=[["a", "secret"], ["a"]]))
    assert isinstance(said, Stored)
    assert (said.lora, said.salt) == ("a", "secret")


@pytest.mark.parametrize("payload", [b"\xc1", msgpack.packb([1.0]), msgpack.packb("text"), msgpack.packb([1.0, 7])])
def test_another_protocol_is_an_error(payload: bytes) -> None:
    with pytest.raises(EngineError, match=r"\[seconds, events, rank\]"):
        batch(payload)


# ---------------------------------------------------------------- the books


def test_local_hashes_are_those_of_the_tokens() -> None:
    (event,) = Books().take(stored(1, 2, 3, parent=9))
    assert isinstance(event, KvStored)
    assert (event.exts, event.parent_ext) == ((1, 2, 3), 9)
    assert list(event.local_hashes) == local_hashes(TOKENS[:12], 4)


def test_a_salt_is_inherited_by_the_blocks_below() -> None:
    books = Books()
    (top,) = books.take(stored(1, extra_keys=[["secret"]]))
    (below,) = books.take(stored(2, parent=1, extra_keys=[None]))
    assert isinstance(top, KvStored)
    assert isinstance(below, KvStored)
    assert top.local_hashes == below.local_hashes == (local_hashes(TOKENS[:4], 4, seed=base_seed(None, "secret"))[0],)


def test_copies_are_counted_and_only_the_first_and_the_last_are_told() -> None:
    books = Books()
    assert len(books.take(stored(1, 2))) == 1
    (more,) = books.take(stored(1, 2, 3))
    assert isinstance(more, KvStored)
    assert (more.exts, more.parent_ext) == ((3,), 2)
    assert books.take(removed(1, 2)) == []
    (gone,) = books.take(removed(1, 2))
    assert isinstance(gone, KvRemoved)
    assert gone.exts == (1, 2)
    assert books.books.copies() == {Tier.G1_DEVICE: 1}
    assert books.books.counts.further_copies == 2


def test_an_id_alone_is_joined_to_its_tokens() -> None:
    books = Books()
    books.take(stored(1, 2))
    (host,) = books.take({**stored(2, medium="CPU"), "token_ids": [], "block_size": 0})
    assert isinstance(host, KvStored)
    assert (host.exts, host.parent_ext, host.tier) == ((2,), 1, Tier.G2_HOST)
    (strange,) = books.take({**stored(8, medium="CPU"), "token_ids": [], "block_size": 0})
    assert isinstance(strange, KvRefused)
    assert books.books.counts.unjoined == 1


def test_blocks_of_another_size_are_refused() -> None:
    (event,) = Books().take(stored(1, block_size=2))
    assert isinstance(event, KvRefused)
    assert "blocks here have 4" in event.what


def test_removing_what_is_not_held_is_counted_and_makes_no_event() -> None:
    books = Books()
    books.take(stored(1))
    assert books.take(removed(5), removed(1, medium="CPU")) == []
    assert books.books.counts.unknown_removals == 2


def test_clearing_the_device_leaves_the_host() -> None:
    books = Books()
    books.take(stored(1, 2), stored(1, 2, medium="CPU"))
    (event,) = books.take({"type": "AllBlocksCleared"})
    assert isinstance(event, KvCleared)
    assert (event.tier, books.books.copies()) == (Tier.G1_DEVICE, {Tier.G2_HOST: 2})


def test_a_dump_tells_parents_first_and_what_holds_nothing_any_more() -> None:
    books = Books()
    books.take(stored(3, parent=2), stored(1, 2), stored(5, parent=1), removed(1))
    dump = books.dump()
    assert isinstance(dump, IndexDump)
    assert dump.last_id == 3
    told = [ext for entry in dump.entries for ext in entry.exts]
    assert sorted(told) == [1, 2, 3, 5]
    assert told.index(1) < told.index(2) < told.index(3)
    assert [entry.tiers for entry in dump.entries if 1 in entry.exts] == [()]


def test_what_was_forgotten_leaves_nothing_behind() -> None:
    books = Books()
    books.take(stored(1, 2, 3), removed(1), removed(2), removed(3))
    dump = books.dump()
    assert isinstance(dump, IndexDump)
    assert dump.entries == ()
    assert not books.books._blocks
    assert not books.books._below


def test_void_books_leave_a_number_out_and_know_nothing() -> None:
    books = KvBooks(RANK, 0, 4)
    list(books.take(read(stored(1)), 0.0))
    event = books.void("batches 1 to 3 are lost", 0.0)
    assert isinstance(event, KvCleared)
    assert (event.event_id, event.tier, books.exact) == (2, None, False)
    order = RequestIndexDump(worker_id=RANK.worker_id, dp_rank=0, epoch=0, ask=7, reason="")
    answer = books.answer(order, 0.0)
    assert isinstance(answer, IndexRecoveryFailed)
    assert (answer.ask, answer.reason) == (7, "batches 1 to 3 are lost")


# ---------------------------------------------------------------- TensorRT-LLM


def trt_block(ext: int, tokens: int = 4, level: int = 0, extra: int = 0) -> dict[str, Any]:
    ids = [{"token_id": token, "token_extra_id": extra} for token in TOKENS[:tokens]]
    return {"block_hash": ext, "tokens": ids, "cache_level": level, "priority": 35}


def trt_event(number: int, kind: str, **data: Any) -> dict[str, Any]:
    return {"event_id": number, "window_size": 4096, "data": {"type": kind, **data}}


def test_trtllm_blocks_are_stored_moved_and_removed() -> None:
    books = Books()
    events = [
        trt_event(0, "created", num_blocks_per_cache_level=[10, 10]),
        trt_event(1, "stored", parent_hash=None, blocks=[trt_block(1), trt_block(2), trt_block(3, tokens=2)]),
        trt_event(2, "updated", block_hash=2, cache_level={"old_value": 0, "new_value": 1}),
        trt_event(3, "updated", block_hash=2, priority={"old_value": 35, "new_value": 30}),
        trt_event(4, "removed", block_hashes=[1]),
    ]
    made = [event for one in events for event in books.say(*trtllm(one, 4).said)]
    shown = [(type(event).__name__, getattr(event, "exts", ()), getattr(event, "tier", None)) for event in made]
    assert shown == [
        ("KvStored", (1, 2), Tier.G1_DEVICE),
        ("KvStored", (2,), Tier.G2_HOST),
        ("KvRemoved", (2,), Tier.G1_DEVICE),
        ("KvRemoved", (1,), Tier.G1_DEVICE),
    ]


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (trt_event(0, "stored", parent_hash=None, blocks=[trt_block(1, level=7)]), "cache level 7"),
        (trt_event(0, "stored", parent_hash=None, blocks=[trt_block(1, extra=9)]), "extra token ids"),
        (trt_event(0, "updated", block_hash=1, cache_level={"old_value": 0, "new_value": 2}), "to 2"),
        (trt_event(0, "compacted"), "'compacted'"),
    ],
)
def test_trtllm_events_that_cannot_be_taken_are_refused_by_name(event: dict[str, Any], word: str) -> None:
    (said,) = trtllm(event, 4).said
    assert isinstance(said, Refused)
    assert word in said.what


def test_a_trtllm_event_of_another_form_is_an_error() -> None:
    with pytest.raises(EngineError, match="event_id"):
        trtllm({"data": {"type": "created"}}, 4)
    assert trtllm(trt_event(3, "removed", block_hashes=["ff"]), 4).said == (Removed(exts=(255,), tier=None),)  # type: ignore[arg-type]
