"""Which runs a sweep is made of: grids and lists of values into points, each with its configuration, checked first.

Nothing runs here. A key or a value that can be no good is refused before the first run; a combination that cannot be
configured is a failed point, which loses no other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import xxhash

from policies.errors import ConfigError, TwinError
from policies.frozen import frozen
from traces.errors import TraceError
from twin.config import Config
from twin.config_file import is_path
from twin.config_read import FLAGS, TABLES, Varied, load
from twin.config_text import to_plain

MAX_RUNS = 20_000
"""A grid grows with the product of its values: more is a slip of the hand."""
MAX_SEEDS = 1000


class Vary(NamedTuple):
    """A key of the grid and its values, as text."""

    key: str
    values: tuple[str, ...]


class Listed(NamedTuple):
    """A list of points: the keys, and per point its place in the file and its values."""

    keys: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


NO_LIST = Listed((), (("", ()),))


@frozen
class Recipe:
    """All that makes the configuration of one run, as plain values that another process can be sent."""

    file: Path | None
    flags: Mapping[str, object]
    sets: tuple[str, ...]
    varied: tuple[Varied, ...]

    def config(self) -> Config:
        """The configuration of the run; raises as `load` does."""
        return load(self.file, self.flags, self.sets, self.varied)


@frozen
class PlannedRun:
    """One run of a point: `folder` is the name of its run folder, `error` why there can be no such run."""

    point: int
    seed: int
    recipe: Recipe
    folder: str
    error: str | None = None


@frozen
class Plan:
    """A sweep before it runs: keys, values of each point, runs in the order of points and seeds, and any run's
    configuration, for what all of them share."""

    keys: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    sample: Config


def parse_vary(given: str) -> Vary:
    """`router.mode=kv,random`: a key and its values; a value with a comma in it stands in double quotes."""
    key, equals, listed = given.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--vary {given}: write a key and its values like --vary router.mode=kv,random")
    values = [value.strip() for value in next(csv.reader([listed], skipinitialspace=True), [])]
    if not values or "" in values:
        raise ConfigError(f"--vary {given}: {key} has an empty value; write its values like {key}=A,B,C")
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"--vary {given}: the value {value} is given {values.count(value)} times; once is enough")
    return Vary(key, tuple(values))


def read_list(path: Path) -> Listed:
    """Points from a file: CSV with keys as its header, or TOML with a table [[points]] for each."""
    try:
        if path.suffix.lower() == ".toml":
            return _toml_list(path)
        if path.suffix.lower() == ".csv":
            return _csv_list(path)
    except OSError as why:
        raise ConfigError(f"{path}: cannot be read: {why.strerror}; --list wants a CSV or TOML file") from None
    except UnicodeDecodeError as why:
        raise ConfigError(f"{path}: not UTF-8 text at byte {why.start}; --list wants a CSV or TOML file") from None
    raise ConfigError(f"{path}: must end in .csv (keys as its header) or .toml (a table [[points]] for each point)")


def _csv_list(path: Path) -> Listed:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        keys = tuple(key.strip() for key in next(reader, []))
        if not keys or "" in keys or len(set(keys)) < len(keys):
            raise ConfigError(f"{path}:1: the first line must name the keys, each once, like router.mode,workers.count")
        rows = []
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(keys):
                raise ConfigError(f"{path}:{reader.line_num}: has {len(row)} values where the header has {len(keys)}")
            rows.append((f"{path}:{reader.line_num}", tuple(cell.strip() for cell in row)))
    return _checked(path, keys, rows)


def _toml_list(path: Path) -> Listed:
    import tomllib

    from reports.report import flat_config

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as why:
        raise ConfigError(f"{path}: not valid TOML: {why}") from None
    tables = document.get("points")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or len(document) > 1:
        raise ConfigError(f"{path}: begin each point with the line [[points]], and its keys below; nothing else")
    points = [dict(flat_config(table)) for table in tables]
    keys = tuple(points[0]) if points else ()
    for number, point in enumerate(points, 1):
        if set(point) != set(keys):
            odd = sorted(set(point) ^ set(keys))
            raise ConfigError(f"{path}: point {number} does not have the keys of the first one ({', '.join(odd)})")
    rows = [(f"{path} point {n}", tuple(point[key] for key in keys)) for n, point in enumerate(points, 1)]
    return _checked(path, keys, rows)


def _checked(path: Path, keys: tuple[str, ...], rows: list[tuple[str, tuple[str, ...]]]) -> Listed:
    if not rows:
        raise ConfigError(f"{path}: has no points")
    seen: dict[tuple[str, ...], str] = {}
    for place, values in rows:
        if values in seen:
            raise ConfigError(f"{place}: is the same point as {seen[values]}; once is enough")
        seen[values] = place
    return Listed(keys, tuple(rows))


def plan_sweep(
    *,
    file: Path | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    grid: Sequence[Vary],
    listed: Listed = NO_LIST,
    seeds: int = 1,
    explain: bool = False,
) -> Plan:
    """Every point of the list with every combination of the grid, each with `seeds` seeds from the configured one on.

    Raises ConfigError for a key or value that is wrong wherever it stands; `explain` is part of what names a run.
    """
    keys = (*listed.keys, *(vary.key for vary in grid))
    _check_keys(keys, flags, sets, seeds)
    count = len(listed.rows) * seeds
    for vary in grid:
        count *= len(vary.values)
    if count > MAX_RUNS:
        raise ConfigError(f"the sweep would be {count:,} runs, the limit is {MAX_RUNS:,}; give fewer values or seeds")
    base = {flag: value for flag, value in flags.items() if value is not None}
    files = _Files()
    points: list[tuple[str, ...]] = []
    runs: list[PlannedRun] = []
    samples: list[Config] = []
    for varied in _points(grid, listed):
        number = len(points)
        points.append(tuple(one.value for one in varied))
        recipe = Recipe(file=file, flags=base, sets=tuple(sets), varied=varied)
        for run, config in _runs_of(number, recipe, seeds, files, explain):
            runs.append(run)
            samples += [config] if config is not None else []
    _refuse_bad_values(keys, points, runs)
    _refuse_equal_points(keys, points, runs)
    assert samples, "a plan without any possible run has been refused"
    first = samples[0].seed if "seed" not in keys else 0
    return Plan(
        keys=keys,
        points=tuple(points),
        seeds=tuple(range(first, first + seeds)) if "seed" not in keys else (),
        runs=tuple(runs),
        sample=samples[0],
    )


def _check_keys(keys: Sequence[str], flags: Mapping[str, object], sets: Sequence[str], seeds: int) -> None:
    if not keys:
        raise ConfigError("nothing to vary: give --vary KEY=A,B,C, or --list FILE with a point in each row")
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is varied {keys.count(key)} times; give all of its values at once")
    given = {key: flag for flag, key in FLAGS.items() if flags.get(flag) is not None}
    given |= {text.partition("=")[0].strip(): f"--set {text}" for text in sets}
    for key in keys:
        flag = given.get(key) or given.get(_of_any_group(key))
        if flag is not None:
            raise ConfigError(f"{key} is varied, and {flag} is given as well; leave one of them out")
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds {seeds}: must be from 1 to {MAX_SEEDS}")
    if seeds > 1 and "seed" in keys:
        raise ConfigError("--seeds and a varied seed both say which seeds to run; leave one of them out")


def _of_any_group(key: str) -> str:
    """The key without the name of a group of workers: a flag means the only group."""
    head, _, rest = key.partition(".")
    name, _, inner = rest.partition(".")
    is_named = head == "workers" and inner and f"workers.{name}" not in TABLES
    return f"workers.{inner}" if is_named else key


def _points(grid: Sequence[Vary], listed: Listed) -> Iterator[tuple[Varied, ...]]:
    for place, row in listed.rows:
        for values in product(*(vary.values for vary in grid)):
            yield (
                *(Varied(key, value, place) for key, value in zip(listed.keys, row, strict=True)),
                *(Varied(vary.key, value, "--vary") for vary, value in zip(grid, values, strict=True)),
            )


def _runs_of(
    number: int, recipe: Recipe, seeds: int, files: _Files, explain: bool
) -> Iterator[tuple[PlannedRun, Config | None]]:
    """The runs of a point, each with its configuration (None where there can be none)."""
    try:
        first = recipe.config()
        files.check(first)
    except (TwinError, TraceError) as why:
        for at in range(seeds):
            yield PlannedRun(point=number, seed=at, recipe=recipe, folder="", error=str(why)), None
        return
    for at in range(seeds):
        seed = first.seed + at
        own, config = recipe, first
        if seeds > 1:
            own = Recipe(
                file=recipe.file,
                flags=recipe.flags,
                sets=recipe.sets,
                varied=(*recipe.varied, Varied("seed", str(seed), "--seeds")),
            )
            config = own.config()
        yield PlannedRun(point=number, seed=seed, recipe=own, folder=_name(own, config, files, explain)), config


def _refuse_bad_values(keys: Sequence[str], points: Sequence[tuple[str, ...]], runs: Sequence[PlannedRun]) -> None:
    """Raise the error of a value that no point can be configured with: it is the value that is wrong."""
    errors = {run.point: run.error for run in runs if run.error is not None}
    if len(errors) == len(points):
        raise ConfigError(next(iter(errors.values())))
    for at in range(len(keys)):
        for value in dict.fromkeys(point[at] for point in points):
            with_it = [number for number, point in enumerate(points) if point[at] == value]
            if all(number in errors for number in with_it):
                raise ConfigError(str(errors[with_it[0]]))


def _refuse_equal_points(keys: Sequence[str], points: Sequence[tuple[str, ...]], runs: Sequence[PlannedRun]) -> None:
    """Values that are written differently can be one (0 and 0.0, kv and KV): such points would count twice."""
    seen: dict[str, int] = {}
    for run in runs:
        if run.error is None:
            other = seen.setdefault(run.folder.rpartition("-")[2], run.point)
            if other != run.point:
                one, same = (", ".join(map("=".join, zip(keys, points[at], strict=True))) for at in (run.point, other))
                raise ConfigError(f"{one} is the same point as {same}; once is enough")


class _Files:
    """The files that runs read: looked at once, and known by their content."""

    def __init__(self) -> None:
        self._digests: dict[Path, str] = {}
        self._checked: set[object] = set()

    def check(self, config: Config) -> None:
        """Raise what a run would raise for a trace that is not there or cannot be told."""
        from traces.load import open_trace
        from twin.replay import read_options

        if config.trace.path is None:
            raise ConfigError("no trace given: pass a file, or set trace.path")
        options = read_options(config.trace)
        if (config.trace.path, options) not in self._checked:
            open_trace(config.trace.path, options)
            self._checked.add((config.trace.path, options))

    def digests(self, paths: Iterable[Path]) -> Iterator[str]:
        for path in paths:
            if path not in self._digests:
                digest = xxhash.xxh3_64()
                with path.open("rb") as file:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                self._digests[path] = digest.hexdigest()
            yield self._digests[path]


def _name(recipe: Recipe, config: Config, files: _Files, explain: bool) -> str:
    """The folder of a run, by what goes into it: a sweep that is extended finds the runs that it had before."""
    paths = [path for path in _paths(config) if path.is_file()]
    inputs = (to_plain(config), tuple(files.digests(paths)), explain)
    digest = xxhash.xxh3_64_hexdigest(repr(inputs).encode())
    shown = ",".join(f"{one.key.rpartition('.')[2]}={Path(one.value).name}" for one in recipe.varied)
    return f"{re.sub(r'[^A-Za-z0-9.,=_-]+', '_', shown)[:100]}-{digest}"


def _paths(config: Config) -> Iterator[Path]:
    """The files that a configuration names."""
    yield from (path for path in (config.trace.path, config.faults.path) if path is not None)
    for group in config.workers:
        for name, value in group.latency.params.items():
            if is_path(f"workers.latency.{name}", value):
                yield Path(str(value).partition("#")[0])
