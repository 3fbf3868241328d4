"""Every event and action that the cluster knows survives the journal; a replay repeats a random history exactly."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import pytest
from builders import Scene, router
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster import actions, events, kv_events, scaling, ticks, traffic, twin_asks
from policies.cluster.actions import Action
from policies.cluster.blocks import BlockPath, BlockRun, Branch, ContentTree
from policies.cluster.events import Event
from policies.cluster.ids import BlockHash
from policies.cluster.journal import Encoder, Header, Journal, decode, encode_header, replay
from policies.cluster.kv_events import DumpEntry, KvEvent, KvStored

HEADER = Header(versions={}, config={}, seed=0, policies=())
KEYS = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 2), min_size=1, max_size=5)


def kinds(module: object, base: type) -> list[type]:
    found = [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, base)]
    return sorted(found, key=lambda k: k.__name__)


MODULES = (events, kv_events, actions, traffic, scaling, twin_asks, ticks)
EVENTS = sorted({kind for module in MODULES for kind in kinds(module, Event)}, key=lambda k: k.__name__)
ACTIONS = sorted({kind for module in MODULES for kind in kinds(module, Action)}, key=lambda k: k.__name__)
KV_EVENTS = kinds(kv_events, KvEvent)


def values(hint: object, tree: ContentTree) -> st.SearchStrategy:
    """Values of an annotated field, derived here a second time and in another way than in the code under test."""
    paths = KEYS.map(lambda keys: tree.path(keys, len(keys)))
    private = st.builds(tree.private, st.integers(0, 5)).map(lambda b: BlockPath(((b, b.start + 2),), b.start + 2))
    if hint is BlockPath:
        return paths | private
    if hint is BlockRun:
        return (paths | private).map(lambda path: path.runs()[-1])
    if hint is BlockHash:
        return st.integers(0, 2**64 - 1)
    if hint is KvEvent:
        return st.sampled_from(KV_EVENTS).flatmap(lambda kind: things(kind, tree))
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint in (int, str, bool):
        return st.from_type(hint)  # type: ignore[arg-type]
    if hasattr(hint, "__supertype__"):
        return values(hint.__supertype__, tree)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return things(hint, tree)
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0], tree), max_size=3).map(tuple)
    (inner,) = (a for a in get_args(hint) if a is not NoneType)
    return st.none() | values(inner, tree)


def things(kind: type, tree: ContentTree) -> st.SearchStrategy:
    fields_of = {name: values(hint, tree) for name, hint in get_type_hints(kind).items()}
    if kind in (KvStored, DumpEntry):  # as many hashes as ids
        pairs = st.lists(st.tuples(values(BlockHash, tree), values(BlockHash, tree)), max_size=3)
        halves = pairs.map(lambda both: (tuple(a for a, _ in both), tuple(b for _, b in both)))
        rest = {name: value for name, value in fields_of.items() if name not in ("exts", "local_hashes")}
        return st.tuples(halves, st.fixed_dictionaries(rest)).map(
            lambda drawn: kind(exts=drawn[0][0], local_hashes=drawn[0][1], **drawn[1])
        )
    return st.builds(kind, **fields_of)


def bare(value: object) -> object:
    """The value with every branch replaced by what a reader can know of it."""
    if isinstance(value, Branch):
        return (value.hash, value.uid, value.start, value.shareable, bare(value.parent))
    if isinstance(value, tuple):
        return tuple(bare(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *((f.name, bare(getattr(value, f.name))) for f in fields(value)))
    return value


@pytest.mark.parametrize("kind", EVENTS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_every_event_survives(kind: type[Event], data: st.DataObject) -> None:
    tree = ContentTree(1, 1)
    some = data.draw(st.lists(things(kind, tree), min_size=1, max_size=4))
    encoder = Encoder()
    lines = [encode_header(HEADER), *(encoder.entry(seq, event, []) for seq, event in enumerate(some))]
    entries = list(decode(lines))
    assert [bare(entry.event) for entry in entries] == [bare(event) for event in some]
    again = Encoder()
    assert [again.entry(e.seq, e.event, e.actions) for e in entries] == lines[1:]


@pytest.mark.parametrize("kind", ACTIONS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_every_action_survives(kind: type[Action], data: st.DataObject) -> None:
    some = data.draw(st.lists(things(kind, ContentTree(1, 1)), max_size=4))
    line = Encoder().entry(0, events.TimerFired(at_s=0.1, name="t"), some)
    (entry,) = decode([encode_header(HEADER), line])
    assert [bare(action) for action in entry.actions] == [bare(action) for action in some]


def test_there_is_something_to_try() -> None:
    assert len(EVENTS) > 15
    assert len(ACTIONS) > 6


# ---------------------------------------------------------------- histories

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "arrive", "arrive", "token", "end", "end", "remove", "clear", "drain", "lose", "up"]
        ),
        st.integers(0, 11),
        st.lists(st.integers(0, 2), min_size=3, max_size=3),
    ),
    max_size=60,
)


def play(scene: Scene, steps: list) -> None:
    """A random history that could happen: impossible steps are left out, stored blocks follow first tokens."""
    open_, prompts = set(), {}
    for serial, (kind, n, keys) in enumerate(steps):
        live = [w.worker_id for w in scene.view.live]
        request_id = f"r{n}"
        if kind == "arrive" and request_id not in open_:
            scene.arrive(request_id, isl=192, keys=keys)
            if request_id in scene.view.requests:
                open_.add(request_id)
                prompts[request_id] = keys
        elif kind == "token" and request_id in open_ and request_id in prompts:
            if scene.where[request_id] in scene.view.workers:
                scene.first_token(request_id)
                scene.stored(scene.where[request_id], prompts.pop(request_id))
        elif kind == "end" and request_id in open_:
            gone = scene.where[request_id] not in scene.view.workers
            [scene.finish, scene.fail, scene.cancel][1 if gone else n % 3](request_id)
            open_.discard(request_id)
        elif kind == "remove" and n % 4 in scene.view.workers:
            scene.removed(n % 4, keys, lo=n % 3)
        elif kind == "clear" and n % 4 in scene.view.workers:
            scene.cleared(n % 4)
        elif kind == "drain" and len(live) > 1:
            scene.draining(live[n % len(live)])
        elif kind == "lose" and len(live) > 1:
            scene.lost(live[n % len(live)])
            for request in [r for r in open_ if scene.where[r] not in scene.view.workers]:
                scene.fail(request)
                open_.discard(request)
        elif kind == "up":
            scene.up(100 + serial)
    for request in sorted(open_):
        scene.finish(request)


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "power-of-two", "kv"])
@pytest.mark.parametrize("tie_break", ["seeded", "least_recent"])
@given(steps=STEPS, explain=st.booleans(), temperature=st.sampled_from([0.0, 0.5]))
def test_a_random_history_replays_and_keeps_every_invariant(
    mode: str, tie_break: str, steps: list, explain: bool, temperature: float
) -> None:
    lines: list[str] = []
    journal = Journal(lambda text: lines.extend(text.splitlines()), HEADER)
    knobs = {"tie_break": tie_break, "explain": explain, "router_temperature": temperature}
    scene = Scene(router(mode, **knobs), workers=4, journal=journal)
    play(scene, steps)
    scene.invariants.finish()
    journal.flush()
    assert replay(lines, [router(mode, **knobs)]) is None
    counters = scene.policy.counters()  # type: ignore[attr-defined]
    assert counters.get("open_bookings", 0) == counters.get("unknown_free", 0) == 0
