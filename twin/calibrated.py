"""Whether a run stays within what its step times were calibrated with: batches, prompts and contexts.

GPUs and formats are known when a latency model is built, and are told there; a load is known from the trace, and what
became of it from the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from policies.errors import ConfigError
from reports.columns import ColumnFile
from reports.record import REQUESTS, STEPS

if TYPE_CHECKING:
    import pyarrow as pa

    from twin.cluster import Group
    from twin.perf.calibration import Reach

BEYOND: Final = "outside the calibrated range of the step times"
"""Stands in every warning of `warnings_beyond`, and in no other."""


def refuse_beyond(groups: Iterable[Group], batches: Iterable[pa.RecordBatch]) -> None:
    """Before a run: raises `ConfigError` if a group is `strict` and the trace, or its batch limit, goes too far."""
    strict = [group for group in groups if group.config.latency.params.get("strict")]
    if not strict:
        return
    isl = context = 0
    for batch in batches:
        prompts, outputs = batch.column("isl"), batch.column("osl")
        for prompt, output in zip(prompts.to_pylist(), outputs.to_pylist(), strict=True):
            isl, context = max(isl, prompt), max(context, prompt + (output or 0))
    for group in strict:
        limit = group.settings.max_num_seqs * group.settings.ranks
        for text in _beyond(group, batch=limit, prompt_tokens=isl, context_tokens=context):
            hint = "; lower engine.max_num_seqs" if text.startswith("batch") else ""
            raise ConfigError(
                f"workers {group.config.name}: strict, and outside the calibrated range: {text}{hint}; "
                f"calibrate with such runs, or leave strict out for a warning"
            )


def warnings_beyond(groups: Iterable[Group], folder: Path) -> Iterator[str]:
    """After a run: what went beyond the calibrated range of a group, from the run's record."""
    ranged = [group for group in groups if _reach(group) is not None]
    if not ranged:
        return
    requests, steps = ColumnFile(folder / REQUESTS).columns(), ColumnFile(folder / STEPS).columns()
    prompt, total = requests.floats("isl"), requests.floats("isl") + requests.floats("osl")
    batch = steps.floats("decodes")
    largest = {
        "batch": int(batch.max(initial=0)),
        "prompt_tokens": int(prompt.max(initial=0)),
        "context_tokens": int(total.max(initial=0)),
    }
    for group in ranged:
        for text in _beyond(group, **largest):
            yield f"workers {group.config.name}: {BEYOND}: {text}"


def _beyond(group: Group, *, batch: int, prompt_tokens: int, context_tokens: int) -> list[str]:
    reach = _reach(group)
    if reach is None:
        return []
    return reach.beyond_load(batch=batch, prompt_tokens=prompt_tokens, context_tokens=context_tokens)


def _reach(group: Group) -> Reach | None:
    return group.latency.provenance.reach
