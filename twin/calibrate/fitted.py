"""The result of a fit: coefficients per engine and GPU family, factors per model, and what stands in where both lack.

Nearest first: the same engine and GPU family; what the blocks of that family have in common; what all have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twin.calibrate.measured import Measurement
from twin.calibrate.parameters import NAMES
from twin.calibrate.pricing import Means, Pricing, cost_row
from twin.calibrate.shapes import F64, Shapes
from twin.perf.coefficients import Coefficients, block_of
from twin.perf.costs import step_costs
from twin.perf.memory import Placement


class Source(Protocol):
    """What predictions are made from."""

    def coefficients(self, engine: str, placed: Placement) -> Coefficients: ...
    def client_s(self, row: Measurement, usual_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Factors:
    """Of one model, the same in all blocks."""

    m_decode: float = 1.0
    m_prefill: float = 1.0
    m_client: float = 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """`blocks` by (engine, GPU family), `common` to all: values by name. Ways of measuring other than the most frequent
    one have a constant path of their own, in seconds: `clients` by (engine, family, client), `kinds` by client."""

    blocks: Mapping[tuple[str, str], Mapping[str, float]]
    common: Mapping[str, float]
    factors: Mapping[str, Factors]
    clients: Mapping[tuple[str, str, str], float]
    kinds: Mapping[str, float]

    def family(self, family: str) -> Mapping[str, float] | None:
        """The geometric mean of the family's blocks."""
        kin = [values for (_, other), values in self.blocks.items() if other == family]
        if not kin:
            return None
        return {name: math.prod(values[name] for values in kin) ** (1 / len(kin)) for name in NAMES}

    def values(self, engine: str, family: str) -> Mapping[str, float]:
        """The nearest there is."""
        return self.blocks.get((engine, family)) or self.family(family) or self.common

    def coefficients(self, engine: str, placed: Placement) -> Coefficients:
        """For one model on one engine, as a client of the reference kind sees it."""
        values = dict(self.values(engine, placed.gpu.family))
        factors = self.factors.get(placed.model.name, Factors())
        values["client_s"] *= factors.m_client
        return Coefficients(**values, m_decode=factors.m_decode, m_prefill=factors.m_prefill)

    def client_s(self, row: Measurement, usual_s: float) -> float:
        """The constant path of the way in which a row was measured; that of the most frequent one is `usual_s`."""
        if row.client not in self.kinds:
            return usual_s
        return self.clients.get((row.engine, row.family, row.client), self.kinds[row.client])


class FromFile:
    """The same from a calibration file; `name` is what the key `coefficients` of a configuration may be."""

    def __init__(self, name: str) -> None:
        self._name = name

    def coefficients(self, engine: str, placed: Placement) -> Coefficients:
        return block_of(self._name, engine, placed).values

    def client_s(self, row: Measurement, usual_s: float) -> float:
        return block_of(self._name, row.engine, row.placed).clients.get(row.client, usual_s)


class Design:
    """Rows with their shapes, ready to be priced under any fit."""

    def __init__(self, rows: Sequence[Measurement], shapes: Sequence[Shapes]) -> None:
        self.rows, self.shapes = tuple(rows), tuple(shapes)
        keys = [(row.engine, row.placed) for row in self.rows]
        self.cells: tuple[tuple[str, Placement], ...] = tuple(dict.fromkeys(keys))
        places = {cell: at for at, cell in enumerate(self.cells)}
        self.cell = np.array([places[key] for key in keys], dtype=np.intp)
        self.pricing = Pricing(self.shapes, self.cell.tolist())
        self.prompt_tokens = np.array([one.prompt_tokens for one in self.shapes])
        self.measured = Means(*(_times(self.rows, metric) for metric in ("ttft_s", "tpot_s")))

    def part(self, kept: Sequence[bool] | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Design:
        """Some of the rows."""
        at = np.flatnonzero(np.asarray(kept))
        return Design([self.rows[i] for i in at], [self.shapes[i] for i in at])

    def table(self, coefficients: Sequence[Coefficients]) -> F64:
        """The costs of every cell, under coefficients of its own."""
        pairs = zip(self.cells, coefficients, strict=True)
        return np.array([cost_row(step_costs(placed, c)) for (_, placed), c in pairs])

    def inside(self, source: Source) -> Means:
        """The same without the path outside the engine."""
        return self._inside(self._coefficients(source))

    def predict(self, source: Source) -> Means:
        """The mean TTFT, with the path outside the engine, and the mean TPOT of every row."""
        coefficients = self._coefficients(source)
        inside = self._inside(coefficients)
        cells = self.cell.tolist()
        usual_s = [coefficients[at].client_s for at in cells]
        constant = np.array([source.client_s(row, own_s) for row, own_s in zip(self.rows, usual_s, strict=True)])
        per_token = np.array([coefficients[at].client_s_per_token for at in cells])
        return Means(inside.ttft + constant + per_token * self.prompt_tokens, inside.tpot)

    def _coefficients(self, source: Source) -> list[Coefficients]:
        return [source.coefficients(engine, placed) for engine, placed in self.cells]

    def _inside(self, coefficients: Sequence[Coefficients]) -> Means:
        return self.pricing.means(self.table(coefficients))


def _times(rows: Sequence[Measurement], metric: str) -> F64:
    """Seconds; NaN where there is none."""
    values = [getattr(row, metric) for row in rows]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
