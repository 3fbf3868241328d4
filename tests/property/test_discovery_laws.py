"""Who is there, folded from what is seen, is who the store lists: for any lists, one after another."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from executors.discovery.protocol import Changed, Joined, Left, differences, newest
from executors.discovery.record import WorkerRecord
from policies.cluster.ids import Role

RECORDS = st.builds(
    WorkerRecord,
    name=st.sampled_from("abc"),
    incarnation=st.integers(0, 3),
    engine=st.just("vllm"),
    url=st.sampled_from(["http://h:1", "http://h:2", "http://h:3"]),
    role=st.just(Role.MIXED),
    draining=st.booleans(),
)


@examples(200)
@given(st.lists(st.lists(RECORDS, max_size=6), max_size=6))
def test_what_is_seen_adds_up_to_who_is_there(lists: list[list[WorkerRecord]]) -> None:
    before: dict[str, WorkerRecord] = {}
    folded: dict[str, WorkerRecord] = {}
    for listed in lists:
        now = newest(listed)
        for seen in differences(before, now):
            match seen:
                case Joined(record=record):
                    assert record.name not in folded
                    assert record.url not in {one.url for one in folded.values()}, "an address is free before it is had"
                    folded[record.name] = record
                case Changed(before=old, record=record):
                    assert folded[record.name] == old != record
                    folded[record.name] = record
                case Left(record=record):
                    assert folded.pop(record.name) == record
        assert folded == now
        before = now


@examples(200)
@given(st.lists(RECORDS, max_size=8))
def test_who_counts_is_the_newest_of_its_name_and_address_in_whatever_order_they_are_listed(
    listed: list[WorkerRecord],
) -> None:
    found = newest(listed)
    assert all(one.incarnation == max(o.incarnation for o in listed if o.name == name) for name, one in found.items())
    assert len({one.url for one in found.values()}) == len(found)
    unlike = {(one.name, one.incarnation): one for one in listed}.values()
    assert newest(list(unlike)[::-1]) == newest(unlike)
