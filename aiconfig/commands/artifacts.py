"""`aiconfig emit` and `aiconfig import`: files that put a candidate to work, and a candidate from such files."""

from __future__ import annotations

import json as json_
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twin.commands.options import Json, Quiet
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from aiconfig.emit.plan import Plan
    from aiconfig.emit.reading import Imported
    from aiconfig.outcome import Scored
    from aiconfig.result import Result


def emit(
    search: Annotated[Path, typer.Argument(metavar="RESULT", help="result.json of a search, or its folder.")],
    kind: Annotated[
        str,
        typer.Option("--as", help="vllm, sglang, trtllm, twin, k8s, dynamo, llm-d, bench or verify.", metavar="KIND"),
    ],
    candidate: Annotated[
        str | None, typer.Option("--candidate", help="Name or place; otherwise the best.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write to; otherwise print.", metavar="DIR")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="Flags of this release.", metavar="VERSION")
    ] = None,
    dynamo_version: Annotated[
        str | None, typer.Option("--dynamo-version", help="Manifests of this release.", metavar="VERSION")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="What engines load instead of the public one.", metavar="NAME")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image.", metavar="NAME")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of what is deployed.", metavar="NAME")] = None,
    host_gpus: Annotated[int | None, typer.Option("--host-gpus", help="GPUs of one host.", metavar="N")] = None,
    quiet: Quiet = False,
) -> int:
    """Write the files of one kind for the best deployment of a search, or for another one of it."""
    from aiconfig.emit.files import check_effect
    from aiconfig.lookup import find_search
    from aiconfig.outputs import chosen_of, plan_of

    given: dict[str, object] = {
        "engine_version": engine_version,
        "dynamo_version": dynamo_version,
        "checkpoint": checkpoint,
        "image": image,
        "name": name,
        "host_gpus": host_gpus,
    }
    check_effect(kind, given)
    _, result = find_search(search)
    one = chosen_of(result, candidate)
    if kind == "twin" and out is not None:
        _write_twin(out, result, one)
        return Exit.OK
    files = _files(plan_of(result, one), kind, given, quiet=quiet)
    if out is None:
        _print(files)
    else:
        _write(out, files)
    return Exit.OK


def _files(plan: Plan, kind: str, given: Mapping[str, Any], *, quiet: bool) -> Mapping[str, str]:
    """The files by path; what whoever starts them should know goes to stderr."""
    from dataclasses import replace

    from aiconfig.emit.files import emit as emitted

    plan = replace(plan, **given)
    files = emitted(plan, kind)
    if not quiet:
        for notice in plan.notices():
            print(f"note: {notice}", file=sys.stderr)
    return files


def _print(files: Mapping[str, str]) -> None:
    for path, text in files.items():
        if len(files) > 1:
            print(f"# --- {path}")
        print(text, end="" if text.endswith("\n") else "\n")


def _write(out: Path, files: Mapping[str, str]) -> None:
    from aiconfig.emit.files import write

    _check_folder(out)
    for name, text in files.items():
        path = out / name
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise _in_the_way(path)
    write(files, out)


def _write_twin(out: Path, result: Result, one: Scored) -> None:
    from aiconfig.deployment import BEST_TOML, ROWS
    from aiconfig.outputs import write_twin

    _check_folder(out)
    for path in (out / BEST_TOML, out / ROWS):
        if path.exists():
            raise _in_the_way(path)
    write_twin(out, result, one)


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; name a folder")


def _in_the_way(path: Path) -> ConfigError:
    return ConfigError(f"{path}: is there already and would be replaced; choose another folder with --out")


def import_(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Scripts or manifests, one for each role, or a folder.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", help="A command line instead of a file.", metavar="TEXT")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Our name of the model.", metavar="NAME")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU of the workers.", metavar="NAME")] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="Format of the weights.", metavar="NAME")] = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="TOML file with GPUs of your own.", metavar="FILE")
    ] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", help="Workers.", metavar="N")] = None,
    role: Annotated[str | None, typer.Option("--role", help="mixed, prefill or decode.", metavar="NAME")] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="Release whose flags they are.", metavar="VERSION")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Read a deployment from launch commands or manifests; print the name that estimate takes."""
    from aiconfig.emit.reading import Stated, import_files, import_line
    from aiconfig.plain import to_plain

    stated = Stated(
        model=model,
        gpu=gpu,
        weights=weights,
        replicas=replicas,
        role=role,
        version=engine_version,
        hardware=hardware,
    )
    if (command is None) == (not files):
        raise ConfigError("import reads files, or --command TEXT: give one of them")
    found = import_files(files or [], stated) if command is None else import_line(command, stated)
    if not quiet:
        _say_assumed(found)
    if json:
        print(json_.dumps(to_plain(found), indent=1, sort_keys=True, ensure_ascii=False))
        return Exit.OK
    print(found.candidate.name)
    line = ["aiconfig", "estimate", found.candidate.name, "--model", found.candidate.model]
    print(f"price it  {shlex.join(line)} --users 32")
    return Exit.OK


def _say_assumed(found: Imported) -> None:
    """What was assumed, and what was not understood, on stderr."""
    for notice in found.notices:
        print(f"note: {notice}", file=sys.stderr)
    for what, names in (("without effect on it", found.aside), ("not known", found.unknown)):
        if names:
            print(f"note: {what}: {', '.join(names)}", file=sys.stderr)
