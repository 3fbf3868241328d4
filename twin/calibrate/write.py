"""Writes a calibration file: TOML with a block per engine and GPU family, what it rests on, and how far off it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date

from twin.calibrate.bands import Bands, Metrics
from twin.calibrate.fitted import Design, Fit
from twin.calibrate.measured import Measurement, Table
from twin.calibrate.parameters import FACTORS, OUTSIDE

HEAD = """\
# Coefficients of the roofline model, fitted by `twin calibrate`: docs/calibration.md says what stands here.
# Single figures trade against one another (t_launch with alpha, e_gemm with h_prefill): only their sum means something.
# e_*: share of the data-sheet rate that is reached. Times in seconds. client_s and client_s_per_token are the path
# outside the engine (HTTP, tokeniser, measuring client), `clients` its constant where others measured; they are never
# added to a step.
# band: relative error, half and nine tenths of the runs are below; a model's band is that of configurations which the
# fit had not seen, a block's that of models, a family's that of engines, the generic one's that of GPU families.
"""

Lines = Iterator[str]


def calibration_text(table: Table, design: Design, fit: Fit, bands: Bands, day: date) -> str:
    """The whole file. The same table gives the same text, but for the day."""
    return HEAD + "\n" + "\n".join(_lines(table, design, fit, bands, day)) + "\n"


def _lines(table: Table, design: Design, fit: Fit, bands: Bands, day: date) -> Lines:
    if not table.count("ttft"):
        fit = _inside(fit)
    yield "[calibration]"
    yield f'table = "{table.name}"'
    yield f'digest = "{table.digest}"'
    yield f'date = "{day.isoformat()}"'
    yield f'statistic = "{table.statistic}"'
    yield f"tpot_rows = {table.count('tpot')}"
    yield f"ttft_rows = {table.count('ttft')}"
    yield f"groups = {len({row.group for row in design.rows})}"
    for model, factors in fit.factors.items():
        yield ""
        yield f'[calibration.factors."{model}"]'
        yield from _numbers({name: getattr(factors, name) for name in FACTORS})
    for (engine, family), values in fit.blocks.items():
        rows = [row for row in design.rows if (row.engine, row.family) == (engine, family)]
        name = f"{engine}-{family}"
        yield from _head(name, {"engine": engine, "family": family, "engine_version": versions(rows)}, values)
        measured = {row.client for row in rows}
        yield from _clients(name, {kind: fit.clients[engine, family, kind] for kind in fit.kinds if kind in measured})
        yield from _range(name, rows)
        yield from _band(f"{name}.band", bands.blocks.get((engine, family)))
        for (own, kin, model), metrics in bands.models.items():
            if (own, kin) == (engine, family):
                yield from _band(f'{name}.models."{model}"', metrics)
    for family in sorted({family for _, family in fit.blocks}):
        mean = fit.family(family)
        if mean is not None:
            yield from _head(family, {"family": family}, mean)
            yield from _clients(family, fit.kinds)
            yield from _range(family, [row for row in design.rows if row.family == family])
            yield from _band(f"{family}.band", bands.families.get(family))
    yield from _head("generic", {}, fit.common)
    yield from _clients("generic", fit.kinds)
    yield from _band("generic.band", bands.generic)


def _inside(fit: Fit) -> Fit:
    """Without the path outside the engine, of which nothing was measured."""

    def kept(values: Mapping[str, float]) -> dict[str, float]:
        return {name: 0.0 if name in OUTSIDE else value for name, value in values.items()}

    return replace(fit, blocks={key: kept(values) for key, values in fit.blocks.items()}, common=kept(fit.common))


def _head(name: str, texts: Mapping[str, str], values: Mapping[str, float]) -> Lines:
    yield ""
    yield f"[{name}]"
    yield from (f'{key} = "{value}"' for key, value in texts.items() if value)
    yield from _numbers(values)


def _numbers(values: Mapping[str, float]) -> Lines:
    for name, value in values.items():
        if value:
            yield f"{name} = {float(f'{value:.4g}')!r}"


def _clients(name: str, kinds: Mapping[str, float]) -> Lines:
    if kinds:
        yield f"[{name}.clients]"
        yield from _numbers(kinds)


def _range(name: str, rows: list[Measurement]) -> Lines:
    """What was measured: limits of a load, and which GPUs and formats."""
    batch = max(min(row.users, (row.max_num_seqs or row.users) * row.placed.layout.dp) for row in rows)
    yield f"[{name}.range]"
    yield f"batch = {batch}"
    yield f"prompt_tokens = {max(row.isl for row in rows)}"
    yield f"context_tokens = {max(row.isl + row.osl for row in rows)}"
    for key, names in (
        ("gpus", {row.placed.gpu.name for row in rows}),
        ("weights", {row.placed.weights for row in rows}),
        ("kv", {row.placed.kv for row in rows}),
    ):
        listed = ", ".join(f'"{one}"' for one in sorted(names))
        yield f"{key} = [{listed}]"


def _band(name: str, metrics: Metrics | None) -> Lines:
    if metrics is None or (metrics.tpot is None and metrics.ttft is None):
        return
    yield f"[{name}]"
    for metric, errors in (("tpot", metrics.tpot), ("ttft", metrics.ttft)):
        if errors is not None:
            yield f"{metric}_rows = {errors.rows}"
            yield from _numbers({f"{metric}_p50": errors.median, f"{metric}_p90": errors.p90})


def versions(rows: list[Measurement]) -> str:
    """Which releases a block was measured on: the only one, or the first and the last of several."""
    found = sorted({row.engine_version for row in rows if row.engine_version}, key=_version)
    if not found:
        return ""
    name = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}.get(rows[0].engine, rows[0].engine)
    return f"{name} {found[0]}" if len(found) == 1 else f"{name} {found[0]} to {found[-1]} mixed"


def _version(text: str) -> tuple[tuple[int, str], ...]:
    """Numbers by value, texts by letter."""
    parts = text.replace("-", ".").split(".")
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
