"""What a run comes to, as one tree of frozen values that is also report.json.

Equal runs give equal bytes: no clock, no host and no path belongs in here. It holds figures and words, and computes
neither: figures come from reports/build.py, definitions from reports/metrics.py.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from policies.errors import ConfigError
from policies.frozen import frozen
from reports.metrics import CI_METHOD, PERCENTILE_METHOD, Distribution
from reports.replicas import PlannerFigures
from reports.verdict import SlaResult

if TYPE_CHECKING:
    from reports.told import ExplainedFigures, OracleFigures, OracleMeta

SCHEMA = "dynatwin.report/1"

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

T = TypeVar("T")


# --- what the run was: handed over by whoever ran it ------------------------------------------------------------------


@frozen
class TraceMeta:
    """The demand, in words. `name` is a file name without its folder; `skipped` counts dropped rows by reason."""

    name: str
    format: str
    synthetic: bool
    source: str | None = None
    licence: str | None = None
    notes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)


@frozen
class WorkerMeta:
    """One worker that the run had at any time; the size of its KV pool where it has one.

    `held_from_s` is when it was ordered (None: before the run), `held_until_s` when it was stopped (None: never): its
    GPUs are paid for from the one to the other, starting and draining included. `up_from_s` is when one that was
    ordered within the run was ready (None: before the run, or never).
    """

    worker_id: int
    name: str
    group: str
    gpus: int
    role: str = "mixed"
    total_blocks: int | None = None
    block_size: int | None = None
    held_from_s: float | None = None
    held_until_s: float | None = None
    up_from_s: float | None = field(default=None, metadata={"sparse": True})


@frozen
class StartMeta:
    """One worker that came up in the run, with its stages (None: it did not come to that, or is not told apart).

    `timed_by` says where its time comes from: "links", "formula" or "given". `over` names the links that its weights
    crossed, `sent_by` the worker that sent them (None: a store, or somebody outside the run).
    """

    worker_id: int
    ordered_s: float
    timed_by: str
    load_from_s: float | None = None
    loaded_s: float | None = None
    up_s: float | None = None
    weight_bytes: int | None = None
    over: str | None = None
    sent_by: int | None = None


@frozen
class PowerMeta:
    """What the steps of a worker ask of each of its GPUs, for an estimate of energy: the rated power, and seconds at
    full rate per token, per step (reading weights), per token of context, for all routed experts; `expert_missed` is
    the probability that one token does not choose a given expert.
    """

    tdp_w: float
    token_multiply_s: float
    step_read_s: float
    ctx_token_read_s: float
    experts_read_s: float
    expert_missed: float


@frozen
class GroupMeta:
    """One worker group: its GPU, what a GPU costs, and what an estimate of energy needs (None where not known)."""

    name: str
    gpu: str
    role: str = "mixed"
    usd_per_hour: float | None = None
    power: PowerMeta | None = None


@frozen
class LatencyMeta:
    """Where the step latencies of a worker group come from."""

    group: str
    model: str
    source: str
    engine_version: str | None = None
    error_band: str | None = None
    notes: tuple[str, ...] = ()


@frozen
class RunMeta:
    """Everything about a run that its record does not hold. `cluster` has one line per worker group.

    `tiers` counts full prompt blocks at first admissions: looked up, found on the device, found in the host tier, and
    blocks loaded from there. `moved_bytes` is what crossed simulated links: "kv" handed over, "weights" of starts, KV
    from the "host" tier; blocks that a block manager moved down are "tier_stores", up "tier_loads", ahead of
    a load "tier_fetches". `kvbm` says what block managers did: look-ups by class, blocks by edge, ages of
    blocks, what was fetched ahead. `routing` has the router's own counters,
    `ideal` the full blocks of all prompts that arrived ("prompt_blocks") and those that an endless cache would have had
    ("hit_blocks"). `explained`: the terms of each decision are in decisions.parquet; `oracle` is what a sample of them
    comes to in hindsight. `hash_known`: some row of the trace has hash ids, so a hit rate means something. `config` is
    the complete configuration as nested plain values, `origins` where each of its dotted keys came from.
    """

    trace: TraceMeta
    cluster: tuple[str, ...]
    router: str
    latency: tuple[LatencyMeta, ...]
    workers: tuple[WorkerMeta, ...]
    gpus: int
    hash_known: bool
    seed: int
    simulated: bool = True
    groups: tuple[GroupMeta, ...] = ()
    tiers: Mapping[str, int] = field(default_factory=dict)
    kvbm: Mapping[str, Json] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    routing: Mapping[str, int] = field(default_factory=dict)
    ideal: Mapping[str, int] = field(default_factory=dict)
    explained: bool = False
    oracle: OracleMeta | None = None
    starts: tuple[StartMeta, ...] = ()
    not_modelled: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    config: Mapping[str, Json] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


# --- what came out ----------------------------------------------------------------------------------------------------


@frozen
class Demand:
    """What was asked for: rows of the trace, first to last arrival, and their tokens."""

    requests: int
    span_s: float | None
    rate_rps: float | None
    input_tokens: int
    output_tokens: int


@frozen
class Counts:
    """Every row by its end, and the reasons given for ends that are not completions."""

    completed: int
    rejected: int
    cancelled: int
    failed: int
    open: int
    reasons: Mapping[str, int]


@frozen
class Throughput:
    """Work of completed requests over the makespan, and over the GPU-seconds held."""

    requests_per_s: float | None
    requests_per_s_per_gpu: float | None
    output_tokens_per_s: float | None
    output_tokens_per_s_per_gpu: float | None


@frozen
class Latencies:
    """Of completed requests; itl_s pools the gaps of all answers, router_wait_s is the part of queue_wait_s that they
    spent in the router's queue.
    """

    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    queue_wait_s: Distribution
    router_wait_s: Distribution


@frozen
class WorkerFigures:
    """What one worker did. `requests` were sent to it, as prefill worker or to answer; input tokens and hit rate are
    of the prompts it was to compute, output tokens of the answers it gave. Those wait who were sent and have not been
    admitted for the first time.
    """

    worker_id: int
    name: str
    group: str
    role: str
    requests: int
    completed: int
    input_tokens: int
    output_tokens: int
    hit_rate: float | None
    steps: int
    busy_s: float
    busy_share: float | None
    mean_running: float | None
    peak_waiting: int
    preemptions: int
    kv_peak_blocks: int
    kv_peak_share: float | None


@frozen
class GroupFigures:
    """What one worker group did and cost. `gpu_s`: GPU-seconds held, from order to stop; `energy_j` is an estimate;
    `good` are the requests that its workers answered within the SLA. Groups that only prefill answer none: None.
    """

    group: str
    gpu: str
    role: str
    workers: int
    gpus: int
    requests: int
    completed: int
    input_tokens: int
    output_tokens: int
    busy_share: float | None
    gpu_s: float | None
    energy_j: float | None
    cost_usd: float | None
    good: int | None
    goodput_rps_per_gpu: float | None
    output_tokens_per_s_per_gpu: float | None


@frozen
class EndFigures:
    """Requests that ended without completing, for one reason: how many of all, how long their prompts are on average,
    and from when to when they arrived. `code` is the word by which the reason is counted (None: it has none).
    `retry_after_mean_s`: when they were told to come again, on average of those that were.
    """

    status: str
    code: str | None
    reason: str
    requests: int
    share: float
    prompt_tokens_mean: float | None
    first_s: float | None
    last_s: float | None
    retry_after_mean_s: float | None = None


@frozen
class ShareFigures:
    """How evenly the workers of one role were used, by requests and by prompt and output tokens: Jain's index, and the
    smallest and the largest share of a worker.
    """

    role: str
    workers: int
    requests_fairness: float | None
    requests_share: tuple[float, float] | None
    tokens_fairness: float | None
    tokens_share: tuple[float, float] | None


@frozen
class HitBound:
    """The hit rate in blocks that was reached, beside the highest that any router could have reached."""

    reached: float | None
    upper_bound: float | None
    prompt_blocks: int
    ideal_blocks: int


@frozen
class RoutingFigures:
    """What the router did. Figures that its mode does not count are None; `explained` and `oracle` need --explain."""

    decisions: int
    effectiveness: float | None
    non_max_overlap: int | None
    overlap_lost_blocks: int | None
    overlap_lost_tokens: int | None
    explained: ExplainedFigures | None
    oracle: OracleFigures | None


@frozen
class Report:
    """The whole report of a run."""

    meta: RunMeta
    demand: Demand
    counts: Counts
    makespan_s: float | None
    throughput: Throughput
    latency: Latencies
    tokens_per_s_per_user: Distribution
    hit_rate: float | None
    hit_bound: HitBound | None
    routing: RoutingFigures | None
    ends: tuple[EndFigures, ...]
    shares: tuple[ShareFigures, ...]
    preemptions: int
    readmissions: int
    migrations: int
    kv_peak_share: float | None
    busy_share: float | None
    fairness: float | None
    workers: tuple[WorkerFigures, ...]
    groups: tuple[GroupFigures, ...]
    gpu_s: float | None
    sla: SlaResult | None
    planner: PlannerFigures | None = field(default=None, metadata={"sparse": True})
    percentile_method: str = PERCENTILE_METHOD
    interval_method: str = CI_METHOD
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The bytes of report.json: sorted keys, floats as Python's repr, null for what is undefined."""
        return stable_json(self)

    @staticmethod
    def from_json(text: str) -> Report:
        """The report in a report.json; ConfigError where it is none of this schema."""
        try:
            plain = json.loads(text)
            if plain["schema"] != SCHEMA:
                raise ConfigError(f"report.json: schema {plain['schema']}, this version reads {SCHEMA}; run it again")
            return _restore(Report, plain)
        except (ValueError, KeyError, TypeError) as why:
            raise ConfigError(f"report.json: not a report of ours ({why}); run the replay again") from None

    @staticmethod
    def load(folder: Path) -> Report:
        """The report of a run folder."""
        path = folder / "report.json"
        try:
            return Report.from_json(path.read_text(encoding="utf-8"))
        except OSError as why:
            raise ConfigError(f"{path}: {why.strerror or why}; is {folder} a finished run folder?") from None


