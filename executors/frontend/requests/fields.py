"""An object of a request's body, read key by key; what nobody read is refused by name. Null is the same as absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from executors.frontend.errors import ApiError, invalid


def refuse(path: str) -> None:
    """What is done of a key that nobody knows, unless the operator wants it otherwise."""
    raise invalid(path[:128], "unknown parameter", "unknown_parameter")


class Fields:
    """Typed reading of one object. Every error names the field with its path and the limit."""

    def __init__(
        self, values: Mapping[str, object], where: str = "", on_unknown: Callable[[str], None] = refuse
    ) -> None:
        self._values = values
        self._where = where
        self._on_unknown = on_unknown
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> object:
        """As it stands; None where absent."""
        self._read.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        """All keys, for objects whose keys are the client's."""
        return list(self._values)

    def text(self, name: str, *, longest: int | None = None) -> str | None:
        value = self.value(name)
        if value is None or (isinstance(value, str) and (longest is None or len(value) <= longest)):
            return value
        if isinstance(value, str):
            raise invalid(self.path(name), f"{len(value)} characters; at most {longest} are taken")
        raise self.wrong(name, "a string")

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is None or value in choices:
            return value
        raise invalid(self.path(name), f"{value[:64]!r} is none of {', '.join(choices)}")

    def flag(self, name: str) -> bool | None:
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "a whole number")
        self._within(name, value, low, high)
        return value

    def number(
        self, name: str, low: float | None = None, high: float | None = None, *, above: float | None = None
    ) -> float | None:
        """A number within [low, high], and greater than `above`."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        self._within(name, value, low, high)
        if above is not None and value <= above:
            raise invalid(self.path(name), f"{value} is not above {above}")
        return float(value)

    def items(self, name: str) -> list[object] | None:
        value = self.value(name)
        if value is None or isinstance(value, list):
            return value
        raise self.wrong(name, "a list")

    def within(self, name: str) -> Fields | None:
        """The object below `name`."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.path(name), self._on_unknown)

    def objects(self, name: str) -> list[Fields] | None:
        values = self.items(name)
        if values is None:
            return None
        return [self.object_at(name, at, value) for at, value in enumerate(values)]

    def object_at(self, name: str, at: int, value: object) -> Fields:
        if not isinstance(value, dict):
            raise invalid(f"{self.path(name)}[{at}]", "is no object")
        return Fields(value, f"{self.path(name)}[{at}]", self._on_unknown)

    def texts(self, name: str, *, most: int | None = None) -> tuple[str, ...]:
        """A list of strings; empty where absent."""
        values = self.items(name) or []
        for at, value in enumerate(values):
            if not isinstance(value, str):
                raise invalid(f"{self.path(name)}[{at}]", "is no string")
        if most is not None and len(values) > most:
            raise invalid(self.path(name), f"{len(values)} given; at most {most} are taken")
        return tuple(str(value) for value in values)

    def ignore(self, *names: str) -> None:
        """Take without looking: what has no effect here and does no harm."""
        self._read.update(names)

    def done(self) -> None:
        """Everything has been read that anybody knows: what is left is unknown."""
        for name in self._values:
            if name not in self._read:
                self._on_unknown(self.path(name))

    def wrong(self, name: str, wanted: str) -> ApiError:
        return invalid(self.path(name), f"must be {wanted}")

    def _within(self, name: str, value: float, low: float | None, high: float | None) -> None:
        if low is not None and value < low:
            raise invalid(self.path(name), f"{value} is below {low}")
        if high is not None and value > high:
            raise invalid(self.path(name), f"{value} is above {high}")
