"""Options of `aiconfig` as a table, and what a line of them asks for: one reading for every command.

Values come as text and leave as what they mean, or as one line that says which option, the value and what it may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from twin.commands.replay_line import Option, Values
from twin.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from aiconfig.estimate import Load
    from aiconfig.request import SearchRequest
    from aiconfig.workload import Workload

WHERE = (
    Option("--model", "NAME", "Model (aiconfig models), or the path of a config.json."),
    Option("--gpu", "NAME", "GPU (aiconfig systems); prefill=NAME,decode=NAME for one of each role."),
    Option("--gpus", "N", "GPUs that there are, all roles together."),
    Option("--engine", "NAMES", "vllm, sglang, trtllm, several with commas, or any."),
    Option("--mode", "NAMES", "agg, disagg, or any."),
    Option("--weights", "NAMES", "Number formats of weights to try, e.g. bf16,fp8."),
    Option("--kv", "NAMES", "Number formats of KV to try."),
    Option("--max-num-seqs", "N,...", "Running requests of a rank at most."),
    Option("--max-num-batched-tokens", "N,...", "Tokens of a step of a rank at most."),
    Option("--nextn", "N,...", "Draft tokens of a decode step (models with draft layers)."),
    Option("--hardware", "FILE", "TOML file with GPUs of your own (docs/latency-models.md)."),
    Option("--coefficients", "FILE", "Calibration of your own (twin calibrate), or priors; otherwise the shipped one."),
    Option("--strict", "", "Leave out what lies outside the calibrated range, instead of a note."),
)
SERVED = (
    Option(
        "--router",
        "MODES",
        "Routers to try, e.g. round_robin,kv, with keys of [router] behind colons: kv:router_temperature=0.5.",
    ),
    Option("--host-kv", "SIZES", "Host memory of a worker for KV to try, e.g. 0,64GiB."),
    Option("--disk-kv", "SIZES", "Disk of a worker for KV to try, e.g. 0,1TB."),
)
"""What finalists are simulated under; the first value of each is what others are compared with."""
DEMAND = (
    Option("--isl", "N", "Prompt tokens."),
    Option("--osl", "N", "Output tokens."),
    Option("--min-ratio", "X", "Lengths lie between this share of --isl and --osl, and those."),
    Option("--prefix", "N", "Tokens at the start of every prompt that are the same in all."),
    Option("--arrivals", "HOW", "closed (users ask again when answered), poisson, or recorded (of --trace)."),
    Option("--trace", "FILE", "A trace of your own: its lengths, arrivals and prefixes."),
    Option("--requests", "N", "Requests that a simulation plays."),
    Option("--users", "N", "Users at once; otherwise the most that the limits allow, for each candidate."),
    Option("--rate", "X", "Requests a second, of --arrivals poisson or recorded."),
)
WANTED = (
    Option("--sla", "LIMITS", "Limits, e.g. ttft=200ms,itl=50ms@p95; exit 3 if nothing meets them."),
    Option(
        "--objective",
        "NAMES",
        "What is best: throughput-per-gpu (default), goodput-per-gpu, throughput, cost, energy, min-gpus, latency; "
        "several with commas make a Pareto set.",
    ),
    Option("--price", "USD", "Dollars for a GPU-hour."),
)  # fmt: skip

NOTHING: Mapping[str, object] = MappingProxyType({})
OWN_OF_TRACE = ("isl", "osl", "min_ratio", "prefix")
"""What a trace says itself."""


def request_of(values: Values, extra: Mapping[str, object] = NOTHING) -> SearchRequest:
    """The search that a line asks for: what it names (and `extra`, by field), and defaults for the rest.

    Raises ConfigError for what has no meaning, and TraceError for a trace that cannot be read.
    """
    from aiconfig.candidate import ENGINES, MODES
    from aiconfig.request import search_request
    from reports.sla import parse_sla

    given: dict[str, object] = {**extra, **_gpus_of(values)}
    if "model" in values:
        given["model"] = values["model"]
    for option, known in (("engine", ENGINES), ("mode", MODES)):
        if option in values:
            named = words(values, option)
            given[f"{option}s"] = known if named == ("any",) else named
    for option in ("weights", "kv"):
        if option in values:
            given[option] = words(values, option)
    for option in ("max_num_seqs", "max_num_batched_tokens", "nextn"):
        if option in values:
            given[option] = tuple(_whole(option, word) for word in words(values, option))
    if "router" in values:
        from aiconfig.serving import router_choice

        given["routers"] = tuple(router_choice(word) for word in words(values, "router"))
    for option in ("host_kv", "disk_kv"):
        if option in values:
            given[option] = sizes(values, option)
    if "planner" in values:
        raise ConfigError(
            f"--planner {values['planner']}: this version has no planners, so a search cannot try them; leave it out"
        )
    if "hardware" in values:
        given["hardware"] = Path(values["hardware"])
    if "coefficients" in values:
        given["coefficients"] = values["coefficients"]
    if "strict" in values:
        given["strict"] = True
    if "sla" in values:
        given["sla"] = parse_sla(values["sla"])
    if "price" in values:
        given["usd_per_gpu_hour"] = real(values, "price")
    for option in ("gpus", "seed", "top"):
        if option in values:
            given[option] = whole(values, option)
    given |= _demand_of(values)
    return search_request(given)


def _gpus_of(values: Values) -> Mapping[str, object]:
    """`--gpu NAME`, or `--gpu prefill=NAME,decode=NAME`."""
    if "gpu" not in values:
        return {}
    named = words(values, "gpu")
    if len(named) == 1 and "=" not in named[0]:
        return {"gpu": named[0]}
    found: dict[str, object] = {}
    for word in named:
        role, equals, gpu = word.partition("=")
        field = {"prefill": "prefill_gpu", "decode": "gpu"}.get(role)
        if not equals or not gpu or field is None or field in found:
            raise ConfigError(f"--gpu {values['gpu']}: write one GPU, or prefill=NAME,decode=NAME")
        found[field] = gpu
    if "gpu" not in found:
        raise ConfigError(f"--gpu {values['gpu']}: which GPU for decode (and mixed) workers? add decode=NAME")
    return found


def _demand_of(values: Values) -> Mapping[str, object]:
    """`workload` and `load`, each if the line says something of it."""
    from aiconfig.estimate import Load

    found: dict[str, object] = {}
    load = None
    if "users" in values or "rate" in values:
        load = Load(
            users=whole(values, "users") if "users" in values else None,
            rps=real(values, "rate") if "rate" in values else None,
        )
    if "trace" in values:
        workload, recorded = _trace_of(values)
        found["workload"] = workload
        load = load or (recorded if workload.arrivals != "closed" else None)
    elif any(name in values for name in ("seed", *(one.name for one in DEMAND)) if name not in ("users", "rate")):
        found["workload"] = workload_of(values)
    elif load is not None and load.rps is not None:
        found["workload"] = workload_of({**values, "arrivals": "poisson"})
    if load is not None:
        found["load"] = load
        _check_load(load, found.get("workload"))
    return found


def _check_load(load: Load, workload: object) -> None:
    """Users are for a closed loop, a rate is for arrivals by themselves."""
    arrivals = getattr(workload, "arrivals", "closed")
    if load.users is not None and arrivals != "closed":
        raise ConfigError(f"--users {load.users}: users are for --arrivals closed, and arrivals are {arrivals}")
    if load.rps is not None and arrivals == "closed":
        raise ConfigError(f"--rate {load.rps:g}: a rate is for --arrivals poisson or recorded, and arrivals are closed")


def workload_of(values: Values) -> Workload:
    """Lengths and arrivals of a workload without a trace; `--rate` alone means Poisson arrivals."""
    from aiconfig.request import SearchRequest
    from aiconfig.workload import Workload

    usual = SearchRequest().workload
    arrivals = values.get("arrivals", "poisson" if "rate" in values else usual.arrivals)
    if arrivals == "recorded":
        raise ConfigError("--arrivals recorded: recorded where? give --trace, or --arrivals closed or poisson")
    return Workload(
        isl=whole(values, "isl") if "isl" in values else usual.isl,
        osl=whole(values, "osl") if "osl" in values else usual.osl,
        min_ratio=real(values, "min_ratio") if "min_ratio" in values else usual.min_ratio,
        prefix_tokens=whole(values, "prefix") if "prefix" in values else usual.prefix_tokens,
        arrivals=arrivals,
        requests=whole(values, "requests") if "requests" in values else None,
        seed=whole(values, "seed") if "seed" in values else usual.seed,
    )


def _trace_of(values: Values) -> tuple[Workload, Load | None]:
    from aiconfig.trace_workload import read_workload

    for name in OWN_OF_TRACE:
        if name in values:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {values[name]}: has no effect beside --trace, whose rows say it; leave it out")
    path = Path(values["trace"])
    try:
        read = read_workload(
            path,
            requests=whole(values, "requests") if "requests" in values else None,
            arrivals=values.get("arrivals", "closed" if "users" in values else "recorded"),
            seed=whole(values, "seed") if "seed" in values else 0,
        )
    except TraceError as error:
        if " --" not in str(error):
            raise
        raise TraceError(
            f"{error}: an option of twin import, and of none here; twin import {path} OPTION -o {path.stem}.parquet "
            "makes a trace that needs none"
        ) from None
    return read.workload, read.recorded


# ---------------------------------------------------------------- single values


def words(values: Values, name: str) -> tuple[str, ...]:
    """A list with commas."""
    found = tuple(word.strip() for word in str(values[name]).split(","))
    if not all(found):
        raise ConfigError(f"{flag_of(name)} {values[name]}: a name is missing between the commas")
    return found


def sizes(values: Values, name: str) -> tuple[int, ...]:
    """Sizes with units as bytes."""
    from aiconfig.serving import size_bytes

    return tuple(size_bytes(word, flag_of(name)) for word in words(values, name))


def whole(values: Values, name: str) -> int:
    """A whole number."""
    return _whole(name, values[name])


def _whole(name: str, given: object) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise ConfigError(f"{flag_of(name)} {given}: must be a whole number") from None


def real(values: Values, name: str) -> float:
    """A number."""
    try:
        value = float(str(values[name]))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{flag_of(name)} {values[name]}: must be a number")
    return value


def flag_of(name: str) -> str:
    """The option of that name."""
    return f"--{name.replace('_', '-')}"


def only(values: Values, options: Sequence[Option]) -> dict[str, Any]:
    """The values of these options alone."""
    names = {option.name for option in options}
    return {name: value for name, value in values.items() if name in names}