def stable_json(value: object) -> str:
    """A tree of dataclasses and plain values as JSON that is the same for equal trees; NaN is a bug and raises."""
    return json.dumps(_plain(value), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        named = {item.name: getattr(value, item.name) for item in fields(value) if not item.metadata.get("sparse")}
        sparse = {item.name: getattr(value, item.name) for item in fields(value) if item.metadata.get("sparse")}
        named |= {name: item for name, item in sparse.items() if item is not None}
        return {name: _plain(item) for name, item in named.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _restore(kind: type[T], plain: Mapping[str, object]) -> T:
    """A dataclass from the plain values that `_plain` made of it."""
    hints = typing.get_type_hints(kind, localns=vars(import_module("reports.told")))
    there = [item.name for item in fields(kind) if not item.metadata.get("sparse") or item.name in plain]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], plain[name]) for name in there})


def _value(hint: object, plain: object) -> object:
    """A plain value as `hint` says: a dataclass, a tuple of them, or itself."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if plain is None:
            return None
        return _value(next(option for option in arguments if option is not type(None)), plain)
    if origin is tuple and isinstance(plain, list):
        return tuple(_value(arguments[0], item) for item in plain)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(plain, Mapping):
        return _restore(hint, plain)
    return plain


def flat_config(value: Json, key: str = "") -> Iterator[tuple[str, str]]:
    """Nested plain values as (dotted key, text), in order of the keys; list places are numbers."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from flat_config(value[name], f"{key}.{name}" if key else name)
    elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
        for place, item in enumerate(value):
            yield from flat_config(item, f"{key}.{place}" if key else str(place))
    else:
        yield key, str(value) if not isinstance(value, bool) else str(value).lower()
