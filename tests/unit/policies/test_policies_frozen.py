"""A frozen record is what the dataclass of the standard library is."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.frozen import frozen


@frozen
class Point:
    x: int
    y: float = 0.0
    tags: tuple[str, ...] = ()
    note: str = field(default="", compare=False, repr=False)


@frozen
class Named(Point):
    name: str


class Standard:
    """The same two as the standard library makes them."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Point:
        x: int
        y: float = 0.0
        tags: tuple[str, ...] = ()
        note: str = field(default="", compare=False, repr=False)


values = st.fixed_dictionaries(
    {
        "x": st.integers(0, 2),
        "y": st.sampled_from([0.0, 1.5, float("inf")]),
        "tags": st.sampled_from([(), ("a",)]),
        "note": st.sampled_from(["", "n"]),
    }
)


@given(values, values)
def test_comparison_hash_and_text_are_those_of_a_dataclass(one: dict, two: dict) -> None:
    ours, theirs = (Point(**one), Point(**two)), (Standard.Point(**one), Standard.Point(**two))
    assert (ours[0] == ours[1]) is (theirs[0] == theirs[1])
    assert hash(ours[0]) == hash(theirs[0])
    assert repr(ours[0]) == repr(theirs[0]).removeprefix("Standard.")
    assert asdict(ours[0]) == asdict(theirs[0])
    assert replace(ours[0], x=7) == Point(**{**one, "x": 7})


def test_it_never_changes_and_has_slots() -> None:
    point = Point(x=1)
    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.y
    assert not hasattr(point, "__dict__")


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Point(1)  # type: ignore[misc]


def test_a_record_that_adds_fields_is_another_kind() -> None:
    named = Named(x=1, name="a")
    assert [one.name for one in fields(named)] == ["x", "y", "tags", "note", "name"]
    assert named != Point(x=1)
    assert Point(x=1) != named
    assert repr(named) == "Named(x=1, y=0.0, tags=(), name='a')"


def test_methods_of_its_own_are_kept() -> None:
    @frozen
    class Loose:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

        def __repr__(self) -> str:
            return "loose"

    assert Loose(x=1) == Loose(x=2)
    assert (hash(Loose(x=3)), repr(Loose(x=3))) == (1, "loose")
