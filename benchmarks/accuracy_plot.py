"""The residual plot of docs/accuracy.md: predicted over measured times against users and prompt length, by engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement
from twin.calibrate.pricing import Means

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"vllm": ("vLLM", "#2563eb"), "sglang": ("SGLang", "#e0680c"), "trtllm": ("TensorRT-LLM", "#0d8f83")}
)
AXES: Mapping[str, Callable[[Measurement], int]] = MappingProxyType(
    {"users at once": lambda row: row.users, "prompt length, tokens": lambda row: row.isl}
)
APART = 1.08
"""Engines stand beside each other: so many times to the right of the one before."""
LOW, HIGH = 0.25, 4.0
"""What lies beyond is drawn at the edge."""
LEAST_ROWS = 5
"""Of a median that is drawn."""
RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


def draw(design: Design, predicted: Means, path: Path) -> None:
    """Write the PNG. Dots are runs, lines medians of an engine by octave; the band is an error of 20 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(AXES), sharey=True, sharex="col")
    for line, metric in zip(panels, ("tpot", "ttft"), strict=True):
        for panel, (title, value) in zip(line, AXES.items(), strict=True):
            _panel(panel, design, getattr(predicted, metric) / getattr(design.measured, metric), value)
            if metric == "ttft":
                panel.set_xlabel(title)
        line[0].set_ylabel(f"{metric.upper()}: predicted / measured")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, design: Design, ratio: np.ndarray, value: Callable[[Measurement], int]) -> None:
    at = np.array([value(row) for row in design.rows], dtype=np.float64)
    engines = np.array([row.engine for row in design.rows])
    axes.axhspan(0.8, 1.2, color="#eef1f4", linewidth=0)
    axes.axhline(1.0, color="#5c6878", linewidth=0.8)
    for place, (engine, (label, colour)) in enumerate(LOOKS.items()):
        mine = (engines == engine) & ~np.isnan(ratio)
        x, y = at[mine] * APART ** (place - 1), np.clip(ratio[mine], LOW, HIGH)
        axes.plot(x, y, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0)
        axes.plot(*_medians(x, y), "-o", color=colour, markersize=3.5, linewidth=1.5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(LOW / 1.05, HIGH * 1.05)
    axes.set_yticks(RATIOS, labels=[f"{one:g}" for one in RATIOS])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
    axes.spines[["top", "right"]].set_visible(False)


def _medians(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """(places, medians) of the octaves that have enough runs."""
    octave = np.rint(np.log2(x)) if len(x) else x
    kept = [one for one in np.unique(octave) if (octave == one).sum() >= LEAST_ROWS]
    return [float(np.median(x[octave == one])) for one in kept], [float(np.median(y[octave == one])) for one in kept]
