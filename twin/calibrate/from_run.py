"""Step times of a run, live or simulated, as measurements: each kind of step is one, at the mean of its seconds.

A run's record has no context of single prompts: a chunk is taken as the beginning of its prompt, which is too little
attention for long prompts in several chunks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from policies.errors import ConfigError
from reports.columns import ColumnFile
from reports.record import STEPS
from twin.calibrate.fitted import Design
from twin.calibrate.measured import Measurement, Table
from twin.calibrate.shapes import F64, Shapes, window_of, work_row
from twin.calibrate.unit_time import Asked
from twin.cluster import placement_of
from twin.config import Config, WorkerGroup
from twin.config_read import load
from twin.perf.protocol import PrefillChunk
from twin.perf.work import step_work

LONGEST = 2**31
BINS = 8
"""Kinds of steps per doubling of prompt tokens, of the batch and of its context."""


def read_run(folder: Path) -> tuple[Table, Design]:
    """The steps of a run folder. Raises `ConfigError` for one that is not whole or has no steps."""
    path, config_file = folder / STEPS, folder / "config.toml"
    for needed in (path, config_file):
        if not needed.is_file():
            raise ConfigError(f"{folder}: not a whole run folder, without {needed.name}; run the replay again")
    config = load(config_file)
    _refuse_drafts(config)
    steps = _Steps(path)
    rows: list[Measurement] = []
    shapes: list[Shapes] = []
    first = 0
    for group in config.workers:
        mine = (steps.worker >= first) & (steps.worker < first + group.count)
        first += group.count
        for row, shape in _kinds(folder.name, group, steps, mine):
            rows.append(row)
            shapes.append(shape)
    if not rows:
        raise ConfigError(f"{path}: no step that lasted any time")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    table = Table(name=folder.name, digest=digest, rows=tuple(rows), left_out={}, statistic="mean over alike steps")
    return table, Design(rows, shapes)


class _Steps:
    """Columns of steps.parquet without gaps; a leap counts at its mean context and mean seconds."""

    def __init__(self, path: Path) -> None:
        columns = ColumnFile(path, coded=("kind",)).columns()
        wanted = ("worker_id", "start_s", "end_s", "steps", "decodes", "ctx_tokens", "prefills", "prefill_tokens")
        raw = {name: columns.floats(name) for name in wanted}
        kept = (raw["end_s"] > raw["start_s"]) & (raw["steps"] > 0) & (raw["decodes"] + raw["prefill_tokens"] > 0)
        raw = {name: values[kept] for name, values in raw.items()}
        self.worker, self.steps = raw["worker_id"], raw["steps"]
        self.seconds = (raw["end_s"] - raw["start_s"]) / raw["steps"]
        self.decodes, self.prefills, self.prompt = raw["decodes"], raw["prefills"], raw["prefill_tokens"]
        self.ctx = raw["ctx_tokens"] + self.decodes * (raw["steps"] - 1) / 2

    def keys(self) -> F64:
        """A number for each kind of step."""
        parts = (self.prompt, self.decodes, np.where(self.decodes > 0, self.ctx, 0.0), self.prefills)
        key = np.zeros(len(self.worker))
        for values in parts:
            key = key * 1000 + np.where(values > 0, np.rint(np.log2(np.maximum(values, 1)) * BINS) + 1, 0)
        return key


def _kinds(name: str, group: WorkerGroup, steps: _Steps, mine: np.ndarray) -> list[tuple[Measurement, Shapes]]:
    placed = placement_of(group)
    keys = steps.keys()
    found: list[tuple[Measurement, Shapes]] = []
    for key in np.unique(keys[mine]).tolist():
        at = mine & (keys == key)
        weight = steps.steps[at] / steps.steps[at].sum()
        mean = [float(values[at] @ weight) for values in (steps.seconds, steps.decodes, steps.ctx, steps.prompt)]
        seconds, decodes, ctx, prompt = mean
        prefills = int(np.rint(steps.prefills[at] @ weight))
        chunks = [PrefillChunk(round(prompt / prefills), 0, 0, True)] * prefills if prefills else []
        asked = Asked(tuple(chunks), round(decodes), round(ctx) if decodes else 0, 0, 0)
        row = Measurement(
            name=f"{group.name} {len(found)}", group=f"{group.name} {key:.0f}", client=name,
            engine=group.engine.kind, engine_version="", placed=placed,
            isl=max(1, round(prompt)), osl=max(1, round(ctx / decodes) if decodes else 1),
            users=max(1, round(decodes)), prompts=None, length_ratio=None,
            max_num_seqs=group.engine.max_num_seqs, max_num_batched_tokens=group.engine.max_num_batched_tokens,
            poll_steps=1, wait_steps=0, wait_share=0.0, ttft_s=None, tpot_s=seconds,
        )  # fmt: skip
        found.append((row, _one_shape(asked, placed.layout.dp, window_of(placed.model))))
    return found


def _one_shape(asked: Asked, dp: int, window_tokens: int) -> Shapes:
    """A table of one step, which a "TPOT" of this row is the time of."""
    work = step_work(*asked, dp=dp, window_tokens=window_tokens)
    line = np.array([work_row(work, window_tokens)], dtype=np.float64)
    return Shapes(work=line, ttft=np.zeros(1), tpot=np.ones(1), prompt_tokens=0.0)


def _refuse_drafts(config: Config) -> None:
    drafts = sum(group.count for group in config.workers if group.engine.nextn)
    if drafts:
        raise ConfigError(f"engine.nextn: steps of {drafts} workers verify draft tokens, which the fit does not know")
