"""The journal: what a line looks like, what is refused, and replay that finds the first difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from builders import Scene, keys_path, router, worker

from policies.cluster.actions import Dispatch
from policies.cluster.blocks import ContentTree
from policies.cluster.events import BlocksStored, Event, RequestArrived, RequestFinished, TimerFired
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.journal import Encoder, Header, Journal, decode, decode_header, encode_header, replay
from policies.errors import JournalError

HEADER = Header(versions={"dynatwin": "0.1.0"}, config={"router": {"mode": "kv"}}, seed=42, policies=("Kv",))


class Tape:
    """Lines of a journal, and how often something was handed over."""

    def __init__(self) -> None:
        self.text = ""
        self.writes = 0

    def __call__(self, text: str) -> None:
        self.text += text
        self.writes += 1

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def played(mode: str, requests: int = 6, **changes: object) -> list[str]:
    """The journal of a little history: overlaps, ends of all kinds, a lost worker."""
    tape = Tape()
    journal = Journal(tape, HEADER)
    scene = Scene(router(mode, **changes), workers=3, journal=journal)
    for n in range(requests):
        keys = [0, n % 2, n % 3, *range(10 * n, 10 * n + 7)]
        at = scene.send(f"r{n}", keys=keys, hint=n % 3 if mode == "direct" else None)
        scene.stored(at, keys)
        scene.first_token(f"r{n}")
        if n % 2:
            scene.finish(f"r{n}", output_tokens=3)
            scene.removed(at, keys, lo=4)
    scene.lost(2)
    scene.arrive("last", keys=[0, 1, 2], isl=192, hint=0 if mode == "direct" else None)
    journal.flush()
    return tape.lines


def test_a_line_is_plain_json() -> None:
    tree = ContentTree(64, 64)
    path = keys_path(tree, [5, 6])
    event = RequestArrived(at_s=0.1, request_id=RequestId("r1"), isl=128, blocks=path)
    action = Dispatch(request_id=RequestId("r1"), worker_id=WorkerId(2), rule="min", reason="cost 4", overlap_blocks=1)
    line = json.loads(Encoder().entry(7, event, [action]))
    name = str(path.pieces[0][0].hash)
    assert list(line) == ["seq", "branches", "event", "actions"]
    assert line["seq"] == 7
    assert line["branches"] == [{"hash": name, "uid": 1, "parent": None, "start": 0, "from_key": 0, "key": "5"}]
    assert line["event"]["type"] == "RequestArrived"
    assert line["event"]["at_s"] == 0.1
    assert line["event"]["blocks"] == {"pieces": [[name, 2]], "blocks": 2}
    assert line["event"]["max_tokens"] is None
    assert line["actions"] == [
        {
            "type": "Dispatch",
            "reason": "cost 4",
            "request_id": "r1",
            "worker_id": 2,
            "rule": "min",
            "leg": "AGG",
            "overlap_blocks": 1,
            "candidates": [],
            "dp_rank": None,
        }
    ]


def test_enums_go_by_name() -> None:
    line = json.loads(Encoder().entry(0, worker(0), []))
    assert line["event"]["role"] == "MIXED"
    assert "branches" not in line


def test_a_branch_is_defined_once_and_after_its_parent() -> None:
    tree = ContentTree(1, 1)
    held = [keys_path(tree, [1, 2, 3])]
    held.append(keys_path(tree, [1, 2, 9]))
    encoder = Encoder()

    def defined(n: int) -> list[str]:
        stored = BlocksStored(at_s=0.0, worker_id=WorkerId(0), runs=held[n].runs()[-1:])
        return [b["key"] for b in json.loads(encoder.entry(n, stored, [])).get("branches", [])]

    assert [defined(1), defined(0), defined(1)] == [["1", "9"], [], []]


def test_content_that_comes_back_is_a_new_branch_under_the_old_name() -> None:
    tree, encoder = ContentTree(1, 1), Encoder()
    lines = [encode_header(HEADER)]
    for seq in range(2):
        path = keys_path(tree, [1, 2])
        lines.append(encoder.entry(seq, RequestArrived(at_s=0.0, request_id=RequestId("r"), isl=2, blocks=path), []))
        del path  # nobody holds it
    first, second = (entry.event.blocks.pieces[0][0] for entry in decode(lines))  # type: ignore[attr-defined]
    assert first is not second
    assert first.hash == second.hash


def test_the_header_comes_back() -> None:
    assert decode_header(encode_header(HEADER)) == HEADER


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "power-of-two", "direct", "kv"])
@pytest.mark.parametrize("explain", [False, True])
def test_replay_through_the_same_policy_gives_the_same_actions(mode: str, explain: bool) -> None:
    lines = played(mode, explain=explain)
    assert replay(lines, [router(mode, explain=explain)]) is None
    assert len(list(decode(lines))) == len(lines) - 1 > 20


def test_replay_shows_the_first_difference_with_both_sides() -> None:
    lines = played("kv", tie_break="lowest_id")
    found = replay(lines, [router("round-robin")])
    assert found is not None
    assert found.seq == 3  # three workers came up first
    assert [a.rule for a in found.recorded if isinstance(a, Dispatch)] == ["tie"]
    assert [a.rule for a in found.replayed if isinstance(a, Dispatch)] == ["rr"]
    text = str(found)
    assert "journal entry 3" in text
    assert text.index("recorded: [Dispatch") < text.index("replayed: [Dispatch")


def test_replay_sees_another_seed() -> None:
    lines = played("random")
    assert replay(lines, [router("random", seed=42)]) is None
    assert replay(lines, [router("random", seed=43)]) is not None


def test_lines_are_handed_over_many_at_a_time() -> None:
    tape = Tape()
    journal = Journal(tape, HEADER)
    for n in range(2000):
        journal.note(TimerFired(at_s=float(n), name="t"), [])
    assert 0 < tape.writes < 10
    journal.flush()
    journal.flush()
    assert [e.seq for e in decode(tape.lines)] == list(range(2000))


# ---------------------------------------------------------------- what is refused


def good_lines() -> list[str]:
    event = RequestFinished(at_s=1.0, request_id=RequestId("r"), worker_id=WorkerId(0), output_tokens=3)
    return [encode_header(HEADER), Encoder().entry(0, event, [])]


def damaged(change: tuple[str, str]) -> Sequence[str]:
    header, line = good_lines()
    assert change[0] in line
    return [header, line.replace(*change)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("RequestFinished", "RequestVanished"), "type 'RequestVanished' is not one of BlocksCleared, "),
        (('"output_tokens":3', '"output_tokens":"3"'), "'3' is not int"),
        (('"output_tokens":3', '"output_tokens":true'), "True is not int"),
        (('"output_tokens":3', '"tokens":3'), "RequestFinished has no field 'tokens'"),
        ((',"output_tokens":3', ""), "RequestFinished lacks its field 'output_tokens'"),
        (('"seq":0', '"seq":"a"'), "'a' is not a whole number"),
        (('"event"', '"happening"'), "'event' is missing"),
        (('"actions":[]', '"actions":{}'), "{} is not a list"),
        (('"actions":[]}', '"actions":['), "the line is cut or damaged"),
        (('{"seq"', '[{"seq"'), "the line is cut or damaged"),
    ],
)
def test_a_damaged_line_is_named(change: tuple[str, str], says: str) -> None:
    with pytest.raises(JournalError) as caught:
        list(decode(damaged(change)))
    assert str(caught.value).startswith("journal line 2: ")
    assert says in str(caught.value)


def test_a_branch_must_be_defined_first() -> None:
    tree = ContentTree(1, 1)
    stored = BlocksStored(at_s=0.0, worker_id=WorkerId(0), runs=keys_path(tree, [1]).runs())
    line = json.loads(Encoder().entry(0, stored, []))
    del line["branches"]
    with pytest.raises(JournalError, match=r"line 2: branch '[0-9]+' is used before it is defined"):
        list(decode([encode_header(HEADER), json.dumps(line)]))


def test_another_schema_is_refused() -> None:
    other = encode_header(HEADER).replace("dynatwin.journal/1", "dynatwin.journal/9")
    with pytest.raises(JournalError, match=r"schema is 'dynatwin.journal/9', this version reads 'dynatwin.journal/1'"):
        list(decode([other]))


def test_an_empty_journal_is_refused() -> None:
    with pytest.raises(JournalError, match="the journal is empty"):
        replay([], [router()])


def test_a_number_that_is_none_cannot_be_written() -> None:
    with pytest.raises(JournalError, match="entry 3 cannot be written"):
        Encoder().entry(3, TimerFired(at_s=float("nan"), name="t"), [])


def test_an_event_of_a_plugin_is_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Comet(Event):
        pass

    with pytest.raises(JournalError, match=r"Comet is in none of policies.cluster.events"):
        Encoder().entry(0, Comet(at_s=0.0), [])


def test_a_field_that_is_younger_than_the_journal_takes_its_default() -> None:
    header, line = good_lines()
    old = json.loads(Encoder().entry(0, worker(3), []))
    del old["event"]["gpus"], old["event"]["epoch"]
    (entry,) = decode([header, json.dumps(old)])
    assert entry.event == worker(3)
    assert line
