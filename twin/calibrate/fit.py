"""Fits coefficients to measured means: Levenberg-Marquardt on relative errors, with a ridge towards the priors.

What all blocks have in common may move far, a block less far from that, a model's factors a little. Nothing is drawn at
random and nothing depends on the order of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.calibrate import parameters as p
from twin.calibrate.fitted import Design, Factors, Fit
from twin.calibrate.pricing import COSTS, Means
from twin.calibrate.shapes import F64
from twin.perf.coefficients import Coefficients

ROUNDS = 40
SMALL_STEP = 1e-4
"""Relative gain of a round below which the fit ends."""
PROBE = 1e-5
"""Change of a logarithm that slopes of costs are taken over."""
INSIDE = tuple(name for name in p.NAMES if name not in p.OUTSIDE)


def fit(design: Design) -> Fit:
    """The coefficients that explain the rows of a design best."""
    problem = _Problem(design)
    return problem.result(_minimised(problem))


def uncalibrated() -> Fit:
    """The priors, for everything."""
    values = {parameter.name: parameter.prior for parameter in p.PARAMETERS}
    return Fit(blocks={}, common=values, factors={}, clients={}, kinds={})


@dataclass(frozen=True, slots=True)
class _Point:
    """One set: `logs` by block and parameter, which of them may still move, `factors` by model, `clients` by block."""

    logs: F64
    free: F64
    factors: F64
    clients: F64


class _Problem:
    """Parameters in units of their spread: common to all, by block, by model, by block and client."""

    def __init__(self, design: Design) -> None:
        rows = design.rows
        self._design = design
        self._blocks = sorted({(row.engine, row.family) for row in rows})
        self._models = sorted({row.model for row in rows})
        self._clients = _other_clients([row.client for row in rows])
        self._block = np.array([self._blocks.index((row.engine, row.family)) for row in rows])
        self._model = np.array([self._models.index(row.model) for row in rows])
        kinds = ["", *self._clients]
        self._client = np.array([kinds.index(row.client) if row.client in kinds else 0 for row in rows])
        first = {cell: at for at, cell in reversed(list(enumerate(design.cell)))}
        self._cell_row = np.array([first[cell] for cell in range(len(design.cells))])
        self._priors = np.log([parameter.prior for parameter in p.PARAMETERS])
        self._spreads = np.array([parameter.spread for parameter in p.PARAMETERS])
        self._limits = np.log([parameter.limit for parameter in p.PARAMETERS])
        count, blocks = len(p.PARAMETERS), len(self._blocks)
        kinds_of_clients = len(self._clients)
        sizes = [count, blocks * count, len(self._models) * 3, kinds_of_clients, blocks * kinds_of_clients]
        ends = np.cumsum(sizes)
        self.size = int(ends[-1])
        self._slices = [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        used = [~np.isnan(times) for times in (design.measured.ttft, design.measured.tpot)]
        self._used = [np.flatnonzero(one) for one in used]
        times = zip((design.measured.ttft, design.measured.tpot), self._used, strict=True)
        self._logs = [np.log(values[at]) for values, at in times]
        sizes = [len(at) for at in self._used]
        self._scale = np.repeat([p.TTFT_SCALE, p.TPOT_SCALE], sizes)
        self.weight = np.repeat([p.TTFT_WEIGHT, p.TPOT_WEIGHT], sizes)

    # ------------------------------------------------------------ parameters

    def _point(self, x: F64) -> _Point:
        common, own, factors, kinds, clients = (x[part] for part in self._slices)
        blocks = len(self._blocks)
        wished = self._priors + self._spreads * (p.COMMON_SPREAD * common + own.reshape(blocks, -1))
        return _Point(
            logs=np.minimum(wished, self._limits),
            free=(wished <= self._limits).astype(np.float64),
            factors=factors.reshape(-1, 3) * np.array(p.FACTOR_SPREADS),
            clients=self._client_logs(kinds, clients.reshape(blocks, -1)),
        )

    def _client_logs(self, kinds: F64, own: F64 | float) -> F64:
        """Logarithms of the constant of every other way of measuring."""
        logs: F64 = math.log(p.CLIENT_PRIOR) + p.CLIENT_SPREAD * (p.COMMON_SPREAD * kinds + own)
        return logs

    def _table(self, point: _Point, probe: str | None = None) -> F64:
        """The costs of every cell; with the logarithm of one parameter a little higher."""
        logs = point.logs.copy()
        if probe is not None:
            logs[:, p.NAMES.index(probe)] += PROBE
        values, factors = np.exp(logs), np.exp(point.factors)
        coefficients = []
        for row in self._cell_row:
            block, model = values[self._block[row]], factors[self._model[row]]
            own = dict(zip(p.NAMES, block.tolist(), strict=True))
            coefficients.append(Coefficients(**own, m_decode=float(model[0]), m_prefill=float(model[1])))
        return self._design.table(coefficients)

    def _path(self, point: _Point) -> tuple[F64, F64]:
        """Seconds outside the engine by row: the constant, and what follows the prompt."""
        logs = point.logs[self._block]
        constant = logs[:, p.NAMES.index("client_s")] + point.factors[self._model, 2]
        other = self._client > 0
        constant[other] = point.clients[self._block[other], self._client[other] - 1]
        per_token = np.exp(logs[:, p.NAMES.index("client_s_per_token")])
        return np.exp(constant), per_token * self._design.prompt_tokens

    # ------------------------------------------------------------ residuals

    def residuals(self, x: F64) -> F64:
        """Logarithms of predicted over measured, in units of their scale."""
        point = self._point(x)
        means = self._design.pricing.means(self._table(point))
        ttft = means.ttft + sum(self._path(point))
        logs = [np.log(times[at]) for times, at in zip((ttft, means.tpot), self._used, strict=True)]
        wrong = [predicted - measured for predicted, measured in zip(logs, self._logs, strict=True)]
        residuals: F64 = np.concatenate(wrong) / self._scale
        return residuals

    def jacobian(self, x: F64) -> F64:
        """Slopes of the residuals (residuals, parameters)."""
        point = self._point(x)
        table = self._table(point)
        means, slopes = self._design.pricing.means(table), self._design.pricing.slopes(table)
        paths = self._path(point)
        ttft = means.ttft + sum(paths)
        whole = Means(ttft, means.tpot)
        by_log = [np.stack([(self._table(point, name) - table) / PROBE for name in INSIDE], axis=2)]
        cell = self._design.cell
        parts = []
        for metric, at in zip(("ttft", "tpot"), self._used, strict=True):
            slope = getattr(slopes, metric)
            inside = np.einsum("rc,rcp->rp", slope[at], by_log[0][cell[at]])
            logs = np.zeros((len(at), len(p.NAMES)))
            logs[:, [p.NAMES.index(name) for name in INSIDE]] = inside
            factors = np.zeros((len(at), 3))
            for place, name in enumerate(("m_decode", "m_prefill")):
                column = COSTS.index(name)
                factors[:, place] = slope[at, column] * table[cell[at], column]
            clients = np.zeros(len(at))
            if metric == "ttft":
                usual = self._client[at] == 0
                logs[:, p.NAMES.index("client_s")] = factors[:, 2] = paths[0][at] * usual
                logs[:, p.NAMES.index("client_s_per_token")] = paths[1][at]
                clients = paths[0][at] * ~usual
            parts.append(self._spread_out(point, at, logs, factors, clients) / getattr(whole, metric)[at, None])
        jacobian: F64 = np.vstack(parts) / self._scale[:, None]
        return jacobian

    def _spread_out(self, point: _Point, at: np.ndarray, logs: F64, factors: F64, clients: F64) -> F64:
        """Slopes by the parameters themselves, from slopes by the logarithms that rows use."""
        lines = np.arange(len(at))
        block, model, client = self._block[at], self._model[at], self._client[at]
        moved = logs * point.free[block] * self._spreads
        whole = np.zeros((len(at), self.size))
        common, own, of_models, of_kinds, of_clients = (whole[:, part] for part in self._slices)
        common += moved * p.COMMON_SPREAD
        own.reshape(len(at), len(self._blocks), len(p.NAMES))[lines, block] = moved
        of_models.reshape(len(at), len(self._models), 3)[lines, model] = factors * np.array(p.FACTOR_SPREADS)
        if self._clients:
            other = client > 0
            moved_clients = clients[other] * p.CLIENT_SPREAD
            of_kinds[lines[other], client[other] - 1] = moved_clients * p.COMMON_SPREAD
            places = of_clients.reshape(len(at), len(self._blocks), len(self._clients))
            places[lines[other], block[other], client[other] - 1] = moved_clients
        return whole

    # ------------------------------------------------------------ result

    def result(self, x: F64) -> Fit:
        """The parameters by name."""
        point = self._point(x)
        common = np.minimum(self._priors + self._spreads * p.COMMON_SPREAD * x[self._slices[0]], self._limits)
        values = {key: _named(point.logs[at]) for at, key in enumerate(self._blocks)}
        alike = np.exp(self._client_logs(x[self._slices[3]], 0.0))
        kinds = {kind: float(alike[place]) for place, kind in enumerate(self._clients)}
        clients = {
            (*key, kind): float(np.exp(point.clients[at, place]))
            for at, key in enumerate(self._blocks)
            for place, kind in enumerate(self._clients)
        }
        factors = {name: Factors(*np.exp(point.factors[at]).tolist()) for at, name in enumerate(self._models)}
        return Fit(blocks=values, common=_named(common), factors=factors, clients=clients, kinds=kinds)


def _named(logs: F64) -> dict[str, float]:
    return dict(zip(p.NAMES, np.exp(logs).tolist(), strict=True))


def _other_clients(clients: Sequence[str]) -> list[str]:
    """The ways of measuring but the most frequent one, which the others are compared with."""
    counts = {name: clients.count(name) for name in sorted(set(clients))}
    reference = max(counts, key=lambda name: counts[name])
    return [name for name in counts if name != reference]


def _minimised(problem: _Problem) -> F64:
    """Levenberg-Marquardt on soft absolute errors, 2 (sqrt(1 + r^2) - 1) each, and x^2 for each parameter."""

    def cost(residuals: F64, x: F64) -> float:
        return float((problem.weight * 2 * (np.sqrt(1 + residuals**2) - 1)).sum() + (x**2).sum())

    x = np.zeros(problem.size)
    residuals = problem.residuals(x)
    best, damping = cost(residuals, x), 1e-2
    for _ in range(ROUNDS):
        jacobian = problem.jacobian(x)
        weight = problem.weight / np.sqrt(1 + residuals**2)
        matrix = jacobian.T @ (weight[:, None] * jacobian) + np.eye(problem.size)
        slope = jacobian.T @ (weight * residuals) + x
        for _ in range(8):
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -slope)
            tried = problem.residuals(x + step)
            reached = cost(tried, x + step)
            if reached < best:
                break
            damping *= 4
        else:
            return x
        gain = (best - reached) / best
        x, residuals, best, damping = x + step, tried, reached, max(damping / 5, 1e-6)
        if gain < SMALL_STEP:
            break
    return x
