"""Step times of aiconfigurator-core under the schedules of the error table, for `benchmarks/accuracy.py --peer`."""

from __future__ import annotations

import math
import sys

import numpy as np

from policies.errors import CapabilityError, ConfigError
from twin.calibrate.fit import fit
from twin.calibrate.fitted import Design
from twin.calibrate.pricing import Means
from twin.calibrate.shapes import COLUMNS
from twin.perf.external import Names, silicon
from twin.perf.memory import Placement
from twin.perf.protocol import LatencyModel, PrefillChunk


def peer_means(design: Design) -> Means:
    """What step times of aiconfigurator-core give for the same schedules and protocol; NaN where it refuses.

    It has no path outside the engine, so it gets the one of our fit to all rows.
    """
    models = [_steps(engine, placed) for engine, placed in design.cells]
    found = fit(design)
    own, inside = design.predict(found), design.inside(found)
    ttft, tpot = np.full(len(design.rows), math.nan), np.full(len(design.rows), math.nan)
    for at, (cell, shapes) in enumerate(zip(design.cell.tolist(), design.shapes, strict=True)):
        model = models[cell]
        try:
            seconds = None if model is None else np.array([_priced(model, line) for line in shapes.work])
        except CapabilityError:
            seconds = None
        if seconds is not None:
            ttft[at] = shapes.ttft @ seconds + own.ttft[at] - inside.ttft[at]
            tpot[at] = shapes.tpot @ seconds
    return Means(ttft, tpot)


def _steps(engine: str, placed: Placement) -> LatencyModel | None:
    """The model of one cell; None if it refuses."""
    try:
        return silicon(placed, engine, "accuracy", Names())
    except (CapabilityError, ConfigError) as error:
        if "pip install" in str(error):
            sys.exit(f"accuracy: {error}")
        return None


def _priced(model: LatencyModel, line: np.ndarray) -> float:
    """Seconds of one shape. How many prompts share its tokens follows from their pairs."""
    work = dict(zip(COLUMNS, line.tolist(), strict=True))
    batch = round(work["sequences"])
    ctx = round(work["ctx_tokens"])
    prompt = round(work["tokens"]) - batch
    if prompt < 1:
        return model.decode_piece(max(1, batch), max(1, ctx)).g0
    pairs = work["pairs"] or work["window_pairs"]
    count = max(1, round(prompt * prompt / (2 * pairs)))
    new = max(1, prompt // count)
    past = max(0, round((pairs / count - new * (new + 1) / 2) / new))
    return model.step_s([PrefillChunk(new, past, 0, True)] * count, batch, ctx, 0, 0)
