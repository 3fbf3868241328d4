"""`aiconfig import`: a candidate from launch commands, from scripts of ours, or from manifests of ours.

What a command does not say (GPU, replicas, weights) comes from the file if it is ours, else from options, else it is
asked for. Whatever was not understood is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aiconfig.candidate import Candidate, Pool
from aiconfig.emit.commands import Command, Parsed, command_of, commands_in, flatten, parse
from aiconfig.emit.flags import Flags, Plain, find_flags
from aiconfig.emit.found import Found, Shape
from aiconfig.emit.kube_parts import NOTE
from aiconfig.emit.plan import checkpoints
from aiconfig.emit.served import host_bytes
from aiconfig.emit.worker import SHAPES
from aiconfig.emit.yamltext import load
from aiconfig.serving import Serving
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.hardware import find_gpu


@frozen
class Stated:
    """What whoever imports says of what commands leave open; None: not said."""

    model: str | None = None
    gpu: str | None = None
    weights: str | None = None
    replicas: int | None = None
    role: str | None = None
    version: str | None = None
    hardware: Path | None = None  # a file of GPUs of the user's own


@frozen
class Imported:
    """The candidate; what was assumed (`notices`), what has no effect on it (`aside`), and what is not known."""

    candidate: Candidate
    notices: tuple[str, ...]
    aside: tuple[str, ...]
    unknown: tuple[str, ...]


@frozen
class _Worker:
    pool: Pool
    shape: Shape
    engine: str
    model: str
    notices: tuple[str, ...]
    parsed: Parsed


def import_files(paths: Sequence[Path], stated: Stated = Stated()) -> Imported:  # noqa: B008  # a frozen value
    """The candidate that these files describe: one for each role, or one file with all of them. A folder stands for
    its scripts."""
    commands = [command for path in _files(paths) for command in _commands_of(path)]
    if not commands:
        names = ", ".join(str(path) for path in paths)
        raise ConfigError(f"{names}: no command of vllm serve, sglang.launch_server or trtllm-serve in it")
    return import_commands(commands, stated)


def import_line(text: str, stated: Stated = Stated(), where: str = "command") -> Imported:  # noqa: B008
    """The candidate that a command line describes."""
    commands = commands_in(text, where)
    if not commands:
        raise ConfigError(f"{where}: no vllm serve, sglang.launch_server or trtllm-serve in it")
    return import_commands(commands, stated)


def import_commands(commands: Sequence[Command], stated: Stated) -> Imported:
    """The candidate of these workers, each a pool."""
    workers = [_worker(command, stated) for command in commands]
    engines = sorted({worker.engine for worker in workers})
    models = sorted({worker.model for worker in workers})
    drafts = sorted({worker.shape.nextn for worker in workers})
    for what, seen in (("engine", engines), ("model", models), ("number of draft tokens", drafts)):
        if len(seen) > 1:
            raise ConfigError(f"{commands[0].where}: workers differ in {what}: {', '.join(map(str, seen))}")
    order = {"mixed": 0, "prefill": 1, "decode": 2}
    pools = tuple(sorted((worker.pool for worker in workers), key=lambda pool: order[pool.role]))
    roles = tuple(pool.role for pool in pools)
    if roles not in (("mixed",), ("prefill", "decode")):
        raise ConfigError(
            f"{commands[0].where}: workers of roles {', '.join(roles)}; a deployment has one of mixed, or one of "
            f"prefill and one of decode: give both files"
        )
    return Imported(
        candidate=Candidate(
            model=models[0],
            engine=engines[0],
            pools=pools,
            nextn=drafts[0],
            serving=Serving(host_kv_bytes=max(host_bytes(worker.parsed.values, worker.pool) for worker in workers)),
        ),
        notices=tuple(dict.fromkeys(notice for worker in workers for notice in worker.notices)),
        aside=tuple(dict.fromkeys(name for worker in workers for name in worker.parsed.aside)),
        unknown=tuple(dict.fromkeys(name for worker in workers for name in worker.parsed.unknown)),
    )


def _worker(command: Command, stated: Stated) -> _Worker:
    facts = {**command.facts, **{k: v for k in ("role", "weights") if (v := getattr(stated, k)) is not None}}
    flags = find_flags(command.engine, stated.version or facts.get("version"))
    parsed = _with_options(command, parse(command, flags), flags)
    found = Found(flags=flags, values=parsed.values, facts=facts, where=command.where)
    shape = SHAPES[command.engine](found)
    notices = [*([flags.notice] if flags.notice else []), *shape.notices]
    model, native = _model(shape, facts, stated)
    weights = facts.get("weights") or shape.weights or native
    if weights is None:
        weights = "bf16"
        notices.append("the format of the weights is not in the command: taken as bf16 (--weights)")
    gpu = stated.gpu or facts.get("gpu")
    if gpu is None:
        raise ConfigError(f"{command.where}: a command does not say its GPUs; give --gpu")
    find_gpu(gpu, stated.hardware)
    role = facts.get("role") or shape.role or "mixed"
    if role not in ("mixed", "prefill", "decode"):
        raise ConfigError(f"{command.where}: role {role!r}; it is mixed, prefill or decode")
    if shape.role is not None and shape.role != role:
        raise ConfigError(f"{command.where}: its flags are those of a {shape.role} worker, not of a {role} one")
    replicas = _replicas(stated, facts, command.where, notices)
    pool = shape.pool(role, gpu, replicas, weights)
    return _Worker(pool=pool, shape=shape, engine=command.engine, model=model, notices=tuple(notices), parsed=parsed)


def _model(shape: Shape, facts: Mapping[str, str], stated: Stated) -> tuple[str, str | None]:
    """Our key of the model that is loaded, and the format of its public checkpoint where we know it."""
    for key, known in checkpoints().items():
        if known.repository.lower() == shape.model.lower() or key == shape.model.lower():
            return stated.model or facts.get("model") or key, known.weights
    return stated.model or facts.get("model") or shape.model, None


def _replicas(stated: Stated, facts: Mapping[str, str], where: str, notices: list[str]) -> int:
    if stated.replicas is not None:
        return stated.replicas
    told = facts.get("replicas")
    if told is None:
        notices.append("how many workers there are is not in the command: taken as 1 (--replicas)")
        return 1
    if not told.isdecimal() or int(told) < 1:
        raise ConfigError(f"{where}: replicas={told}: at least 1")
    return int(told)


def _with_options(command: Command, parsed: Parsed, flags: Flags) -> Parsed:
    """The command's flags with its file of options, which wins as it does in the engine."""
    extra = parsed.values.get("extra")
    values: dict[str, Plain] = {key: value for key, value in parsed.values.items() if key != "extra"}
    inline = command.facts.get("options")
    if inline is None and command.engine == "trtllm" and isinstance(extra, str):
        path = Path(extra)
        try:
            inline = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{command.where}: the file of options {extra}: {error.strerror}") from None
    if inline is None:
        return Parsed(values=values, aside=parsed.aside, unknown=parsed.unknown)
    documents = load(inline, str(extra or command.where))
    tree = documents[0] if documents else {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{extra}: options are keys with values")
    options = flatten(tree, flags, str(extra or command.where))
    return Parsed(values={**values, **options.values}, aside=parsed.aside, unknown=(*parsed.unknown, *options.unknown))


# ---------------------------------------------------------------- files


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            inner = path / "launch" if (path / "launch").is_dir() else path
            scripts = sorted(one for one in inner.glob("*.sh") if one.name != "router.sh")
            if not scripts:
                raise ConfigError(f"{path}: no scripts (*.sh) in it")
            yield from scripts
        else:
            yield path


def _commands_of(path: Path) -> list[Command]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text (UTF-8)") from None
    if path.suffix in (".yaml", ".yml"):
        return list(_in_manifests(text, str(path)))
    return [_beside(command, path) for command in commands_in(text, str(path))]


def _beside(command: Command, path: Path) -> Command:
    """A script of ours names its file of options by a shell expression: it lies beside the script."""
    options = path.with_suffix(".yml")
    if command.engine != "trtllm" or "role" not in command.facts or not options.is_file():
        return command
    return _told(command, {"options": options.read_text(encoding="utf-8")})


def _told(command: Command, facts: Mapping[str, str]) -> Command:
    return Command(engine=command.engine, words=command.words, facts={**command.facts, **facts}, where=command.where)


def _in_manifests(text: str, where: str) -> Iterator[Command]:
    """The workers of Deployments, LeaderWorkerSets and DynamoGraphDeployments of ours, by their annotations."""
    documents = [one for one in load(text, where) if isinstance(one, dict)]
    options: dict[str, str] = {}
    for one in documents:
        if one.get("kind") == "ConfigMap" and isinstance(one.get("data"), dict):
            options |= {str(key): str(value) for key, value in one["data"].items()}  # type: ignore[union-attr]
    for one in documents:
        for notes, words in _containers(one):
            facts = {key.removeprefix(NOTE): str(value) for key, value in notes.items() if key.startswith(NOTE)}
            if not facts:
                continue
            inline = options.get(f"{facts.get('role')}.yml")
            command = command_of(_plain(words), facts, where)
            if command is not None:
                yield _told(command, {"options": inline} if inline is not None else {})


def _plain(words: list[str]) -> list[str]:
    """A Dynamo worker's command as its engine's own: the model without its flag where it stands first."""
    if words[:2] != ["python3", "-m"] or not words[2].startswith("dynamo."):
        return words
    flags = find_flags("dynamo")
    engine, args = words[2].removeprefix("dynamo."), words[3:]
    roles = {name for version in (None, "0.9.0") for name in _role_names(version)}
    kept, skip = [], 0
    for n, word in enumerate(args):
        if skip:
            skip -= 1
        elif word == flags["role"].name and engine != "sglang":
            skip = 1
        elif word in roles:
            continue
        elif word == "--model-path" and engine == "trtllm":
            kept.append(args[n + 1])
            skip = 1
        elif word == flags["extra"].name:
            skip = 1
        else:
            kept.append(word)
    return [*find_flags(engine).program, *kept]


def _role_names(version: str | None) -> Iterator[str]:
    flags = find_flags("dynamo", version)
    yield from (flags[key].name for key in ("vllm_prefill", "vllm_decode") if key in flags)


def _containers(tree: Mapping[str, object]) -> Iterator[tuple[Mapping[str, object], list[str]]]:
    """Annotations with the words of the first container below them."""
    spec = tree.get("spec")
    if not isinstance(spec, dict):
        return
    if tree.get("kind") == "DynamoGraphDeployment":
        for service in spec.get("services", {}).values():
            main = service.get("extraPodSpec", {}).get("mainContainer", {})
            yield service.get("annotations", {}), [*main.get("command", []), *main.get("args", [])]
        return
    group = spec.get("leaderWorkerTemplate", {}).get("leaderTemplate")
    pod = (group or spec.get("template", {})).get("spec", {})
    for container in pod.get("containers", [])[:1]:
        metadata = tree.get("metadata")
        notes = metadata.get("annotations", {}) if isinstance(metadata, dict) else {}
        yield notes, [*container.get("command", []), *container.get("args", [])]
