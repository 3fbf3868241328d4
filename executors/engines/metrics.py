"""Prometheus pages of engines, as far as they are read here: samples by name, with their labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Page:
    """One reading of `/metrics`. Lines that are no samples are passed over."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found:
                labels = dict(_LABEL.findall(found["labels"] or ""))
                self._samples.setdefault(found["name"], []).append(Sample(labels, float(found["value"])))

    def all(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def total(self, name: str) -> float | None:
        """The sum over all labels; None where there is no such sample."""
        samples = self.all(name)
        return sum(sample.value for sample in samples) if samples else None
