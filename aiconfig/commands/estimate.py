"""`aiconfig estimate`: one deployment, however it is named, priced in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aiconfig.commands.line import DEMAND, WHERE, flag_of, request_of, whole, words
from twin.commands.replay_line import Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from aiconfig.candidate import Candidate
    from aiconfig.request import SearchRequest
    from twin.config import Config

OF_A_SEARCH = (
    "--gpus",
    "--mode",
    "--weights",
    "--kv",
    "--engine",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--nextn",
)
ONE_WORKER = (
    Option("--engine", "NAME", "vllm, sglang or trtllm."),
    Option("--tp", "N", "Tensor parallelism of a worker."),
    Option("--pp", "N", "Pipeline stages of a worker."),
    Option("--dp", "N", "Attention data parallelism of a worker."),
    Option("--ep", "N", "Ranks that routed experts are split over."),
    Option("--replicas", "N", "Workers."),
    Option("--weights", "NAME", "Number format of weights."),
    Option("--kv", "NAME", "Number format of KV."),
    Option("--max-num-seqs", "N", "Running requests of a rank at most."),
    Option("--max-num-batched-tokens", "N", "Tokens of a step of a rank at most."),
    Option("--nextn", "N", "Draft tokens of a decode step."),
    Option("--router", "MODE", "Router, with keys of [router] behind colons: kv:router_temperature=0.5."),
    Option("--host-kv", "SIZE", "Host memory of a worker for KV, e.g. 64GiB."),
    Option("--disk-kv", "SIZE", "Disk of a worker for KV, e.g. 1TB."),
)
ESTIMATE_OPTIONS = (
    Option("CANDIDATE", "CANDIDATE", "A deployment by its name, as a search prints it."),
    Option("--config", "FILE", "A configuration of the twin (best.toml), or a launch script, instead of a name."),
    *(option for option in WHERE if option.flag not in OF_A_SEARCH),
    *ONE_WORKER,
    *DEMAND,
    Option("--sla", "LIMITS", "Limits to judge; exit 3 if they are not kept."),
    Option("--detail", "NAMES", "time, memory, provenance: several with commas."),
    Option("--no-replay", "", "Closed form alone."),
    Option("--seed", "N", "Seed of every random draw."),
    Option("--json", "", "Print one JSON document and nothing else."),
)
_NAMED = {option.name for option in ONE_WORKER}


def run(values: Values) -> int:
    """Run one line, given as the values of the options above."""
    from aiconfig.price import price
    from aiconfig.price_text import DETAILS, price_text
    from aiconfig.reasons import Rejection
    from twin.perf.names import pick

    details = words(values, "detail") if "detail" in values else ()
    for name in details:
        pick("--detail", name, dict.fromkeys(DETAILS))
    candidate, request = _asked(values)
    found = price(candidate, request, simulates="no_replay" not in values)
    if isinstance(found, Rejection):
        raise ConfigError(f"cannot be served: {found.line()}")
    if "json" in values:
        print(found.to_json(), end="")
    else:
        print(price_text(found, details))
    return Exit.OK if found.judgement.kept or request.sla is None else Exit.MISSED


estimate = command_of(
    run, ESTIMATE_OPTIONS, "Price one deployment: latencies, throughput and memory, by formula and run."
)


def _asked(values: Values) -> tuple[Candidate, SearchRequest]:
    """The deployment, and the demand as a request."""
    named = [name for name in ("candidate", "config") if name in values]
    parts = [name for name in values if name in _NAMED]
    if len(named) > 1:
        raise ConfigError(f"{values['candidate']} and --config {values['config']}: each names a deployment; give one")
    if named and parts:
        raise ConfigError(f"{flag_of(parts[0])} {values[parts[0]]}: {values[named[0]]} says that; leave it out")
    demand = {name: value for name, value in values.items() if name not in _NAMED}
    if named == ["config"]:
        return _configured(values, demand)
    request = request_of({name: value for name, value in demand.items() if name != "gpu"})
    if named:
        from aiconfig.names import candidate_of

        candidate = candidate_of(values["candidate"], request.model)
    else:
        request = request_of(demand)
        candidate = _parts(values, request)
    return candidate, replace(request, gpus=candidate.gpus)


def _parts(values: Values, request: SearchRequest) -> Candidate:
    """One pool of mixed workers out of its parts, with the first of what a search would try for the rest."""
    from aiconfig.candidate import ENGINES, Candidate, Pool
    from aiconfig.engines import ENGINE, MAX_NUM_SEQS
    from aiconfig.serving import USUAL_ROUTER, Serving, router_choice, size_bytes
    from twin.perf.layout import Layout
    from twin.perf.names import pick

    engine = values.get("engine", "vllm")
    pick("engine", engine, dict.fromkeys(ENGINES))

    def number(name: str, usual: int) -> int:
        return whole(values, name) if name in values else usual

    pool = Pool(
        role="mixed",
        gpu=request.gpu,
        layout=Layout(**{name: number(name, 1) for name in ("tp", "pp", "dp", "ep")}),
        replicas=number("replicas", 1),
        weights=values.get("weights", request.weights_of("mixed")[0]),
        kv=values.get("kv", request.kv_of("mixed")[0]),
        max_num_seqs=number("max_num_seqs", MAX_NUM_SEQS[0]),
        max_num_batched_tokens=number("max_num_batched_tokens", ENGINE[engine].batched_tokens[-1]),
    )
    serving = Serving(
        router=router_choice(values.get("router", USUAL_ROUTER)),
        host_kv_bytes=size_bytes(values.get("host_kv", "0"), "--host-kv"),
        disk_kv_bytes=size_bytes(values.get("disk_kv", "0"), "--disk-kv"),
    )
    return Candidate(model=request.model, engine=engine, pools=(pool,), nextn=number("nextn", 0), serving=serving)


def _configured(values: Values, demand: Values) -> tuple[Candidate, SearchRequest]:
    """The deployment of a file; its demand too, where the file has one and the line says nothing of it."""
    path = Path(values["config"])
    if path.suffix != ".toml":
        from aiconfig.emit.reading import Stated, import_files

        hardware = Path(values["hardware"]) if "hardware" in values else None
        stated = Stated(model=values.get("model"), gpu=values.get("gpu"), hardware=hardware)
        candidate = import_files([path], stated).candidate
        request = request_of({name: value for name, value in demand.items() if name not in ("gpu", "model", "config")})
        return candidate, replace(request, model=candidate.model, gpus=candidate.gpus)
    from aiconfig.deployment import from_config
    from aiconfig.physics import physics_of
    from twin.config_read import load

    config = load(path)
    candidate = from_config(config)
    for name in ("model", "gpu"):
        if name in values:
            raise ConfigError(f"{flag_of(name)} {values[name]}: {path} says that; leave it out")
    asked = {name: value for name, value in demand.items() if name != "config"}
    if not any(option.name in values for option in DEMAND) and config.trace.path is not None:
        asked |= _demand_of_config(config)
    if "sla" not in asked and config.sla is not None:
        asked["sla"] = config.sla
    request = request_of(asked)
    own = physics_of(config.workers[0].latency, f"workers.{config.workers[0].name}.latency")
    return candidate, replace(
        request,
        model=candidate.model,
        gpus=candidate.gpus,
        hardware=own.hardware or request.hardware,
        coefficients=own.coefficients or request.coefficients,
        strict=own.strict or request.strict,
    )


def _demand_of_config(config: Config) -> dict[str, str]:
    """The options that say what a configuration replays."""
    trace = config.trace
    found = {"trace": str(trace.path), "seed": str(config.seed)}
    if trace.limit is not None:
        found["requests"] = str(trace.limit)
    if trace.concurrency is not None:
        return {**found, "users": str(trace.concurrency), "arrivals": "closed"}
    return {**found, **({"rate": str(trace.rate_rps)} if trace.rate_rps is not None else {})}
