"""`aiconfig emit` and `aiconfig import`: files that put a candidate to work, and a candidate from such files."""

from __future__ import annotations

import json as json_
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from twin.commands.options import Json, Quiet
from twin.errors import ConfigError, Exit


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
    from dataclasses import replace

    from aiconfig.emit.files import emit as emitted
    from aiconfig.emit.files import write
    from aiconfig.lookup import find_search
    from aiconfig.outputs import chosen_of, plan_of, write_twin

    _, result = find_search(search)
    one = chosen_of(result, candidate)
    if kind == "twin" and out is not None:
        _keep(out, ["best.toml", "workload.parquet"])
        write_twin(out, result, one)
        return Exit.OK
    plan = replace(
        plan_of(result, one),
        engine_version=engine_version,
        dynamo_version=dynamo_version,
        checkpoint=checkpoint,
        image=image,
        name=name,
        host_gpus=host_gpus,
    )
    files = emitted(plan, kind)
    if not quiet:
        for notice in plan.notices():
            print(f"note: {notice}", file=sys.stderr)
    if out is not None:
        _keep(out, list(files))
        write(files, out)
        return Exit.OK
    for path, text in files.items():
        if len(files) > 1:
            print(f"# --- {path}")
        print(text, end="" if text.endswith("\n") else "\n")
    return Exit.OK


def _keep(out: Path, names: list[str]) -> None:
    there = [name for name in names if (out / name).exists()]
    if there:
        raise ConfigError(f"{out / there[0]}: is there already and would be replaced; choose another folder with --out")


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
        for notice in found.notices:
            print(f"note: {notice}", file=sys.stderr)
        for what, names in (("without effect on it", found.aside), ("not known", found.unknown)):
            if names:
                print(f"note: {what}: {', '.join(names)}", file=sys.stderr)
    if json:
        print(json_.dumps(to_plain(found), indent=1, sort_keys=True, ensure_ascii=False))
        return Exit.OK
    print(found.candidate.name)
    line = ["aiconfig", "estimate", found.candidate.name, "--model", found.candidate.model]
    print(f"price it  {shlex.join(line)} --users 32")
    return Exit.OK
