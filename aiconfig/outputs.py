"""The folder of a search: result.json, tables, page, and the files that put the best deployment to work.

A folder that holds anything but an earlier search is never touched; of an earlier search, what it wrote goes first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from aiconfig.deployment import BEST_TOML, ROWS, to_config, write_deployment
from aiconfig.driver import Driven
from aiconfig.emit.files import emit_all, write
from aiconfig.emit.plan import Plan
from aiconfig.evaluate import setting_of
from aiconfig.names import nearest_of
from aiconfig.outcome import Scored
from aiconfig.page import PAGE, write_page
from aiconfig.plain import to_plain
from aiconfig.request import SearchRequest
from aiconfig.result import RESULT_JSON, SCHEMA, Result, read_result
from aiconfig.table import write_csv, write_parquet
from aiconfig.workload import Workload
from policies.errors import ConfigError
from reports.files import held_back, whole_file

CANDIDATES: Final = "candidates.parquet"
PARETO: Final = "pareto.csv"


def search_name(request: SearchRequest, how: str) -> str:
    """`<model>-<8 hex>`: the same search has the same name; `how` is what else the answer depends on."""
    digest = xxhash.xxh3_64(repr(to_plain(replace(request, origins={}))).encode())
    digest.update(how.encode())
    for path in (request.workload.trace, *request.physics.files):
        if path is not None:
            digest.update(path.read_bytes())
    stem = Path(request.model).parent.name if request.model.endswith(".json") else Path(request.model).name
    return f"{stem or 'model'}-{digest.hexdigest()[:8]}"


def check_folder(folder: Path) -> None:
    """Refuse a folder with something else in it, and one that cannot be written. Raises ConfigError."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _holds_a_search(folder):
        raise ConfigError(f"--out {folder}: is not empty and no search; choose another folder")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"--out {folder}: {above} is a file, and nothing can be below it; choose another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: nothing can be written into {above}; choose another folder")


def _holds_a_search(folder: Path) -> bool:
    """Whether its result.json is one of ours, of whatever version."""
    try:
        plain = json.loads((folder / RESULT_JSON).read_bytes())
    except (OSError, ValueError):
        return False
    schema = plain.get("schema") if isinstance(plain, dict) else None
    return isinstance(schema, str) and schema.partition("/")[0] == SCHEMA.partition("/")[0]


def write_search(folder: Path, driven: Driven, *, html: bool = True) -> Result:
    """Write everything; the result with the list of its files. Ctrl-C waits until it is whole."""
    check_folder(folder)
    with held_back():
        _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        result, rows = driven.result, driven.rows
        files = [CANDIDATES, PARETO]
        write_parquet(rows, folder / CANDIDATES)
        fronted = {name: at for at, name in enumerate(result.front)}
        write_csv(sorted((row for row in rows if row.name in fronted), key=lambda row: fronted[row.name]),
                  folder / PARETO)  # fmt: skip
        notes: tuple[str, ...] = ()
        if result.best is not None:
            made, notes = write_deployed(folder, result, result.best)
            files += made
        if html:
            files.append(PAGE)
        result = replace(result, files=tuple(sorted(files)), notes=(*result.notes, *notes))
        if html:
            write_page(folder, result, rows)
        with whole_file(folder / RESULT_JSON) as out:
            out.write(result.to_json())
    return result


def write_deployed(folder: Path, result: Result, one: Scored) -> tuple[list[str], tuple[str, ...]]:
    """best.toml with its rows, launch commands, manifests, bench.sh and verify.py: their paths, and a line for each
    kind that cannot be written."""
    emitted = emit_all(plan_of(result, one))
    write(emitted.files, folder)
    return [*write_twin(folder, result, one), *emitted.files], emitted.left_out


def write_twin(folder: Path, result: Result, one: Scored) -> list[str]:
    """best.toml, and beside it the rows that it plays; their names."""
    request = result.request
    write_deployment(folder, one.candidate, _played(one, request), one.load, setting_of(request))
    return [BEST_TOML, *([ROWS] if request.workload.trace is None else [])]


def chosen_of(result: Result, name: str | None) -> Scored:
    """The candidate of that name or place; without one the best. Raises ConfigError if there is none."""
    if name is None:
        if result.best is None:
            raise ConfigError(
                "the search found nothing that keeps the limits; name one of its candidates (--candidate)"
            )
        return result.best
    one = result.named(name)
    if one is None:
        names = [found.candidate.name for found in result.found]
        raise ConfigError(f"--candidate {name}: the answer has {len(names)}, by name or place{nearest_of(name, names)}")
    return one


def _played(one: Scored, request: SearchRequest) -> Workload:
    """The workload with as many requests as the run had that the figures are of."""
    requests = one.estimate.requests
    return request.workload if requests is None else replace(request.workload, requests=requests)


def plan_of(result: Result, one: Scored) -> Plan:
    """What files of a candidate are made from."""
    request, workload = result.request, _played(one, result.request)
    return Plan(
        candidate=one.candidate,
        workload=workload,
        load=one.load,
        estimate=one.estimate,
        config=to_config(one.candidate, workload, one.load, workload.trace or Path(ROWS), setting_of(request)),
        sla=request.sla.text if request.sla is not None and request.load is None else None,
        hardware=request.hardware,
    )


def _clear(folder: Path) -> None:
    """Remove what an earlier search wrote here, and nothing else."""
    if not (folder / RESULT_JSON).exists():
        return
    try:
        files: Sequence[str] = read_result(folder / RESULT_JSON).files
    except ConfigError:
        files = ()
    for name in files:
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.unlink(missing_ok=True)
    for inner in ("launch", "k8s"):
        if (folder / inner).is_dir() and not any((folder / inner).iterdir()):
            (folder / inner).rmdir()
