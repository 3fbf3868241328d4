"""Trace and configuration in, run folder and report out: the simulated replay from end to end.

This file only wires rooms together. It keeps what there is when a run is stopped half-way.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from policies.cluster.controller import Controller, Policy
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import ConfigError
from policies.frozen import frozen
from reports.build import build_report
from reports.files import held_back
from reports.record import OWN_FILES, RunWriter, finish_run
from reports.replicas import FILES as REPLICA_FILES
from reports.report import Report
from reports.sla import Sla, parse_sla
from traces.errors import TraceError
from traces.load import ReadOptions, Trace, open_trace
from traces.transform import transform
from twin import __version__
from twin.calibrated import refuse_beyond, warnings_beyond
from twin.cluster import Group
from twin.config import Config, TraceConfig
from twin.config_text import to_plain, to_toml
from twin.deciding import build_policy
from twin.describe import describe_run, starts_meta
from twin.errors import Stopped
from twin.mocker.demand import Demand
from twin.mocker.world import MockWorld
from twin.wiring import Cluster, build_cluster, observation

if TYPE_CHECKING:
    from policies.cluster.journal import Journal
    from policies.cluster.plain import JsonValue
    from twin.drill import Drill
    from twin.hindsight import Hindsight
    from twin.ideal import IdealCache
    from twin.mocker.routersync import SyncPlan
    from twin.planned import Planned

CONFIG_TOML = "config.toml"
JOURNAL = "journal.jsonl"
FAULTS_JSON = "faults.json"
OTHER_FILES = (CONFIG_TOML, JOURNAL, FAULTS_JSON, *REPLICA_FILES)
"""What a run folder has beside the files of the record and the report."""

Progress = Callable[[int, int | None], None]


@frozen
class Replayed:
    """Where a run was written, what it came to, and whether it went to its end. `missed`: expectations of its scenario
    that it did not meet, and faults that never applied.
    """

    folder: Path
    report: Report
    complete: bool
    missed: tuple[str, ...] = ()


@frozen
class _Onlookers:
    """Who watches a run for its report, and changes nothing in it; None where there is nothing for them to see."""

    ideal: IdealCache | None
    hindsight: Hindsight | None


def replay(
    config: Config,
    *,
    config_file: Path | None = None,
    out: Path | None = None,
    name: str | None = None,
    html: bool = True,
    journal: bool = False,
    perfetto: bool = False,
    explain: bool = False,
    leap: bool = True,
    progress: Progress | None = None,
) -> Replayed:
    """Simulate `config.trace` on the configured cluster and write the run folder. `config_file` is where the
    configuration was read from, if it was.

    Ctrl-C keeps what there is and says so: the run is then not `complete`, requests that were open are listed as open,
    and pages that were not made are left out. A second one, while the record or the report is written, raises Stopped.
    Raises TraceError or TwinError (one line each) for bad input; a run that cannot go on keeps its record.
    """
    with _no_collection():
        return _replay(
            config,
            config_file=config_file,
            out=out,
            name=name,
            html=html,
            journal=journal,
            perfetto=perfetto,
            explain=explain,
            leap=leap,
            progress=progress,
        )


def _replay(
    config: Config,
    *,
    config_file: Path | None,
    out: Path | None,
    name: str | None,
    html: bool,
    journal: bool,
    perfetto: bool,
    explain: bool,
    leap: bool,
    progress: Progress | None,
) -> Replayed:
    started = os.times()
    began = time.monotonic()
    if config.trace.path is None:
        raise ConfigError("no trace given: pass a file, or set trace.path")
    if config.router.mode == "direct":
        raise ConfigError("router.mode = direct: no trace names a worker for each request; choose another mode")
    sla = parse_sla(config.sla) if config.sla is not None else None
    trace = open_trace(config.trace.path, read_options(config.trace))
    cluster = build_cluster(config, leap=leap)
    groups = cluster.groups
    _check_warmup(config.trace, trace)
    refuse_beyond(groups, trace)
    policy = build_policy(config, groups[0].settings.block_size, explain=explain)
    planned = _planned(config, cluster)
    drill = _drill(config)
    if drill is not None:
        drill.check_rows(_asked_requests(config.trace, trace))
    folder = out if out is not None else Path("runs") / (name or run_name(config))
    _keep_inputs(folder, config, config_file)
    writer = RunWriter(folder, others=OTHER_FILES)
    try:
        with _journal_sink(writer, config, trace, policy, wanted=journal) as sink:
            with _undone_if_refused(writer):
                hindsight = _hindsight(policy, config, trace) if explain else None
                decides = hindsight or policy
                if planned is not None:
                    decides = planned.before(decides)
                controller = _controller(config, decides, sink, planned, drill)
                world = _world(config, trace, cluster, controller, writer, progress, planned, drill)
                if hindsight is not None:
                    hindsight.world = world
                onlookers = _Onlookers(ideal=_ideal(trace, world), hindsight=hindsight)
            complete = _simulate(world, config, writer, sink, planned)
        report = None
        try:
            with held_back():
                idle = drill.without_effect() if drill is not None else []
                alarms = drill.warnings() if drill is not None else []
                if world.handoffs is not None:
                    from twin.legs import lease_warnings

                    alarms += lease_warnings(config, groups, world.handoffs)
                report = _report(config, folder, trace, groups, policy, sla, world, idle, onlookers, alarms, planned)
            _pages(folder, report, html=html, perfetto=perfetto, complete=complete)
        except KeyboardInterrupt:
            complete = False
            if report is None:
                raise
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {folder} has what was written until then and no report, marked partial") from None
    ended = os.times()
    cpu_s = ended.user + ended.system - started.user - started.system
    versions = {"dynatwin": __version__, "xxhash": xxhash.VERSION}
    finish_run(
        folder,
        complete=complete,
        cpu_s=cpu_s,
        wall_s=time.monotonic() - began,
        asked_requests=_asked_requests(config.trace, trace),
        versions=versions,
    )
    missed = drill.finish(world, folder, report, partial=not complete) if drill is not None else ()
    return Replayed(folder=folder, report=report, complete=complete, missed=missed)


def _controller(
    config: Config, router: Policy, sink: Journal | None, planned: Planned | None, drill: Drill | None
) -> Controller:
    """The router, with whatever stands beside it in this run."""
    beside: list[Policy] = [] if planned is None else [planned.planner]
    if drill is not None:
        return drill.controller([router, *drill.policies, *beside], sink)
    if planned is not None and config.resilience.migration_limit:
        from twin.deciding import migration

        beside.insert(0, migration(config))
    return Controller([router, *beside], sink)


def _simulate(
    world: MockWorld, config: Config, writer: RunWriter, journal: Journal | None, planned: Planned | None
) -> bool:
    """Run the world, and keep its record however it ends; whether it went to its end, False after Ctrl-C.

    Only a trace that turns out to be bad does not take the place of a complete run.
    """
    complete = kept = False
    try:
        try:
            world.run()
            world.audit()
            complete = True
        except TraceError:
            if writer.can_discard:
                writer.discard()
                kept = True
            raise
        finally:
            with held_back():
                if not complete:
                    world.abandon()
                if not kept:
                    writer.close()
                    if planned is not None:
                        planned.write(writer.folder)
                    (writer.folder / CONFIG_TOML).write_text(to_toml(config), encoding="utf-8")
                    if journal is not None:
                        journal.flush()
                    kept = True
    except KeyboardInterrupt:
        if not kept:
            raise
        return False
    return complete


@contextmanager
def _undone_if_refused(writer: RunWriter) -> Iterator[None]:
    """What a cluster or a scenario turns out to lack when the world is built leaves no folder and costs no run."""
    try:
        yield
    except BaseException:
        writer.undo()
        raise


def _asked_requests(cut: TraceConfig, trace: Trace) -> int | None:
    """How many requests the run was to have; None where only reading the trace to its end would tell."""
    rows = trace.info.rows
    if rows is None or cut.start_s is not None or cut.end_s is not None:
        return None
    rows -= sum(trace.skipped.values())
    return min(rows, cut.limit or rows)


def _check_warmup(cut: TraceConfig, trace: Trace) -> None:
    """Something must be left to measure, as far as that is known before the trace is read."""
    rows = _asked_requests(cut, trace)
    if cut.warmup is not None and rows is not None and cut.warmup >= rows:
        raise ConfigError(
            f"trace.warmup = {cut.warmup}: the run has {rows} requests, so none would be measured; make it less, or "
            "leave it out"
        )


def _keep_inputs(folder: Path, config: Config, config_file: Path | None) -> None:
    """Refuse to replace what the run itself reads. A configuration that would be written as it stands may stay."""
    inputs = {"the trace": config.trace.path, "the scenario": config.faults.path, "the configuration": config_file}
    for what, path in inputs.items():
        if path is None or not _is_replaced(path, folder):
            continue
        if path is config_file and path.read_text(encoding="utf-8") == to_toml(config):
            continue
        raise ConfigError(
            f"{path}: is {what} of this run and would be replaced by it; choose another folder with --out"
        )


def _is_replaced(path: Path, folder: Path) -> bool:
    """Whether a run into `folder` writes this file, directly or through a link."""
    places = (path.parent.resolve() / path.name, path.resolve())
    return any(place.parent == folder.resolve() and place.name in {*OWN_FILES, *OTHER_FILES} for place in places)


def _pages(folder: Path, report: Report, *, html: bool, perfetto: bool, complete: bool) -> None:
    if perfetto:
        from reports.perfetto import write_perfetto

        names = {worker.worker_id: worker.name for worker in report.meta.workers}
        write_perfetto(folder, names, report.meta.starts)
    if html:
        from reports.html import write_html

        write_html(folder, report, complete=complete)


def read_options(trace: TraceConfig) -> ReadOptions:
    """How the configuration wants its trace read."""
    return ReadOptions(
        format=trace.format,
        on_bad_row=trace.on_bad_row,
        time_unit=trace.time_unit,
        hash_block_tokens=trace.hash_block_tokens,
        default_osl=trace.default_osl,
        sort=trace.sort,
        keep_zero_output=trace.keep_zero_output,
    )


def _sync(config: Config) -> SyncPlan | None:
    """How the routers of the run tell each other of their bookings."""
    table = config.replicas
    if not table.syncs:
        return None
    from twin.mocker.routersync import SyncPlan

    assert table.sync_delay_s is not None
    return SyncPlan(
        routers=table.count,
        delay_s=table.sync_delay_s,
        jitter_s=table.sync_jitter_s,
        loss=table.sync_loss,
        seed=config.seed,
    )


def run_name(config: Config) -> str:
    """`<trace stem>-<8 hex>`: the same configuration, trace content and seed give the same name."""
    assert config.trace.path is not None
    digest = xxhash.xxh3_64(repr(to_plain(config)).encode())
    with config.trace.path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if config.faults.path is not None:
        digest.update(config.faults.path.read_bytes())
    return f"{config.trace.path.name.split('.')[0]}-{digest.hexdigest()[:8]}"


def demand_of(config: Config, trace: Trace, arrives_s: Callable[[float], float] | None = None) -> Demand:
    """The trace as it is to arrive: cut, re-timed, streamed."""
    cut = config.trace
    batches = transform(
        trace,
        limit=cut.limit,
        start_s=cut.start_s,
        end_s=cut.end_s,
        speedup=cut.speedup,
        rate_rps=cut.rate_rps,
        poisson=cut.arrivals == "poisson",
        seed=config.seed,
    )
    return Demand(batches, arrives_s)


def _world(
    config: Config,
    trace: Trace,
    cluster: Cluster,
    controller: Controller,
    writer: RunWriter,
    progress: Progress | None,
    planned: Planned | None,
    drill: Drill | None,
) -> MockWorld:
    total = config.trace.limit or trace.info.rows
    network = cluster.network()
    world = MockWorld(
        controller=controller,
        workers=cluster.workers,
        demand=demand_of(config, trace, drill.arrives_s if drill is not None else None),
        sinks=writer,  # type: ignore[arg-type]  # its rows are typed more closely than a sink's
        router=config.router.mode,
        key_tokens=trace.info.hash_block_tokens,
        concurrency=config.trace.concurrency,
        observe=observation(config),
        loses_events=(drill is not None and drill.loses_events) or config.replicas.kv_event_lag_s > 0.0,
        sync=_sync(config),
        handoff=cluster.handoff(network),
        network=network,
        seed=config.seed,
        progress=None if progress is None else lambda ended: progress(ended, total),
    )
    if planned is not None:
        planned.start(world, network)
    if drill is not None:
        drill.start(world)
    return world


def _hindsight(policy: Policy, config: Config, trace: Trace) -> Hindsight:
    from twin.hindsight import Hindsight

    return Hindsight(policy, _asked_requests(config.trace, trace))


def _ideal(trace: Trace, world: MockWorld) -> IdealCache | None:
    """Count what an endless cache would hold of each prompt that arrives, where the trace says what is in them."""
    key_tokens = trace.info.hash_block_tokens
    if key_tokens is None:
        return None
    from twin.ideal import IdealCache

    ideal = IdealCache(key_tokens, world.tree.block_size)

    def arrived(_: int, request_id: RequestId) -> None:
        row = world.open[request_id].row
        ideal.add(row.keys, row.isl)

    world.churn.on_arrival.append(arrived)
    return ideal


def _planned(config: Config, cluster: Cluster) -> Planned | None:
    if not config.planner.is_on:
        return None
    from twin.planned import Planned

    return Planned(config, cluster)


def _drill(config: Config) -> Drill | None:
    if config.faults.path is None:
        return None
    from twin.drill import Drill

    return Drill(config)


def _report(
    config: Config,
    folder: Path,
    trace: Trace,
    groups: tuple[Group, ...],
    policy: Policy,
    sla: Sla | None,
    world: MockWorld,
    idle_faults: Sequence[str],
    onlookers: _Onlookers,
    alarms: Sequence[str],
    planned: Planned | None,
) -> Report:
    ideal, hindsight = onlookers.ideal, onlookers.hindsight
    no_effect, warnings = [*idle_faults], [*alarms]
    if config.trace.warmup is not None:
        warnings.append(
            f"latencies, rates and the verdict leave out the first {config.trace.warmup:,} requests (trace.warmup); "
            "rates count from the first arrival behind them; counts, workers, groups and charts are of the whole run"
        )
    if config.trace.hash_block_tokens is not None and not world.keyed:
        no_effect.append("trace.hash_block_tokens has no effect: the trace has no hash ids")
    if world.prioritised and not config.router.queue.is_on:
        no_effect.append(
            "priorities of the trace have no effect: the queue of the router alone reads them, and it is off "
            "([router.queue])"
        )
    if not world.adapted and any(group.config.loras for group in groups):
        warnings.append("workers.loras: no row of the trace asks for an adapter; they only take memory")
    if config.router.affinity.mode != "off" and not world.in_sessions:
        no_effect.append("router.affinity has no effect: no row of the trace belongs to a session")
    if config.router.mode == "thunder" and not world.in_sessions:
        warnings.append("mode thunder: no row of the trace belongs to a session, so it only balances the pools")
    if world.block_tiers is not None:
        no_effect += world.block_tiers.without_effect()
    if world.cut_short:
        warnings.append(
            f"answers cut short where the context was full (engine.max_model_len): {world.cut_short:,}; "
            "they made fewer tokens than their trace rows say"
        )
    warnings += warnings_beyond(groups, folder)
    if ideal is not None and ideal.full:
        warnings.append("the upper bound of the hit rate is not told: more distinct hash ids than are kept")
    meta = describe_run(config, groups, trace, policy, hash_known=world.keyed, no_effect=tuple(no_effect))
    gone_s = world.gone_s
    workers = tuple(replace(worker, held_until_s=gone_s.get(WorkerId(worker.worker_id))) for worker in meta.workers)
    meta = replace(
        meta,
        workers=workers,
        tiers=world.tiers,
        kvbm=world.block_tiers.figures() if world.block_tiers is not None else {},
        moved_bytes=world.network.carried_bytes if world.network is not None else {},
        starts=starts_meta(world.starts.log, groups, world.specs),
        ideal=ideal.blocks if ideal is not None and world.keyed else {},
        explained=hindsight is not None,
        oracle=hindsight.meta if hindsight is not None else None,
        warnings=(*meta.warnings, *warnings),
    )
    if planned is None:
        return build_report(folder, meta, sla)
    return build_report(folder, planned.described(meta), sla, planned.meta())


def _demand_facts(trace: Trace) -> dict[str, JsonValue]:
    """What the journal as a trace must not lose: whether its demand was made up, and where it came from."""
    info = trace.info
    named = (("source", info.source), ("licence", info.licence), ("generator", info.generator), ("seed", info.seed))
    return {"synthetic": info.synthetic, **{name: value for name, value in named if value is not None}}


@contextmanager
def _journal_sink(
    writer: RunWriter, config: Config, trace: Trace, policy: Policy, *, wanted: bool
) -> Iterator[Journal | None]:
    """The journal file of the run, open while it runs."""
    if not wanted:
        yield None
        return
    from policies.cluster.journal import Header, Journal

    header = Header(
        versions={"dynatwin": __version__},
        config={**to_plain(config), "demand": _demand_facts(trace)},
        seed=config.seed,
        policies=(config.router.mode, *([f"planner {config.planner.name}"] if config.planner.is_on else [])),
    )
    with writer.place(JOURNAL).open("w", encoding="utf-8") as file:
        yield Journal(file.write, header)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic collector: a run makes many objects and no cycles (measured: 15 % of its CPU time).

    It comes back when the record is on disk: the first collection looks at everything that is alive.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
