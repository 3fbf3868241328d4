"""Which column of a table of measurements is what: usual names, a user's own, and the unit and statistic of the times.

A unit or a statistic is never guessed: a name without them is refused with how to say them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.names import pick, unknown

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "id": "id",
        "engine": "engine",
        "engine_version": "engine_version",
        "model": "arch",
        "gpu": "gpu",
        "weights": "weights",
        "kv": "kv_cache_dtype",
        "tp": "attn_tp",
        "dp": "attn_dp",
        "ep": "moe_ep",
        "pp": "pp",
        "speculation": "spec_decode",
        "isl": "isl",
        "osl": "osl",
        "length_ratio": "len_min_ratio",
        "concurrency": "concurrency",
        "users": "concurrency_per_replica",
        "replicas": "replicas",
        "prompts": "num_prompts",
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "poll_steps": "sched_recv_interval",
        "wait_steps": "batch_wait_iters",
        "wait_share": "batch_wait_ratio",
        "client": "source",
        "group": "group",
        "use_ttft": "use_ttft",
        "use_tpot": "use_tpot",
        "ttft": "ttft_ms",
        "tpot": "tpot_ms",
    }
)
"""What is read, and the column that it is read from unless another is named."""

UNREAD = frozenset(
    (
        *("duplicate_ids", "measured_date", "image", "model_as_listed", "gemm_quant_mode", "moe_quant_mode"),
        *("num_warmups", "gpus", "moe_tp", "knob_evidence", "quality_flags"),
        "__index_level_0__",  # what pandas adds
        *("raw_tp_size", "raw_attention_dp_size", "raw_moe_tp_size", "raw_moe_ep_size", "raw_batch_size"),
    )
)
"""Columns that such tables have and that nothing is read from. Warm-up prompts leave an empty engine behind."""

REQUIRED = ("engine", "model", "gpu", "weights", "isl", "osl")
TIMES = ("ttft", "tpot")
UNIT_S: Mapping[str, float] = MappingProxyType({"s": 1.0, "ms": 1e-3, "us": 1e-6})
MEANS = ("mean", "avg")
NOT_MEANS = ("median", "p50", "p90", "p95", "p99", "max", "min")


@frozen
class Columns:
    """Column of each field that the table has; the two times with their unit."""

    names: Mapping[str, str]
    unit_s: Mapping[str, float]


def columns_of(present: Collection[str], given: Mapping[str, str], where: str) -> Columns:
    """Which of the columns `present` is what; `given` are a user's own names ("-" leaves a column out).

    Raises `ConfigError` for a column that is not known, a field that is missing, a time without unit or statistic.
    """
    names: dict[str, str] = {}
    left_out = {name for name, column in given.items() if column == "-"}
    for field, column in given.items():
        if column == "-":
            continue
        pick(f"{where}: --columns", field, FIELDS)
        bare = column.split(":")[0]
        if bare not in present:
            raise unknown(f"{where}: --columns {field}: column", bare, present)
        names[field] = bare
    taken = set(names.values()) | left_out
    for column in present:
        fields = [field for field, usual in FIELDS.items() if usual == column and field not in names]
        if fields and column not in left_out:
            names[fields[0]] = column
        elif column not in taken and column not in UNREAD and column not in FIELDS.values():
            hint = "; --columns FIELD=COLUMN says what it is, --columns COLUMN=- leaves it out"
            raise ConfigError(f"{unknown(f'{where}: column', column, [*FIELDS.values(), *UNREAD])}{hint}")
    _require(names, where)
    units = {field: _unit_s(field, given.get(field, names[field]), where) for field in TIMES if field in names}
    return Columns(names=names, unit_s=units)


def parse_columns(texts: Iterable[str]) -> dict[str, str]:
    """`--columns ttft=ttft_ms,tpot=latency:ms:mean` as a mapping."""
    given = {}
    for text in texts:
        for item in text.split(","):
            field, equals, column = item.strip().partition("=")
            if not equals or not field or not column:
                raise ConfigError(
                    f"--columns {item.strip()}: give FIELD=COLUMN, e.g. ttft=ttft_ms or ttft=first:ms:mean"
                )
            given[field] = column
    return given


def _require(names: Mapping[str, str], where: str) -> None:
    for field in REQUIRED:
        if field not in names:
            raise ConfigError(
                f"{where}: no column for {field} (usually {FIELDS[field]}); name it: --columns {field}=COLUMN"
            )
    if "users" not in names and "concurrency" not in names:
        raise ConfigError(f"{where}: no column for concurrency; name it: --columns concurrency=COLUMN")
    if not any(field in names for field in TIMES):
        raise ConfigError(f"{where}: no measured time; name one: --columns ttft=COLUMN:ms:mean or tpot=COLUMN:ms:mean")


def _unit_s(field: str, text: str, where: str) -> float:
    """Seconds of one unit of a time's column. The usual names are means by the definition of the table's format."""
    name, *said = text.split(":")
    words = [*said, *name.lower().split("_")]
    unit = next((word for word in words if word in UNIT_S), None)
    if unit is None:
        raise ConfigError(
            f"{where}: {field} from column {name}: in which unit? say {field}={name}:ms:mean (s, ms or us)"
        )
    other = next((word for word in words if word in NOT_MEANS), None)
    if other is not None:
        raise ConfigError(
            f"{where}: {field} from column {name} is a {other}; the fit takes means over the requests of a run, "
            f"and a median read as one is off by the tail; name the column of means"
        )
    if name != FIELDS[field] and not any(word in MEANS for word in words):
        raise ConfigError(
            f"{where}: {field} from column {name}: which statistic? means are taken: {field}={name}:{unit}:mean"
        )
    return UNIT_S[unit]
